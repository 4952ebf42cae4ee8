"""``allreduce`` and its variants: asynchronous, in place, and for groups of tensors."""

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
    """Return the average, or another reduction ``op``, of ``tensor`` over all ranks. Collective.

    Differentiable: the gradient is reduced over the ranks by the same operation, as in Horovod.

    Args:
        tensor: the same shape and dtype on every rank; dense, on any device, of any memory format.
        average: Horovod's deprecated alternative to ``op``.
        name: identifies the tensor on all ranks; without names, ranks match their calls by order.
        compression: compression of the tensor for sending, such as ``Compression.fp16``; None for
            no compression.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
            Averages of integers are rounded towards zero.
        prescale_factor: factor of this rank's tensor. Factors of integers are applied in float64,
            and the product is rounded towards zero.
        postscale_factor: factor of the result.
        process_set: the ranks that take part; None for all.

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        ConfigError: an argument is not valid, or the dtype does not support the reduction; the
            process set is not registered, or this rank is not in it.
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks passed tensors of different shapes.
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
    """Start an ``allreduce``; ``tensor`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        ConfigError: as in ``allreduce``.
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
    """Replace ``tensor`` by its average, or another reduction; return ``tensor``. Collective.

    As ``allreduce``, but not differentiable.
    """
    op, pre, post = chosen_op(op, average), prescale_factor, postscale_factor
    if name is not None and controller_of(process_set).reduce_now(name, tensor, op, pre, post):
        return tensor
    handle = _started(tensor, name, op, (pre, post), process_set, is_awaited=True)
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
    """Start an ``allreduce_``; see ``allreduce_async``."""
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
    """Apply ``allreduce`` to each tensor, as one operation. Collective.

    The operation starts once all ranks have submitted the whole group. Differentiable, as
    ``allreduce``.

    Args:
        tensors: at each position the same shape and dtype on every rank; dtypes may differ between
            positions.
        average: see ``allreduce``, as for all other arguments.
        name: name of the group.
        compression: compression of each tensor.
        op: reduction of all tensors.
        prescale_factor: factor of this rank's tensors.
        postscale_factor: factor of the results.
        process_set: the ranks that take part; None for all.

    Returns:
        New tensors, in the same order.

    Raises:
        ConfigError: the list is empty, or as in ``allreduce``.
        HorovodInternalError: as in ``allreduce``.
        RankLostError: as in ``allreduce``.
    """
    scaled = Scaled(chosen_op(op, average), prescale_factor, postscale_factor)
    return compressed(
        compression, check_group(tensors), lambda small: _reduced(small, name, scaled, process_set)
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
    """Start a ``grouped_allreduce``; ``tensors`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        ConfigError: as in ``allreduce``.
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
    """Replace each tensor as ``allreduce_`` does, and return the tensors. Collective.

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
    """Start a ``grouped_allreduce_``; see ``grouped_allreduce_async``."""
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
    """Start an in-place reduction; a repeated, named reduction is not checked again."""
    controller = controller_of(process_set)
    if name is not None:  # a step may have thousands of named reductions
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
    """Autograd function of ``allreduce``: reduces gradients by the same operation."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, op, prescale, postscale, _, _ = ctx.signature
        reduced = _reduced(gradients, None, Scaled(op, prescale, postscale), ctx.process_set)
        return None, None, *reduced
