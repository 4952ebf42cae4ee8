"""The ranks meet before they do something, and see that all are about to do the same."""

import zlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.agreement import by_rank
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.watch import Watch
from hpctrain.core.errors import MismatchError


def meet(comm: MPI.Intracomm, call: str, watch: Watch) -> None:
    """Return when every rank is here; sleep meanwhile and look for lost ranks. Collective.

    Args:
        comm: the ranks.
        call: what this rank is about to do. A number of it is compared, which costs no more
            messages than a barrier.
        watch: looks at the others during waits.

    Raises:
        MismatchError: another rank is about to do something else; on every rank.
    """
    number = zlib.crc32(call.encode())
    extremes = np.array([number, -number], np.int64)
    wait_request(comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX), watch)
    if extremes[0] == -extremes[1]:
        return
    raise disagreement(comm.allgather(call))


def disagreement(calls: Sequence[str]) -> MismatchError:
    """Return the error for ranks that are about to make different ``calls``, given by rank."""
    return MismatchError(
        f"ranks must make the same calls in the same order, got {by_rank(calls)}; let every rank "
        f"take the same way through the program, with tensors of the same shape and dtype"
    )


def describe(tensor: Tensor, op: Op | None = None, scale: float | None = None) -> str:
    """Return what the ranks must have in common: ``sum of 10 float32 times 0.5``."""
    text = f"{tensor.numel()} {name_of(tensor.dtype)}"
    if op is not None:
        text = f"{op.value} of {text}"
    return text if scale is None else f"{text} times {scale}"
