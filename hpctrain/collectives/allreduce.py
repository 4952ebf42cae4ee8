"""The values of all ranks become one: ``allreduce`` in its eight forms."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from hpctrain.collectives.operation import (
    AverageFlag,
    CarriedOut,
    Scaled,
    carried_out,
    check_group,
    chosen_op,
    compressed,
    controller_of,
    only,
    reduction,
)
from hpctrain.compress.codec import Compressor
from hpctrain.compress.half import Compression
from hpctrain.negotiation.request import Handle, Kind, ReduceOp
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def allreduce(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: AverageFlag = None,
    name: str | None = None,
    compression: Compressor | type[Compressor] | None = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Return the average, or what else ``op`` says, of ``tensor`` over all ranks. Collective.

    Differentiable: the gradient is reduced over the ranks in the same way, as in Horovod.

    Args:
        tensor: the same shape and dtype on every rank; dense, on any device, of any layout.
        average: Horovod's old way to say ``op``.
        name: by which the ranks find each other's tensors; without one, the order of calls on
            each rank decides what belongs together.
        compression: how the tensor travels: ``Compression.fp16``, say. None is as it is.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
            Averages of integers are rounded towards zero.
        prescale_factor: factor of this rank's tensor. Factors of integers are applied in
            float64, and the product is rounded towards zero.
        postscale_factor: factor of the result.
        process_set: the ranks that take part; None is all of them.

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        ConfigError: an argument is not valid, or there is no such reduction of this dtype; the
            process set is not registered, or this rank is not in it.
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks give tensors of different shapes.
        RankLostError: another rank died or left.
    """
    op, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], None, name, compression, op, *factors, process_set)[0]


def allreduce_async(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``allreduce`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``allreduce``.
    """
    scaled = Scaled(chosen_op(op, average), prescale_factor, postscale_factor)
    request = reduction(Kind.ALLREDUCE, (tensor,), name, scaled)
    return controller_of(process_set).submit(request, only)


def allreduce_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Replace ``tensor`` by its average, or what else ``op`` says, and return it. Collective.

    As ``allreduce``, but not differentiable.
    """
    op, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    handle = _started(tensor, name, op, factors, process_set, is_awaited=True)
    return cast("Tensor", handle.wait())


def allreduce_async_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``allreduce_`` does; see ``allreduce_async``."""
    op, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    return _started(tensor, name, op, factors, process_set)


def grouped_allreduce(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensors: Sequence[Tensor],
    average: AverageFlag = None,
    name: str | None = None,
    compression: Compressor | type[Compressor] | None = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """Return what ``allreduce`` makes of each tensor, as one operation. Collective.

    It starts once all ranks have asked for the whole group. Differentiable as ``allreduce`` is.

    Args:
        tensors: at each place the same shape and dtype on every rank; the dtypes of a group may
            differ.
        average: see ``allreduce``, as all other arguments.
        name: of the group.
        compression: of each tensor.
        op: of all tensors.
        prescale_factor: of all tensors.
        postscale_factor: of all tensors.
        process_set: the ranks that take part.

    Returns:
        New tensors, in the same order.

    Raises:
        ConfigError: there is no tensor, or as ``allreduce``.
        HorovodInternalError: as ``allreduce``.
        RankLostError: as ``allreduce``.
    """
    scaled = Scaled(chosen_op(op, average), prescale_factor, postscale_factor)
    return compressed(
        compression,
        check_group(tensors),
        lambda small: _reduced(small, name, scaled, process_set),
    )


def grouped_allreduce_async(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensors: Sequence[Tensor],
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``grouped_allreduce`` does; ``tensors`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``allreduce``.
    """
    scaled = Scaled(chosen_op(op, average), prescale_factor, postscale_factor)
    request = reduction(Kind.ALLREDUCE, check_group(tensors), name, scaled)
    return controller_of(process_set).submit(request)


def grouped_allreduce_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensors: Sequence[Tensor],
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """Replace each tensor as ``allreduce_`` does, and return them. Collective.

    As ``grouped_allreduce``, but not differentiable.
    """
    return grouped_allreduce_async_(  # type: ignore[no-any-return]
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_async_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensors: Sequence[Tensor],
    average: AverageFlag = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``grouped_allreduce_`` does; see ``grouped_allreduce_async``."""
    scaled = Scaled(chosen_op(op, average), prescale_factor, postscale_factor)
    request = reduction(Kind.ALLREDUCE, check_group(tensors), name, scaled, in_place=True)
    return controller_of(process_set).submit(request)


def _started(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet | None,
    *,
    is_awaited: bool = False,
) -> Handle:
    """Start a reduction in place; a repeated one is found by its name, already checked."""
    controller = controller_of(process_set)
    if name is not None:  # there may be thousands in a step
        handle = controller.submit_tensor(name, tensor, op, *factors, is_awaited=is_awaited)
        if handle is not None:
            return handle
    request = reduction(Kind.ALLREDUCE, (tensor,), name, Scaled(op, *factors), in_place=True)
    if name is not None:
        controller.repeat(name, request)
    return controller.submit(request, only, is_awaited=is_awaited)


def _reduced(
    tensors: Sequence[Tensor], name: str | None, scaled: Scaled, process_set: ProcessSet | None
) -> list[Tensor]:
    request = reduction(Kind.ALLREDUCE, tensors, name, scaled)
    return carried_out(_Allreduce, request, tensors, process_set)


class _Allreduce(CarriedOut):
    """Reduces the gradients as it reduces the tensors."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, op, prescale, postscale, _, _ = ctx.signature
        reduced = _reduced(gradients, None, Scaled(op, prescale, postscale), ctx.process_set)
        return None, None, *reduced
