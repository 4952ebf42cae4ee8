"""A Triton kernel that sums a slice over the buckets of all accelerators of a node, in place.

Operations of torch would write and read the sum once per peer. The kernel reads each element of
all ranks once, sums in registers, and writes the sum to all ranks. 16-bit values are summed in
float32, in the order of ranks, then scaled and rounded once, so that results are bitwise identical
to results of ``combine_to``. The kernel requires Triton, which torch for CUDA installs, and a C
compiler.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpctrain.comm.ops import Combination, Op

_LOG = logging.getLogger(__name__)

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_VECTOR_BYTES = 16  # size of a load of one thread
_BLOCK_BYTES = 256 * _VECTOR_BYTES
_NUM_WARPS = 4


def _sum_slices(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton kernel
    pointers,  # int64: address of the slice of each rank
    numel,
    scale,
    num_ranks: tl.constexpr,
    dtype: tl.constexpr,
    align: tl.constexpr,
    block: tl.constexpr,
):
    """Sum one block of the slice over all ranks, and write the sum to all ranks."""
    first = tl.program_id(0).to(tl.int64) * block
    places = first + tl.arange(0, block)
    if first + block <= numel:  # loads without a mask have full width
        total = tl.zeros((block,), tl.float32)
        for rank in tl.static_range(num_ranks):
            own = tl.load(pointers + rank).to(tl.pointer_type(dtype))
            own = tl.multiple_of(own, align)
            values = tl.load(own + places).to(tl.float32)
            total = values if rank == 0 else total + values
        rounded = (total * scale).to(dtype)
        for rank in tl.static_range(num_ranks):
            own = tl.load(pointers + rank).to(tl.pointer_type(dtype))
            own = tl.multiple_of(own, align)
            tl.store(own + places, rounded)
    else:
        is_there = places < numel
        total = tl.zeros((block,), tl.float32)
        for rank in tl.static_range(num_ranks):
            own = tl.load(pointers + rank).to(tl.pointer_type(dtype))
            values = tl.load(own + places, mask=is_there, other=0.0).to(tl.float32)
            total = values if rank == 0 else total + values
        rounded = (total * scale).to(dtype)
        for rank in tl.static_range(num_ranks):
            own = tl.load(pointers + rank).to(tl.pointer_type(dtype))
            tl.store(own + places, rounded, mask=is_there)


sum_slices: Any = triton.jit(_sum_slices, do_not_specialize=["numel"])


class SliceSum:
    """Launches the kernel that replaces each of ``parts`` by the sum of all ``parts``.

    Args:
        parts: slices of all ranks, by rank, whose memory must not move.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        first = parts[0]
        addresses = [part.data_ptr() for part in parts]
        self._pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        self._numel = first.numel()
        self._block = _BLOCK_BYTES // first.itemsize
        is_aligned = all(address % _VECTOR_BYTES == 0 for address in addresses)
        self.constants = {
            "num_ranks": len(parts),
            "dtype": _TYPES[first.dtype],
            "align": _VECTOR_BYTES if is_aligned else first.itemsize,
            "block": self._block,
        }
        self._keeps = tuple(parts)

    def __call__(self, scale: float | None) -> None:
        """Queue the sum, times ``scale``, on the current stream."""
        grid = (-(-self._numel // self._block),)
        factor = 1.0 if scale is None else scale
        sum_slices[grid](
            self._pointers, self._numel, factor, **self.constants, num_warps=_NUM_WARPS
        )


def slice_sum_of(parts: Sequence[Tensor], how: Combination) -> SliceSum | None:
    """Compile the kernel for ``parts``; return None if the kernel cannot compute this sum.

    Some ranks may get None and sum with torch, whose sums are bitwise identical.
    """
    if how.op is not Op.SUM or parts[0].dtype not in _TYPES or not parts[0].numel():
        return None
    made = SliceSum(parts)
    refusal = _refusal(parts[0].device, **made.constants)
    if refusal:
        _LOG.info("operations of torch compute sums on %s: %s", parts[0].device, refusal)
    return None if refusal else made


@cache
def _refusal(device: torch.device, **constants: Any) -> str:
    """Compile the kernel by a run on zero elements; return the error, or an empty text."""
    here: AbstractContextManager[object]
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    nowhere = torch.zeros(constants["num_ranks"], dtype=torch.int64, device=device)
    try:
        with here:
            sum_slices[(1,)](nowhere, 0, 1.0, **constants, num_warps=_NUM_WARPS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
