"""The ranks meet before they do something, and see that all are about to do the same."""

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.agreement import by_rank
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.waiting import Watch, wait_request
from hpctrain.core.errors import MismatchError

_OPS = tuple(Op)
_DTYPES = tuple(
    sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str),
)
_OP_BITS, _SCALE_BITS, _DTYPE_BITS = 4, 16, 8
_WORDS = 1 << 62


@lru_cache(maxsize=1024)
def bucket_call(number: int, op: Op = Op.SUM, scale: float | None = None) -> int:
    """Return the number of a reduction of the bucket of this ``number``, counted from 1."""
    return -(number << (_SCALE_BITS + _OP_BITS) | _how(op, scale))


@lru_cache(maxsize=1024)
def tensor_call(op: Op, dtype: torch.dtype, numel: int, scale: float | None = None) -> int:
    """Return the number of a reduction of ``numel`` elements."""
    kind = _DTYPES.index(dtype) << (_SCALE_BITS + _OP_BITS) | _how(op, scale)
    return numel << (_DTYPE_BITS + _SCALE_BITS + _OP_BITS) | kind


def other_call(text: str) -> int:
    """Return the number of a call that only words describe."""
    return _WORDS | zlib.crc32(text.encode())


def describe_call(call: int) -> str:
    """Return a call on a bucket or a tensor in words."""
    number = abs(call)
    op = _OPS[number & ((1 << _OP_BITS) - 1)]
    factor = number >> _OP_BITS & ((1 << _SCALE_BITS) - 1)
    number >>= _SCALE_BITS + _OP_BITS
    scaled = f", by a factor (number {factor:04x})" if factor else ""
    if call < 0:
        return f"{op.value} of bucket number {number}{scaled}"
    dtype = _DTYPES[number & ((1 << _DTYPE_BITS) - 1)]
    return f"{op.value} of {number >> _DTYPE_BITS} {name_of(dtype)}{scaled}"


def _how(op: Op, scale: float | None) -> int:
    """Put an operation and what tells factors apart into one number."""
    factor = (
        0 if scale is None else zlib.crc32(repr(scale).encode()) % ((1 << _SCALE_BITS) - 1) + 1
    )
    return factor << _OP_BITS | _OPS.index(op)


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
