"""Facts that the bits of a calculation depend on beside the program and its inputs."""

import math
from collections.abc import Iterable

import torch

from hpctrain.comm.plan.planning import machine


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once; NaN where it has none, as of two infinities or beyond all."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def arithmetic(num_threads: int) -> dict[str, str]:
    """Name the processor, the library versions and the threads: equal words, equal bits.

    Args:
        num_threads: threads that an operation of torch may use.
    """
    names = ("math kernel library", "mkl-dnn", "onednn", "openmp", "blas_info")
    built = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    libraries = (line.partition(" (")[0] for line in built if line.lower().startswith(names))
    return {
        "processor": machine(1).removeprefix("1 x "),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "libraries": "; ".join(libraries),
        "threads": str(num_threads),
    }
