"""torch.distributed between nodes: backend of hpctrain against gloo and MPI, virtual cluster.

    python perf/bench_torch_network.py [--shapes 2x2 4x2] [--rate 1gbit] [--json FILE]

Nodes are as in ``bench_network.py``, and all methods are interleaved in one job. A message of
float32 is the input of an all_reduce or reduce_scatter, and the output of an all_gather. Times are
medians, of the slowest rank; ``bytes out`` is the number of bytes that leave the busiest node for
each byte of the message, of which all methods need ``least``.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_network import shape
from measure import interleave, machine, median
from mpi4py import MPI
from network_job import bytes_out
from rich.console import Console
from rich.table import Table

import hpctrain
from hpctrain.core.units import MIB

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

ROUNDS = 5

Call = Callable[[], object]

# Their names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def methods(num_bytes: int, groups: Mapping[str, dist.ProcessGroup]) -> dict[str, dict[str, Call]]:
    """Return for each operation the calls of MPI and of each backend."""
    world, size = MPI.COMM_WORLD, dist.get_world_size()
    whole = torch.zeros(num_bytes // 4 // size * size)
    part = torch.zeros(whole.numel() // size)
    all_of, one = (
        [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), MPI.FLOAT] for t in (whole, part)
    )
    calls: dict[str, dict[str, Call]] = {
        "all_reduce": {"MPI": partial(world.Allreduce, MPI.IN_PLACE, all_of)},
        "all_gather": {"MPI": partial(world.Allgather, one, all_of)},
        "reduce_scatter": {"MPI": partial(world.Reduce_scatter_block, all_of, one)},
    }
    for name, group in groups.items():
        calls["all_reduce"][name] = partial(dist.all_reduce, whole, group=group)
        calls["all_gather"][name] = partial(all_gather_single, whole, part, group=group)
        calls["reduce_scatter"][name] = partial(reduce_scatter_single, part, whole, group=group)
    return calls


def job(num_bytes: int, file: Path) -> None:
    """Measure on the ranks of a cluster, and write the results. Collective."""
    hpctrain.init()
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain")
    size = dist.get_world_size()
    gloo = dist.new_group(range(size), backend="gloo", timeout=timedelta(minutes=5))
    ours = dist.new_group(range(size))
    rows = []
    for operation, calls in methods(num_bytes, {"hpctrain": ours, "gloo": gloo}).items():
        seconds = interleave(calls, rounds=ROUNDS, repetitions=1)
        counted = {name: bytes_out(call, num_bytes) for name, call in calls.items()}
        rows.append({"operation": operation, "all seconds": seconds, "bytes out": counted})
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"machine": machine(), "rows": rows}), encoding="utf-8")
    dist.destroy_process_group()


def run(nodes: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Build a cluster, run the job there and return its results."""
    from tests.cluster.vcluster import VirtualCluster  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(Path(__file__).resolve()), "--job", str(file)]
        words += ["--bytes", str(options.bytes)]
        with VirtualCluster(nodes=nodes, rate=options.rate) as cluster:
            done = cluster.run(
                words,
                ranks_per_node=[ranks] * nodes,
                env={"GLOO_SOCKET_IFNAME": "eth0", "HPCTRAIN_PROBE": "fresh"},
                timeout_s=250,
            )
        if done.returncode:
            raise SystemExit(f"{nodes}x{ranks} ended with {done.returncode}:\n{done.stderr}")
        found = json.loads(file.read_text(encoding="utf-8"))
    for row in found["rows"]:
        row |= {"cluster": f"{nodes} nodes x {ranks}", "rate": options.rate}
        share = 2 if row["operation"] == "all_reduce" else 1
        row["least"] = share * (nodes - 1) / nodes
        row["seconds"] = {name: median(times) for name, times in row["all seconds"].items()}
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table with milliseconds and bytes of each operation."""
    names = list(rows[0]["seconds"])
    heads = ["cluster", "operation", *(f"{name} ms" for name in names), "least"]
    table = Table(*heads, *(f"{name} bytes out" for name in names))
    for row in rows:
        times = (f"{row['seconds'][name] * 1e3:.0f}" for name in names)
        sent = (f"{row['bytes out'][name]:.2f}" for name in names)
        table.add_row(row["cluster"], row["operation"], *times, f"{row['least']:.2f}", *sent)
    Console(width=150, highlight=False).print(table)


def main() -> None:
    """Measure all shapes, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=((2, 2), (4, 2)), type=shape)
    parser.add_argument("--rate", default="1gbit", help="of the links, as tc has it")
    parser.add_argument("--bytes", type=int, default=16 * MIB, help="of a message")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.bytes, options.job)
        return
    found = [run(nodes, ranks, options) for nodes, ranks in options.shapes]
    rows = [row for each in found for row in each["rows"]]
    show(rows)
    if options.json:
        text = json.dumps({"machine": found[0]["machine"], "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
