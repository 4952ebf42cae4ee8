"""Reduction operators on the values of several ranks, and the numbers they compute in."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import CommError
from hpctrain.core.torch_compat import FLOAT8


class Op(enum.Enum):
    """How the values of all ranks become one."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "bitwise and"
    BOR = "bitwise or"
    BXOR = "bitwise xor"

    __hash__ = object.__hash__  # Enum's own is a function in Python, in the way of every call


_Function = Callable[..., Tensor]  # of two tensors, with ``out``

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
"""The integers with which torch calculates."""
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_WIDE = {torch.complex32: torch.complex64} | dict.fromkeys(_HALVES + FLOAT8, torch.float32)
_SCALE_ELEMENTS = 1 << 16  # a piece that is scaled and rounded while it lies in the cache


@dataclass(frozen=True, slots=True)
class Combination:
    """How values of one dtype are combined by one operation.

    NaN stays NaN; integers wrap around and never saturate. Zeros of either sign and NaN of any
    bits count as equal, so ranks that combine the same two tensors must give them in the same
    order to end with the same bits.
    """

    op: Op
    storage_dtype: torch.dtype
    """The same bytes as numbers that can be combined, see ``view``. A complex number is two of
    them where it is summed."""
    accumulate_dtype: torch.dtype
    """In which many values are combined before they are rounded once; ``storage_dtype`` if that
    is exact or as good."""
    function: _Function = field(repr=False)  # of two tensors of ``accumulate_dtype``

    def view(self, flat: Tensor) -> Tensor:
        """Return the elements of a flat tensor as numbers of ``storage_dtype``."""
        return flat if flat.dtype is self.storage_dtype else flat.view(self.storage_dtype)

    def into(self, total: Tensor, other: Tensor) -> None:
        """Replace ``total`` by ``total (op) other``; both flat, of one of the two dtypes."""
        if total.dtype == self.accumulate_dtype:
            self.function(total, other.to(self.accumulate_dtype), out=total)
        elif total.dtype == other.dtype and self.storage_dtype in _HALVES:
            self.function(total, other, out=total)  # in float32, rounded once: torch does it
        else:
            wide = total.to(self.accumulate_dtype)
            total.copy_(self.function(wide, other.to(self.accumulate_dtype), out=wide))

    def widened(self) -> "Combination":
        """Return the combination of values that were converted to ``accumulate_dtype`` before."""
        return replace(self, storage_dtype=self.accumulate_dtype)


@cache
def combination(dtype: torch.dtype, op: Op) -> Combination:
    """Return how values of ``dtype`` are combined by ``op``.

    Raises ``CommError``: ``op`` has no meaning for this dtype.
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
    return Combination(op, lane, wide, functions[op])


def scale_(values: Tensor, factor: float) -> None:
    """Multiply floating point or complex ``values`` by ``factor``, rounding once."""
    if values.dtype in FLOAT8:  # torch does not multiply them
        values.copy_(values.to(torch.float32).mul_(factor))
    else:
        values.mul_(factor)


def finish(total: Tensor, scale: float | None, out: Tensor) -> None:
    """Write ``total``, times ``scale``, into ``out``, in one pass over both."""
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
        return f"{op.value} needs values that have an order, got {name}; take view_as_real of it"
    if _functions(dtype):
        return f"{op.value} takes integers and bool, got {name}; view it as integers first"
    return f"{op.value} over ranks takes numbers and bool, got {name}; convert the tensor first"


def _order_of_unsigned(
    function: _Function, first: Tensor, second: Tensor, *, out: Tensor
) -> Tensor:
    """Compare signed numbers as if they were unsigned: with the sign bit flipped."""
    sign = torch.iinfo(out.dtype).min
    function(first ^ sign, second ^ sign, out=out)
    return out.bitwise_xor_(sign)


_UNSIGNED_ORDER: dict[Op, _Function] = {
    op: partial(_order_of_unsigned, function) for op, function in _ORDER.items()
}


def scaled_when(scale: float | None, how: Combination) -> tuple[float | None, float | None]:
    """Return the factor that is applied inside the node, and the one at the end.

    A node's sum in 16 bits could overflow where the average does not: there it comes first.
    """
    could_overflow = how.op is Op.SUM and how.accumulate_dtype is not how.storage_dtype
    return (scale, None) if could_overflow else (None, scale)
