"""Reduction operations, and the dtypes in which they are computed."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import CommError
from hpctrain.core.torch_compat import FLOAT8


class Op(enum.Enum):
    """Operation that combines the values of all ranks."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "bitwise and"
    BOR = "bitwise or"
    BXOR = "bitwise xor"

    __hash__ = object.__hash__  # faster than ``Enum.__hash__``, which is a Python function


_Function = Callable[..., Tensor]  # function of two tensors, with the argument ``out``

_ARITHMETIC: dict[Op, _Function] = {Op.SUM: torch.add, Op.PRODUCT: torch.mul}
_ORDER: dict[Op, _Function] = {Op.MIN: torch.minimum, Op.MAX: torch.maximum}
_BITWISE: dict[Op, _Function] = {
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
_LOGICAL: dict[Op, _Function] = _BITWISE | {
    Op.SUM: torch.bitwise_or,
    Op.MAX: torch.bitwise_or,
    Op.PRODUCT: torch.bitwise_and,
    Op.MIN: torch.bitwise_and,
}

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""Integer dtypes with full arithmetic in torch."""
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_WIDE = {torch.complex32: torch.complex64} | dict.fromkeys(_HALVES + FLOAT8, torch.float32)
_KERNEL_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_KERNEL_NUMBERS |= {torch.int8: 4, torch.uint8: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7}
_KERNEL_NUMBERS |= {torch.bool: 8}
_SCALE_ELEMENTS = 1 << 16  # elements scaled and rounded at a time, which fit the cache


@dataclass(frozen=True, eq=False, slots=True)
class Combination:
    """Combines values of one dtype by one operation.

    NaN is propagated; integers wrap around and never saturate. Zeros of both signs and all NaN
    count as equal, so results are bitwise identical only if ranks combine tensors in the same
    order.
    """

    op: Op
    storage_dtype: torch.dtype
    """dtype of the numbers into which the stored bytes are divided, see ``view``. For the sum, a
    complex number is two real numbers."""
    accumulate_dtype: torch.dtype
    """dtype of intermediate results, which are rounded once; ``storage_dtype`` if a wider dtype
    is not more accurate."""
    function: _Function = field(repr=False)  # of two tensors of ``accumulate_dtype``
    kernel_number: int = -1  # number of this sum in ``kernel.c``; -1 if none

    def view(self, flat: Tensor) -> Tensor:
        """Return a 1-D tensor viewed as ``storage_dtype``."""
        return flat if flat.dtype is self.storage_dtype else flat.view(self.storage_dtype)

    def numel(self, tensor: Tensor) -> int:
        """Return the number of values of ``storage_dtype`` in a tensor."""
        return tensor.numel() * tensor.itemsize // self.storage_dtype.itemsize

    def into(self, total: Tensor, other: Tensor) -> None:
        """Replace ``total`` by ``total (op) other``.

        Both are 1-D, and each has ``storage_dtype`` or ``accumulate_dtype``.
        """
        if total.dtype == self.accumulate_dtype:
            self.function(total, other.to(self.accumulate_dtype), out=total)
        elif total.dtype == other.dtype and self.storage_dtype in _HALVES:
            self.function(total, other, out=total)  # torch computes in float32 and rounds once
        else:
            wide = total.to(self.accumulate_dtype)
            total.copy_(self.function(wide, other.to(self.accumulate_dtype), out=wide))

    def widened(self) -> "Combination":
        """Return the same operation for values that were converted to ``accumulate_dtype``."""
        return replace(self, storage_dtype=self.accumulate_dtype)


@cache
def combination(dtype: torch.dtype, op: Op) -> Combination:
    """Return the ``Combination`` for values of ``dtype`` and operation ``op``.

    Raises:
        CommError: ``op`` is not defined for ``dtype``.
    """
    functions, lane = _functions(dtype), dtype
    if op not in functions:
        raise CommError(_refusal(dtype, op))
    if dtype in _UNSIGNED:
        lane = _UNSIGNED[dtype]
    elif dtype in _COMPLEX and op is Op.SUM:
        lane = _COMPLEX[dtype]
    exact = op in _ORDER and dtype in _HALVES
    wide = lane if exact else _WIDE.get(lane, lane)
    number = _KERNEL_NUMBERS.get(lane, -1) if op is Op.SUM else -1
    return Combination(op, lane, wide, functions[op], number)


def scale_(values: Tensor, factor: float) -> None:
    """Multiply floating-point or complex ``values`` by ``factor``, rounding once."""
    if values.dtype in FLOAT8:  # torch has no multiplication for float8
        values.copy_(values.to(torch.float32).mul_(factor))
    else:
        values.mul_(factor)


def finish(total: Tensor, scale: float | None, out: Tensor) -> None:
    """Store ``total`` times ``scale`` in ``out``, in one pass over both."""
    if total is out:
        if scale is not None:
            out.mul_(scale)
        return
    for wide, piece in zip(total.split(_SCALE_ELEMENTS), out.split(_SCALE_ELEMENTS), strict=True):
        piece.copy_(wide if scale is None else wide.mul_(scale))


def _functions(dtype: torch.dtype) -> dict[Op, _Function]:
    if dtype is torch.bool:
        return _LOGICAL
    if dtype in _SIGNED:
        return _ARITHMETIC | _ORDER | _BITWISE
    if dtype in _UNSIGNED:
        return _ARITHMETIC | _UNSIGNED_ORDER | _BITWISE
    if dtype in _FLOATS + _HALVES + FLOAT8:
        return _ARITHMETIC | _ORDER
    if dtype in _COMPLEX:
        return _ARITHMETIC
    return {}


def _refusal(dtype: torch.dtype, op: Op) -> str:
    name = name_of(dtype)
    if dtype in _COMPLEX and op in _ORDER:
        return f"{op.value} must be of ordered values, got {name}; use view_as_real of the tensor"
    if _functions(dtype):
        return f"{op.value} must be of integers or bool, got {name}; view it as integers first"
    return (
        f"{op.value} over ranks must be of numbers or bool, got {name}; convert the tensor first"
    )


def _order_of_unsigned(
    function: _Function, first: Tensor, second: Tensor, *, out: Tensor
) -> Tensor:
    """Apply ``function`` in unsigned order to signed storage, by flipping the sign bit."""
    sign = torch.iinfo(out.dtype).min
    function(first ^ sign, second ^ sign, out=out)
    return out.bitwise_xor_(sign)


_UNSIGNED_ORDER: dict[Op, _Function] = {
    op: partial(_order_of_unsigned, function) for op, function in _ORDER.items()
}


def scaled_when(scale: float | None, how: Combination) -> tuple[float | None, float | None]:
    """Return the factors of the sum within a node, and of the sum over nodes.

    One factor is ``scale``, the other is None. For dtypes of at most 16 bits, ``scale`` is the
    first factor: the stored sum of a node could overflow although the average does not.
    """
    could_overflow = how.op is Op.SUM and how.accumulate_dtype is not how.storage_dtype
    return (scale, None) if could_overflow else (None, scale)


def combine(parts: Sequence[Tensor], combination: Combination, scale: float | None) -> Tensor:
    """Return the combination of the chunks of all ranks, in rank order, times ``scale``.

    The result is the first chunk, overwritten, or a new tensor of a wider ``accumulate_dtype``.
    """
    first, *others = (combination.view(part) for part in parts)
    dtype = combination.accumulate_dtype
    total = first if dtype is first.dtype else first.to(dtype)
    for other in others:
        combination.into(total, other)
    return total if scale is None else total.mul_(scale)


def combine_to(
    out: Tensor, parts: Sequence[Tensor], combination: Combination, scale: float | None
) -> None:
    """Store in ``out`` the combination of the chunks in rank order, times ``scale``.

    ``out`` may be one of the first two chunks. If ``out`` has the wider ``accumulate_dtype``, the
    result is not rounded.
    """
    dtype = combination.accumulate_dtype
    if dtype is not combination.storage_dtype or len(parts) == 1:
        is_wide = out.dtype is dtype is not combination.storage_dtype
        total = out.copy_(parts[0]) if is_wide else parts[0].to(dtype, copy=True)
        for other in parts[1:]:
            combination.into(total, other)
        total = total if scale is None else total.mul_(scale)
        if not is_wide:
            out.copy_(total)
        return
    combination.function(parts[0], parts[1], out=out)
    for other in parts[2:]:
        combination.into(out, other)
    if scale is not None:
        out.mul_(scale)


def spread(total: Tensor, parts: Sequence[Tensor], combination: Combination) -> None:
    """Copy ``total`` to the chunks of all ranks, except to a chunk in the memory of ``total``."""
    for part in parts:
        stored = combination.view(part)
        if stored.data_ptr() != total.data_ptr():
            stored.copy_(total)
