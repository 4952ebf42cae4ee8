"""All-reduce between nodes: hpctrain against MPI_Allreduce and gloo, on a virtual cluster.

    python perf/bench_network.py [--quick] [--mpi openmpi mpich] [--json FILE]
    python perf/bench_network.py --shapes 2x2 --rates 1gbit --json FILE     # replaces these rows

Nodes are namespaces of this machine, joined by links of a set rate. The program needs root;
``python -m tests.cluster.vcluster`` reports whether it works on this machine. All methods are
interleaved in one job, on the same kind of torch memory; MPI_Allreduce runs with both orders of
ranks. Times are medians of the slowest rank. The line time is the time that the links need if
every node sends the minimum, 2 (N - 1) / N times the message for N nodes. Ratios are the time of
the best peer over that of hpctrain: above 1 hpctrain is faster.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import with_kept
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.core.units import KIB, MIB, format_bytes
from tests.cluster.vcluster import VirtualCluster

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((2, 2), (3, 2), (4, 2))
"""Nodes, and ranks of each."""
RATES = ("200mbit", "1gbit")
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
OURS = ("bucket", "tensor", "named")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job on one cluster."""

    mpi: str
    num_nodes: int
    ranks_per_node: int
    rate: str

    @property
    def cluster(self) -> str:
        """Numbers of nodes and ranks, as text."""
        return f"{self.num_nodes} nodes x {self.ranks_per_node}"

    def line_s(self, num_bytes: int) -> float:
        """Return the time that the links need for a message."""
        must_send = 2 * (self.num_nodes - 1) / self.num_nodes * num_bytes
        return must_send * 8 / bits_per_s(self.rate)


def bits_per_s(rate: str) -> float:
    """Parse a rate in the format of ``tc``, such as ``1gbit``."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate must be a number with kbit, mbit or gbit, got {rate!r}")


def shape(text: str) -> tuple[int, ...]:
    """Parse the numbers of nodes and of ranks per node, such as ``4x2``."""
    num_nodes, ranks = text.split("x")
    return int(num_nodes), int(ranks)


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the jobs that the options select."""
    for mpi in options.mpi:
        for rate in options.rates:
            for num_nodes, ranks in options.shapes:
                yield Job(mpi=mpi, num_nodes=num_nodes, ranks_per_node=ranks, rate=rate)


def run(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Build the cluster, run the job and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(ROOT / "perf/network_job.py"), "--json", str(file)]
        words += ["--rounds", str(options.rounds), "--sizes", *map(str, options.sizes)]
        with VirtualCluster(
            nodes=job.num_nodes, rate=job.rate, latency=options.latency
        ) as cluster:
            done = cluster.run(
                words,
                ranks_per_node=[job.ranks_per_node] * job.num_nodes,
                mpi=job.mpi,
                env={"GLOO_SOCKET_IFNAME": "eth0", "HPCTRAIN_PROBE": "fresh"},
                timeout_s=options.timeout,
            )
        if done.returncode:
            raise SystemExit(f"{job} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text(encoding="utf-8"))


def results_of(job: Job, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record for each size."""
    results = []
    for row in figures["rows"]:
        seconds = row["seconds"]
        best = min((s, name) for name, s in seconds.items() if name not in OURS)
        results.append(
            {
                "mpi": job.mpi,
                "cluster": job.cluster,
                "nodes": job.num_nodes,
                "ranks per node": job.ranks_per_node,
                "rate": job.rate,
                "line s": job.line_s(row["bytes"]),
                "date": figures["machine"]["date"],
                "best peer": best[1],
                **{f"best peer / {name}": best[0] / seconds[name] for name in OURS},
                **row,
                "plan": figures["plan"],
            }
        )
    return results


def show(console: Console, results: list[dict[str, Any]]) -> None:
    """Print a table of the results of one job."""
    first = results[0]
    names = list(first["seconds"])
    title = f"{first['mpi']}, {first['cluster']} ranks, {first['rate']}: milliseconds"
    table = Table(title=title, title_justify="left", title_style="bold")
    heads = ["message", "line time", *names, *(f"best peer / {name}" for name in OURS)]
    for head in heads:
        table.add_column(head, justify="right")
    for result in results:
        table.add_row(
            format_bytes(result["bytes"]),
            f"{result['line s'] * 1e3:.2f}",
            *(f"{result['seconds'][name] * 1e3:.2f}" for name in names),
            *(f"{result[f'best peer / {name}']:.2f}" for name in OURS),
        )
    last = results[-1]
    table.add_section()
    sent = (f"{last['bytes out'][name]:.2f}" for name in names)
    least = 2 * (last["nodes"] - 1) / last["nodes"]
    table.add_row("bytes out / message", f"{least:.2f}", *sent, "", "")
    console.print(table)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one small cluster, for a test of the program"
    )
    parser.add_argument("--mpi", nargs="+", default=["openmpi"], choices=("openmpi", "mpich"))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=shape, help="such as 4x2")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, as tc has them")
    parser.add_argument("--latency", help="of every link, such as 50us; none by default")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each method")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.rates, options.rounds = SHAPES[:1], RATES[-1:], 5
        options.sizes = SIZES[:2]
    return options


def main() -> None:
    """Run all jobs; print and write the results."""
    options = arguments()
    console = Console(width=150, height=50, highlight=False)
    results: list[dict[str, Any]] = []
    is_new = options.json is None or not options.json.exists()
    machine: dict[str, Any] = {} if is_new else json.loads(options.json.read_text())["machine"]
    for job in jobs(options):
        figures = run(job, options)
        results += (of_job := results_of(job, figures))
        machine.setdefault(job.mpi, figures["machine"])
        show(console, of_job)
    if options.json:
        written = with_kept(results, options.json, ("mpi", "cluster", "rate"))
        text = json.dumps({"machine": machine, "results": written}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
