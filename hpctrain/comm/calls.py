"""A number for a rank's next call, which the ranks of a node compare before they make it."""

import zlib
from functools import lru_cache

import torch

from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of

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
