"""Reduction of values over all ranks, with the factors and the averages of Horovod.

The module also provides the neutral elements that a rank contributes after it has joined.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.ops import Op, combination, scale_
from hpctrain.negotiation.request import Kind, ReduceOp, Request, Signature

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

_OPS = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.AVERAGE: Op.SUM,
    ReduceOp.ADASUM: Op.SUM,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.PRODUCT: Op.PRODUCT,
}
_SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)


class Recipe(NamedTuple):
    """Steps that reduce values of one dtype, in the order of the fields."""

    accumulate_dtype: torch.dtype | None  # None for the dtype of the values
    before: float | None  # factor of the local values
    op: Op
    scale: float | None
    """Factor of a floating-point or complex result, applied by the communicator's last pass."""
    after: float | None
    """Factor of an integer result, computed in float64 and rounded towards zero."""
    divisor: int  # divisor of an integer result, rounded towards zero; 1 for none
    is_plain: bool  # whether the communicator performs all steps


@lru_cache(maxsize=1024)
def recipe(
    dtype: torch.dtype, op: ReduceOp, prescale: float, postscale: float, size: int
) -> Recipe:
    """Return the steps that reduce values of ``dtype`` over ``size`` ranks. Local.

    ``prescale`` is applied before the sum, as in Horovod, since it may prevent an overflow of the
    sum. For floating point, ``postscale`` and the divisor of an average need no separate pass.
    Averages of integers are exact and rounded towards zero; 8-bit and 16-bit integers are summed
    in 32 bits.

    Raises:
        CommError: the operation does not support ``dtype``.
    """
    how = combination(dtype, _OPS[op])
    before = None if prescale == 1.0 else prescale
    divisor = size if op is ReduceOp.AVERAGE else 1
    if dtype.is_floating_point or dtype.is_complex:
        factor = postscale / divisor
        scale = None if factor == 1.0 else factor
        return Recipe(None, before, how.op, scale, None, 1, before is None)
    wide = None
    if op is ReduceOp.AVERAGE and dtype in _SMALL_INTEGERS:
        wide = torch.int32
    elif op is ReduceOp.AVERAGE and dtype is torch.uint32:
        wide = torch.int64  # torch does not divide uint32
    after = None if postscale == 1.0 else postscale
    is_plain = before is None and after is None and divisor == 1
    return Recipe(wide, before, how.op, None, after, divisor, is_plain)


def recipe_of(signature: Signature, size: int, dtype: torch.dtype | None = None) -> Recipe:
    """Return the recipe of an operation for ``dtype``; default: the signature's first dtype."""
    _, dtypes, _, op, prescale, postscale, _, _ = signature
    assert op is not None
    return recipe(dtype or dtypes[0], op, prescale, postscale, size)


def reduce_(comm: "Communicator", values: Tensor | Bucket, how: Recipe) -> None:
    """Replace ``values``, with any strides, by their reduction over all ranks. Collective."""
    if how.is_plain:
        comm.allreduce_(values, op=how.op, scale=how.scale).wait()
        return
    tensor = values.flat if isinstance(values, Bucket) else values.detach()
    work = values if how.accumulate_dtype is None else tensor.to(how.accumulate_dtype)
    wide = work.flat if isinstance(work, Bucket) else work.detach()
    multiply_(wide, how.before)
    comm.allreduce_(work, op=how.op, scale=how.scale).wait()
    finish_(wide, how)
    if wide.dtype is not tensor.dtype:
        tensor.copy_(wide)


def reduce_scatter(
    comm: "Communicator", values: Tensor, numels: Sequence[int], how: Recipe
) -> Tensor:
    """Reduce ``values`` over all ranks; return this rank's part as a flat tensor. Collective."""
    work = values.detach()
    if how.accumulate_dtype is not None:
        work = work.to(how.accumulate_dtype)
    if how.before is not None:
        work = work.clone() if how.accumulate_dtype is None else work
        multiply_(work, how.before)
    part = comm.reduce_scatter(work, op=how.op, scale=how.scale, numels=numels)
    finish_(part, how)
    return part if how.accumulate_dtype is None else part.to(values.dtype)


def multiply_(values: Tensor, factor: float | None) -> None:
    """Multiply ``values`` in place; products of integers are rounded towards zero."""
    if factor is None:
        return
    if values.is_floating_point() or values.is_complex():
        scale_(values, factor)
    else:
        values.copy_(values.to(torch.float64).mul_(factor))


def finish_(values: Tensor, how: Recipe) -> None:
    """Apply the postscale factor and the divisor to a sum of integers, in place."""
    if how.after is not None:
        values.copy_(values.to(torch.float64).mul_(how.after).div_(how.divisor))
    elif how.divisor == 1:
        return
    elif values.dtype is torch.uint64:
        _divide_uint64_(values, how.divisor)
    else:
        values.div_(how.divisor, rounding_mode="trunc")


def _divide_uint64_(values: Tensor, divisor: int) -> None:
    """Divide uint64 values in place by means of int64; torch has no division of uint64."""
    signed = values.view(torch.int64)
    quotient = signed.bitwise_right_shift(1).bitwise_and_((1 << 63) - 1)
    quotient.div_(divisor, rounding_mode="trunc").mul_(2)
    quotient += (signed - quotient * divisor) >= divisor  # remainder is below twice the divisor
    signed.copy_(quotient)


def neutral_request(signature: Signature, size: int) -> Request:
    """Return a request that a joined rank contributes, without effect on other ranks' results.

    The request has neutral elements for reductions, no rows for all-gather and all-to-all, and an
    output buffer for a broadcast, whose root must be another rank.
    """
    kind, dtypes, shapes, op, prescale, *_ = signature
    tensors = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if signature.is_free:
            tensors.append(torch.empty((0, *shape), dtype=dtype, device="cpu"))
        elif op is None:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
        else:
            tensors.append(_neutral(shape, dtype, op, prescale))
    splits = [0] * size if kind is Kind.ALLTOALL else None
    return Request.signed(signature, None, tuple(tensors), in_place=True, splits=splits)


def _neutral(shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, prescale: float) -> Tensor:
    """Return elements that are neutral after the multiplication by ``prescale``."""
    value: float = 0
    if op is ReduceOp.PRODUCT:
        value = 1 / (prescale or 1)
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        value = _range(dtype)[(op is ReduceOp.MIN) == (prescale >= 0)]
    if dtype.is_floating_point or dtype.is_complex:
        element = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    else:
        element = torch.tensor(round(value), dtype=dtype, device="cpu")
    return element.expand(shape).clone(memory_format=torch.contiguous_format)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    infinity = torch.tensor(torch.inf, device="cpu")
    if infinity.to(dtype).to(torch.float32).isinf():  # some 8-bit dtypes have no infinity
        return -torch.inf, torch.inf
    return torch.finfo(dtype).min, torch.finfo(dtype).max
