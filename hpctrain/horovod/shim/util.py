"""Small helpers that Horovod's modules have and scripts import."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from hpctrain.runtime import built

T = TypeVar("T")


class HorovodVersionMismatchError(ImportError):
    """Never raised here: nothing is compiled that could not fit the installed torch."""


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables in a block, and put back what was there; None leaves one alone."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_iterable(x: Any) -> bool:
    """Say whether something can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Say whether a number of ranks is a power of two; Adasum here works with any number."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Cut a sequence into ``n`` parts whose lengths differ by one at most, long ones first."""
    least, longer = divmod(len(l), n)
    starts = [i * least + min(i, longer) for i in range(n + 1)]
    return [l[start:stop] for start, stop in pairwise(starts)]


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001, FBT001, FBT002 - Horovod's
    """Say whether mpi4py is installed."""
    return built.mpi_built()


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001, FBT001, FBT002 - Horovod's
    """Say no: Gloo is not used."""
    return built.gloo_built()


def nccl_built(verbose: bool = False) -> int:  # noqa: ARG001, FBT001, FBT002 - Horovod's
    """Return the version of NCCL, 0 without."""
    return built.nccl_built()


def ddl_built(verbose: bool = False) -> bool:  # noqa: ARG001, FBT001, FBT002 - Horovod's
    """Say no: DDL is not used."""
    return built.ddl_built()


def ccl_built(verbose: bool = False) -> bool:  # noqa: ARG001, FBT001, FBT002 - Horovod's
    """Say no: oneCCL is not used."""
    return built.ccl_built()
