"""What a rank is about to do, as one number that the ranks of a node compare before they do it."""

import zlib
from functools import lru_cache

import torch

from hpctrain.comm.ops import Op

_OPS = tuple(Op)
_DTYPES = tuple(
    sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str),
)
_OP_BITS, _DTYPE_BITS = 4, 8
_WORDS = 1 << 62


def bucket_call(number: int) -> int:
    """Return the number of a call on the bucket of this ``number``, counted from 1."""
    return -number


@lru_cache(maxsize=1024)
def tensor_call(op: Op, dtype: torch.dtype, numel: int) -> int:
    """Return the number of a reduction of ``numel`` elements."""
    kind = _DTYPES.index(dtype) << _OP_BITS | _OPS.index(op)
    return numel << (_OP_BITS + _DTYPE_BITS) | kind


def other_call(text: str) -> int:
    """Return the number of a call that only words describe."""
    return _WORDS | zlib.crc32(text.encode())


def describe_call(call: int) -> str:
    """Return a call on a bucket or a tensor in words."""
    if call < 0:
        return f"bucket number {-call}"
    op = _OPS[call & ((1 << _OP_BITS) - 1)]
    dtype = _DTYPES[call >> _OP_BITS & ((1 << _DTYPE_BITS) - 1)]
    numel = call >> (_OP_BITS + _DTYPE_BITS)
    return f"{op.value} of {numel} {str(dtype).removeprefix('torch.')}"
