"""Fusing of a batch's all-reduces into messages."""

from collections.abc import Hashable, Sequence

from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Request

DIRECT_BYTES = 1 << 20
"""Tensors from this size on are not fused: to copy them costs more than a message saves."""


def runs(requests: Sequence[Request], fusion_bytes: int) -> list[list[int]]:
    """Return the numbers of requests that are carried out together, in the order to do so.

    A function of the signatures alone, so the same on all ranks. All-reduces of one dtype,
    operation and factors are put together, in their order, up to ``fusion_bytes``; everything
    else is alone, and so is a request of several dtypes. A request is never cut.

    Returns:
        Every number once; a run has its place where its first request has it.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, request in enumerate(requests):
        num_bytes = fusible_bytes(request)
        if num_bytes is None:
            found.append([number])
            continue
        signature = request.signature
        key = (signature.dtypes[0], signature.op, signature.prescale, signature.postscale)
        run, filled = filling.get(key, ((), 0))
        if isinstance(run, list) and filled + num_bytes <= fusion_bytes:
            run.append(number)
        else:
            run, filled = [number], 0
            found.append(run)
        filling[key] = run, filled + num_bytes
    return found


def fusible_bytes(request: Request) -> int | None:
    """Return the bytes of a request that may share a message with others; None if it may not."""
    signature = request.signature
    if signature.kind is not Kind.ALLREDUCE or signature.op is ReduceOp.ADASUM:
        return None
    tensors = request.tensors
    if len(tensors) == 1:
        num_bytes = tensors[0].nbytes
        return num_bytes if num_bytes < DIRECT_BYTES else None
    if len(set(signature.dtypes)) != 1:
        return None
    return sum([tensor.nbytes for tensor in tensors if tensor.nbytes < DIRECT_BYTES])
