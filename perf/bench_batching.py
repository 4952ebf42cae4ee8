"""Fusion and cycle of named operations: the choice of the plan against a sweep of both.

    python perf/bench_batching.py [--quick] [--json FILE]

The cluster has two virtual nodes of one rank each, as in ``bench_network.py``. The job times a
stream of small all-reduces for every pair of fusion and cycle, then interleaves the best pair and
the choice of the plan. The ratio is the time of the choice over that of the best pair; it must be
at most 1.1.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.core.units import KIB, MIB, format_bytes, format_seconds
from tests.cluster.vcluster import VirtualCluster

ROOT = Path(__file__).resolve().parents[1]
RATES = ("200mbit", "1gbit")
FUSIONS = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB)
CYCLES = (0.0, 0.25e-3, 1e-3, 4e-3, 16e-3)


def run(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Build the cluster, run the job and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(ROOT / "perf/batching_job.py"), "--json", str(file)]
        for name in ("tensors", "bytes", "pause", "fusions", "cycles", "rounds", "finals"):
            value = getattr(options, name)
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
        with VirtualCluster(nodes=2, rate=rate) as cluster:
            done = cluster.run(words, env={"XDG_CACHE_HOME": folder}, timeout_s=options.timeout)
        if done.returncode:
            raise SystemExit(f"{rate} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text(encoding="utf-8"))


def words_of(fusion_bytes: float, cycle_s: float) -> str:
    """Return fusion size and cycle time as text."""
    return f"{format_bytes(int(fusion_bytes))}, {format_seconds(cycle_s) if cycle_s else 'none'}"


def show(console: Console, rate: str, figures: dict[str, Any]) -> None:
    """Print the sweep and the comparison of one link."""
    table = Table(title=f"{rate}: milliseconds", title_justify="left", title_style="bold")
    cycles = sorted({cycle for _, cycle, _ in figures["sweep"]})
    table.add_column("fusion / cycle", justify="right")
    for cycle in cycles:
        table.add_column(format_seconds(cycle) if cycle else "none", justify="right")
    times = {(fusion, cycle): seconds for fusion, cycle, seconds in figures["sweep"]}
    for fusion in sorted({fusion for fusion, _ in times}):
        cells = (f"{times[fusion, cycle] * 1e3:.1f}" for cycle in cycles)
        table.add_row(format_bytes(int(fusion)), *cells)
    console.print(table)
    console.print(
        f"chosen: {words_of(*figures['chosen'])}; by the next run: "
        f"{words_of(*figures['chosen by the next run'])}; best: {words_of(*figures['best'])}"
    )
    ratio = figures["chosen s"] / figures["best s"]
    console.print(
        f"interleaved: chosen {figures['chosen s'] * 1e3:.1f} ms, "
        f"best {figures['best s'] * 1e3:.1f} ms, ratio {ratio:.2f}"
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small sweep, to see it work")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, as tc has them")
    parser.add_argument("--tensors", type=int, default=200, help="in a stream")
    parser.add_argument("--bytes", type=int, default=64 * KIB, help="of each tensor")
    parser.add_argument("--pause", type=float, default=100e-6, help="seconds between two tensors")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each pair of the sweep")
    parser.add_argument("--finals", type=int, default=9, help="turns of the best and the choice")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one link")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    options.fusions, options.cycles = FUSIONS, CYCLES
    if options.quick:
        options.fusions, options.cycles = FUSIONS[:3], CYCLES[:2]
        options.rounds, options.finals = 1, 3
    return options


def main() -> None:
    """Run one job for each link; print and write the results."""
    options = arguments()
    console = Console(width=150, height=50, highlight=False)
    results = {}
    for rate in options.rates:
        results[rate] = run(rate, options)
        show(console, rate, results[rate])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
