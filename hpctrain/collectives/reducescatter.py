"""Every rank gets some rows of the reduced tensor: ``reducescatter``, also of several tensors."""

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
    """Return this rank's rows of what ``allreduce`` would return. Collective.

    Differentiable for averages and sums, as in Horovod.

    Args:
        tensor: ``(rows, ...)``, the same shape and dtype on every rank; dense, on any device, of
            any layout. The first ranks get one row more where the rows cannot be even.
        name: by which the ranks find each other's tensors; without one, the order of calls on
            each rank decides what belongs together.
        compression: how the tensor travels: ``Compression.fp16``, say. None is as it is.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part; None is all of them.
        prescale_factor: factor of this rank's tensor, see ``allreduce``.
        postscale_factor: factor of the result.

    Returns:
        A new tensor, ``(rows of this rank, ...)``.

    Raises:
        ConfigError: an argument is not valid, or there is no such reduction of this dtype; the
            process set is not registered, or this rank is not in it.
        UnsupportedError: ``op`` is ``Adasum``.
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks give tensors of different shapes.
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
    """Start what ``reducescatter`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        UnsupportedError: as ``reducescatter``.
        ConfigError: as ``reducescatter``.
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
    """Return what ``reducescatter`` makes of each tensor, as one operation. Collective.

    It starts once all ranks have asked for the whole group.

    Raises:
        ConfigError: there is no tensor, or as ``reducescatter``.
        UnsupportedError: as ``reducescatter``.
        HorovodInternalError: as ``reducescatter``.
        RankLostError: as ``reducescatter``.
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
    """Start what ``grouped_reducescatter`` does; see ``reducescatter_async``."""
    scaled = Scaled(op, prescale_factor, postscale_factor)
    request = _request(check_group(tensors), name, scaled)
    return controller_of(process_set).submit(request)


def _request(tensors: Sequence[Tensor], name: str | None, scaled: Scaled) -> Request:
    if chosen_op(scaled.op, None) is ReduceOp.ADASUM:
        raise UnsupportedError(
            "reducescatter takes Average, Sum, Min, Max and Product, got op=Adasum; use allreduce"
        )
    for tensor in tensors:
        check_rows(tensor, "reducescatter")
    return reduction(Kind.REDUCESCATTER, tensors, name, scaled)


class _Reducescatter(CarriedOut):
    """Gathers the gradients of all rows, as many times larger as there are ranks for a sum."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, op, prescale, postscale, _, _ = ctx.signature
        factor = prescale * postscale
        if op is ReduceOp.SUM:
            factor *= controller_of(ctx.process_set).comm.size
        scaled = [gradient * factor for gradient in gradients] if factor != 1.0 else gradients
        return None, None, *grouped_allgather(scaled, process_set=ctx.process_set)
