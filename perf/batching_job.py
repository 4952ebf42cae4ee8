"""One job of ``bench_batching.py`` on the ranks of a cluster: a stream of named all-reduces.

The job creates a new world for every pair of fusion size and cycle time, as if a user had set
these variables, and a world without variables, which uses the plan.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
from measure import machine, median
from mpi4py import MPI

import hpctrain as hvd
from hpctrain.runtime.world import current

NAMES = ("HPCTRAIN_FUSION_BYTES", "HPCTRAIN_CYCLE_S")
BY_PLAN = "plan"

Choice = tuple[int, float]
Point = Choice | str
"""Fusion in bytes and cycle in seconds, or ``BY_PLAN``."""


def stream_s(point: Point, options: argparse.Namespace) -> float:
    """Return the seconds of one stream on the slowest rank. Collective.

    Tensors are submitted one after the other, with a pause between two tensors as in backward;
    then the ranks wait for all sums.
    """
    for name, value in zip(NAMES, point if point != BY_PLAN else (None, None), strict=True):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = "0" if not value else str(value)
    hvd.init()
    tensors = [torch.ones(options.bytes // 4) for _ in range(options.tensors)]
    for _ in range(2):  # the first time, names are new
        for tensor in tensors:
            tensor.fill_(1.0)
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        handles = []
        for number, tensor in enumerate(tensors):
            handles.append(hvd.allreduce_async_(tensor, name=f"tensor {number}", op=hvd.Sum))
            time.sleep(options.pause)
        for handle in handles:
            hvd.synchronize(handle)
        seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
        assert all(bool((tensor == hvd.size()).all()) for tensor in tensors)
    hvd.shutdown()
    return seconds


def timed(
    points: list[Point], rounds: int, options: argparse.Namespace
) -> dict[Point, list[float]]:
    """Time the streams of all points, interleaved. Collective."""
    seconds: dict[Point, list[float]] = {point: [] for point in points}
    for _ in range(rounds):
        for point in points:
            seconds[point].append(stream_s(point, options))
    return seconds


def chosen(probe: str) -> Choice:
    """Return fusion size and cycle time in the plan of a new world. Collective."""
    os.environ["HPCTRAIN_PROBE"] = probe
    hvd.init()
    plan = current().plan
    hvd.shutdown()
    return plan.fusion_bytes, plan.cycle_s


def main() -> None:
    """Time all points, then the best point interleaved with the choice of the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, help="in a stream")
    parser.add_argument("--bytes", type=int, help="of each tensor")
    parser.add_argument("--pause", type=float, help="seconds between two tensors")
    parser.add_argument("--fusions", type=int, nargs="+", help="bytes")
    parser.add_argument("--cycles", type=float, nargs="+", help="seconds")
    parser.add_argument("--rounds", type=int, help="turns of each point of the sweep")
    parser.add_argument("--finals", type=int, help="turns of the best and of the choice")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, second = chosen("fresh"), chosen("auto")
    points: list[Point] = [*itertools.product(options.fusions, options.cycles)]
    sweep = timed(points, options.rounds, options)
    best = MPI.COMM_WORLD.bcast(min(points, key=lambda point: median(sweep[point])))
    finals = timed([BY_PLAN, best], options.finals, options)
    if MPI.COMM_WORLD.rank == 0:
        figures = {
            "machine": machine(),
            "chosen": first,
            "chosen by the next run": second,
            "sweep": [[*point, median(seconds)] for point, seconds in sweep.items()],
            "best": best,
            "best s": median(finals[best]),
            "chosen s": median(finals[BY_PLAN]),
        }
        options.json.write_text(json.dumps(figures, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
