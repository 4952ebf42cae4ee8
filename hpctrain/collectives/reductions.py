"""Common parts of all reductions: the request, and the way of compressed tensors."""

from collections.abc import Callable, Sequence

from torch import Tensor

from hpctrain.collectives.operation_arguments import check_reduction, named
from hpctrain.compress.compressor import Compressor
from hpctrain.compress.half import Compression
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Request


def reduction(  # noqa: PLR0913 - what users give
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    *,
    in_place: bool = False,
) -> Request:
    """Return the request for a reduction of some tensors.

    Raises:
        ConfigError: a tensor cannot be taken, or there is no such reduction of its dtype.
    """
    for tensor in tensors:
        check_reduction(tensor, op, prescale, postscale)
    return Request(
        kind,
        named(kind, name),
        tensors,
        in_place=in_place,
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def compressed(
    compression: Compressor | type[Compressor] | None,
    tensors: Sequence[Tensor],
    check: Callable[[Tensor], None],
    reduce: Callable[[Sequence[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Return what ``reduce`` makes of tensors, compressed on the way.

    Args:
        compression: None for none.
        tensors: of the user.
        check: refuses a tensor that cannot be taken, before it is compressed.
        reduce: checks and reduces what travels.
    """
    if compression is None or compression is Compression.none:
        return reduce(tensors)
    for tensor in tensors:
        check(tensor)
    packed = [compression.compress(each) for each in tensors]  # type: ignore[call-arg, arg-type]
    totals = reduce([small for small, _ in packed])
    return [
        compression.decompress(total, context)  # type: ignore[call-arg]
        for total, (_, context) in zip(totals, packed, strict=True)
    ]
