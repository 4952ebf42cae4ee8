"""What a rank that has joined contributes to the operations of the others."""

import torch
from torch import Tensor

from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Request, Signature


def stand_in(signature: Signature, rank: int, size: int) -> Request:  # noqa: ARG001 - interface
    """Return a request that changes nothing for the other ranks.

    Args:
        signature: of the operation; not of a broadcast from this rank, which nobody can replace.
        rank: of this process in the set.
        size: number of ranks of the set.

    Returns:
        To reductions neutral elements; to gathers and exchanges no rows; room for a broadcast.
        Its signature is the one given.
    """
    kind, dtypes, shapes, op, prescale, postscale, root, _ = signature
    tensors = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if signature.is_free:
            tensors.append(torch.empty((0, *shape), dtype=dtype, device="cpu"))
        elif op is None:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
        else:
            tensors.append(_neutral(shape, dtype, op, prescale))
    return Request(
        kind,
        None,
        tensors,
        in_place=True,
        op=op,
        prescale=prescale,
        postscale=postscale,
        root=root,
        splits=[0] * size if kind is Kind.ALLTOALL else None,
    )


def _neutral(shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, prescale: float) -> Tensor:
    """Return elements that are neutral once they are multiplied by ``prescale``."""
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
    if infinity.to(dtype).to(torch.float32).isinf():  # not all of those with 8 bits
        return -torch.inf, torch.inf
    return torch.finfo(dtype).min, torch.finfo(dtype).max
