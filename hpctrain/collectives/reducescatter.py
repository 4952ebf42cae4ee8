"""``reducescatter`` and its variants: every rank receives some rows of reduced tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hpctrain.collectives.allgather import grouped_allgather
from hpctrain.collectives.operation import (
    CarriedOut,
    Scaled,
    UnsupportedError,
    carried_out,
    check_group,
    check_rows,
    chosen_op,
    compressed,
    controller_of,
    only,
    reduction,
)
from hpctrain.compress.codec import Compressor
from hpctrain.compress.half import Compression
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def reducescatter(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor | type[Compressor] | None = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the result of ``allreduce``. Collective.

    Differentiable for averages and sums, as in Horovod.

    Args:
        tensor: ``(rows, ...)``, the same shape and dtype on every rank; dense, on any device, of
            any memory format. If the rows cannot be divided evenly, the first ranks get one row
            more.
        name: identifies the tensor on all ranks; without names, ranks match their calls by order.
        compression: compression of the tensor for sending, such as ``Compression.fp16``; None for
            no compression.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part; None for all.
        prescale_factor: factor of this rank's tensor; see ``allreduce``.
        postscale_factor: factor of the result.

    Returns:
        A new tensor, ``(rows of this rank, ...)``.

    Raises:
        ConfigError: an argument is not valid, or the dtype does not support the reduction; the
            process set is not registered, or this rank is not in it.
        UnsupportedError: ``op`` is ``Adasum``.
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks passed tensors of different shapes.
        RankLostError: another rank died or left.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``reducescatter``; ``tensor`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        UnsupportedError: as in ``reducescatter``.
        ConfigError: as in ``reducescatter``.
    """
    request = _request([tensor], name, Scaled(op, prescale_factor, postscale_factor))
    return controller_of(process_set).submit(request, only)


def grouped_reducescatter(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor | type[Compressor] | None = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Apply ``reducescatter`` to each tensor, as one operation. Collective.

    The operation starts once all ranks have submitted the whole group.

    Raises:
        ConfigError: the list is empty, or as in ``reducescatter``.
        UnsupportedError: as in ``reducescatter``.
        HorovodInternalError: as in ``reducescatter``.
        RankLostError: as in ``reducescatter``.
    """
    scaled = Scaled(op, prescale_factor, postscale_factor)

    def scattered(small: Sequence[Tensor]) -> list[Tensor]:
        return carried_out(_Reducescatter, _request(small, name, scaled), small, process_set)

    return compressed(compression, check_group(tensors), scattered)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``grouped_reducescatter``; see ``reducescatter_async``."""
    scaled = Scaled(op, prescale_factor, postscale_factor)
    request = _request(check_group(tensors), name, scaled)
    return controller_of(process_set).submit(request)


def _request(tensors: Sequence[Tensor], name: str | None, scaled: Scaled) -> Request:
    if chosen_op(scaled.op, None) is ReduceOp.ADASUM:
        raise UnsupportedError(
            "op of reducescatter must be Average, Sum, Min, Max or Product, got Adasum; use "
            "allreduce"
        )
    for tensor in tensors:
        check_rows(tensor, "reducescatter")
    return reduction(Kind.REDUCESCATTER, tensors, name, scaled)


class _Reducescatter(CarriedOut):
    """Autograd function of ``reducescatter``: gathers the gradients of all rows.

    For a sum, gradients are multiplied by the number of ranks.
    """

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, op, prescale, postscale, _, _ = ctx.signature
        factor = prescale * postscale
        if op is ReduceOp.SUM:
            factor *= controller_of(ctx.process_set).comm.size
        scaled = [gradient * factor for gradient in gradients] if factor != 1.0 else gradients
        return None, None, *grouped_allgather(scaled, process_set=ctx.process_set)
