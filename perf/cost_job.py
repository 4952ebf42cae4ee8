"""One job of ``bench_cost.py`` on the ranks of a cluster: the algorithms of a model."""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from measure import interleave, machine
from mpi4py import MPI

import hpctrain as hvd
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail.rail import Rail
from hpctrain.compress.half import HalfCodec
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import AllreduceSpec
from hpctrain.cost.fitting import Point, write_points
from hpctrain.runtime.world import current

ALGORITHMS = ("ring", "halving")
LONG_BYTES = 16 * MIB
"""From here on calls need no warm-up, and fewer of them say as much."""
SHORT_ROUNDS = 3  # as many rounds of the others for one of the long ones
FULL_BYTES = 4 * MIB  # of shorter messages as many calls follow each other


def table(name: str) -> SizeTable:
    """Return a table that selects one algorithm for all sizes."""
    return SizeTable(((0, name),))


def measure(num_bytes: int, rounds: int) -> list[Point]:
    """Time all algorithms for one message size. Collective."""
    comm, world = current().comm, MPI.COMM_WORLD
    assert isinstance(comm, HierarchicalCommunicator)
    topology, plan = current().topology, current().plan
    bucket = comm.new_bucket(num_bytes // 4, torch.float32)
    codec, plain = HalfCodec(torch.bfloat16), torch.ones(num_bytes // 4)
    codec.prepare(bucket, (), comm)

    def two_level(spec: AllreduceSpec) -> None:
        comm.use(replace(plan, rail=table(spec.algorithm)))
        if spec.codec == "none":
            comm.allreduce_(bucket).wait()
        else:
            codec.allreduce_(bucket, comm, scale=None).wait()

    flat = {name: Rail(world.Dup(), table=table(name)) for name in ALGORITHMS}

    def work(spec: AllreduceSpec) -> Callable[[], object]:
        if spec.rails:
            return lambda: two_level(spec)
        return lambda: flat[spec.algorithm].allreduce_(plain).wait()

    specs = [
        AllreduceSpec(name, *how)
        for name in ALGORITHMS
        for how in ((comm.num_rails, "none"), (comm.num_rails, "bf16"), (0, "none"))
    ]

    def write() -> None:
        bucket.flat.fill_(1)
        plain.fill_(1)

    is_long = num_bytes >= LONG_BYTES
    seconds = interleave(
        {str(spec): work(spec) for spec in specs},
        rounds=rounds if is_long else SHORT_ROUNDS * rounds,
        repetitions=max(1, FULL_BYTES // num_bytes),
        prepare=write,
        warm_up=int(not is_long),
    )
    for rail in flat.values():
        rail.close()
    return [
        Point(
            nodes=topology.num_nodes,
            ranks_per_node=topology.size // topology.num_nodes,
            **asdict(spec),
            ranks_per_core=topology.size / (os.cpu_count() or 1),  # of all nodes: one machine
            num_bytes=num_bytes,
            seconds=min(seconds[str(spec)]),  # others who use this machine only add
        )
        for spec in specs
    ]


def main() -> None:
    """Measure all sizes and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of the messages")
    parser.add_argument("--rounds", type=int, help="rounds of each algorithm")
    parser.add_argument("--json", type=Path, help="file for the points")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    points = [point for size in options.sizes for point in measure(size, options.rounds)]
    if hvd.rank() == 0:
        write_points(options.json, points, machine=machine())


if __name__ == "__main__":
    main()
