"""One job of ``bench_engines.py``: the same program for every engine.

    mpirun -np 2 python perf/engines_job.py hpctrain|horovod.torch|ddp|mpi|none --json FILE

With each engine a rank has one torch thread, sums in place in an ordinary tensor with the same
name in every call, and runs the training step of ``bench_step.py``. A barrier of mpi4py precedes
each measurement. ``none`` runs the step without communication, ``ddp`` with
DistributedDataParallel over gloo, and ``mpi`` sums each gradient with MPI_Allreduce.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_step import MLP, plain, views
from measure import Seconds, interleave, machine, median
from mpi4py import MPI
from peers import start_gloo
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.comm.plan.plan import SizeTable
from hpctrain.core.units import KIB, MIB
from hpctrain.runtime.world import current

WORLD = MPI.COMM_WORLD

SILENT = ("none", "ddp", "mpi")
"""Packages without an API for named operations."""

WEIGHTS_DIFFER = 1e-6
"""At most, after one step: float32 sums of other orders, times the learning rate."""


def start(package: str, engine: str | None, algorithm: str | None) -> Any:
    """Import and start the package; hpctrain on Horovod sums by ``algorithm``. Collective.

    Returns:
        The module; None for methods without a package.
    """
    if package in SILENT:
        return None
    hvd = importlib.import_module(package)
    if engine is None:
        hvd.init()
    else:
        hvd.init(engine=engine)
        require(current().plan.engine == engine, f"the engine is not {engine}")
        if algorithm is not None:
            current().sets.everyone.inside.sums.table = SizeTable(((0, algorithm),))
    require(hvd.size() == WORLD.size, f"the world has {hvd.size()} ranks, not {WORLD.size}")
    return hvd


def require(holds: object, problem: str) -> None:
    """End all ranks if a condition is false on one rank."""
    if not holds:
        sys.stderr.write(f"rank {WORLD.rank}: {problem}\n")
        WORLD.Abort(1)


def repetitions(num_bytes: int, most_bytes: int) -> int:
    """Return the number of counted calls in a round: fewer for long calls."""
    return max(1, min(30, most_bytes // num_bytes))


def sums(hvd: Any, num_bytes: int, count: int) -> Seconds:
    """Time the sum of a tensor over all ranks, and check the first and the last sum."""
    tensor = torch.zeros(num_bytes // 4)
    total = WORLD.size * (WORLD.size + 1) / 2

    def write() -> None:
        tensor.fill_(WORLD.rank + 1)

    def sum_() -> None:
        hvd.allreduce_(tensor, name=f"sum of {num_bytes}", op=hvd.Sum)

    def check() -> None:
        require((tensor == total).all(), f"the sum of {num_bytes} bytes is wrong")

    write()
    sum_()
    check()
    seconds = interleave({"sum": sum_}, rounds=1, repetitions=count, prepare=write)["sum"]
    check()
    return seconds


def averaging(
    package: str, hvd: Any, shard: str | None
) -> tuple[torch.nn.Module, Any, Callable[[], None]]:
    """Return the model, and a step that averages its gradients over all ranks."""
    model = MLP.make_model()
    if package == "mpi":
        optimizer: Any = AveragingByMpi(model)
    elif package == "ddp":
        start_gloo()
        model = DistributedDataParallel(model)
        optimizer = MLP.optimizer(model.parameters())
    else:
        options = {"shard": shard} if shard else {}
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(
            MLP.optimizer(model.parameters()), named_parameters=named, **options
        )
    return model, optimizer, MLP.make_step(model, optimizer, optimizer.zero_grad)


class AveragingByMpi:
    """Optimizer that averages each gradient with MPI before the step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._optimizer = model, MLP.optimizer(model.parameters())
        self.zero_grad = self._optimizer.zero_grad

    def step(self) -> None:
        """Average the gradients, and step."""
        for parameter in self._model.parameters():
            WORLD.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            parameter.grad /= WORLD.size
        self._optimizer.step()


def weights_after_a_step() -> list[Tensor]:
    """Return the weights after a step with gradients averaged by MPI. Collective."""
    model, _, step = averaging("mpi", None, None)
    step()
    return [parameter.detach() for parameter in model.parameters()]


def steps(package: str, hvd: Any, options: argparse.Namespace) -> dict[str, Seconds]:
    """Time training steps (in two forms without an engine), and exposed communication."""
    count, warm_up = options.steps, options.warm_up
    if package == "none":
        silent = {"plain": plain(MLP), "views": views(MLP)}
        return interleave(silent, rounds=1, repetitions=count, warm_up=warm_up)
    expected = weights_after_a_step()
    model, optimizer, step = averaging(package, hvd, options.shard)
    step()
    differ = max(
        float((weights.detach() - right).abs().max())
        for weights, right in zip(model.parameters(), expected, strict=True)
    )
    require(differ <= WEIGHTS_DIFFER, f"weights differ by {differ} after a step")
    del expected
    exposed: list[float] = []

    def clocked() -> None:
        step()
        exposed.append(getattr(optimizer, "communication_seconds", 0.0))

    found = interleave({"step": clocked}, rounds=1, repetitions=count, warm_up=warm_up)
    options.exposed = max(WORLD.allgather(median(exposed[-count:])))
    return found


def facts(package: str) -> dict[str, Any]:
    """Return the measurements and the machine."""
    found: dict[str, Any] = {"machine": machine()}
    if package == "hpctrain":
        found["plan"] = dict(current().plan.describe())
    if package == "horovod.torch":
        found["horovod"] = importlib.import_module("horovod").__version__
    return found


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=("hpctrain", "horovod.torch", *SILENT))
    parser.add_argument("--shard", help="of hpctrain's optimizer")
    parser.add_argument("--engine", help="what hpctrain is to run on")
    parser.add_argument("--algorithm", help="of sums of hpctrain on Horovod, by default measured")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4 * KIB], help="bytes")
    parser.add_argument("--most-bytes", type=int, default=64 * MIB, help="counted for each size")
    parser.add_argument("--steps", type=int, default=6, help="counted training steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    options = parser.parse_args()
    hvd = start(options.package, options.engine, options.algorithm)
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "sums": {
            size: sums(hvd, size, repetitions(size, options.most_bytes))
            for size in (options.sizes if hvd else ())
        },
        "steps": steps(options.package, hvd, options),
        "exposed": getattr(options, "exposed", 0.0),
        **facts(options.package),
    }
    if WORLD.rank == 0:
        options.json.write_text(json.dumps(found, default=str), encoding="utf-8")
    if hvd:
        hvd.shutdown()


if __name__ == "__main__":
    main()
