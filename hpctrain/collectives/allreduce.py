"""The values of all ranks become one: ``allreduce`` in its four forms."""

from typing import cast

from torch import Tensor

from hpctrain.collectives.grouped_allreduce import reduced
from hpctrain.collectives.handles import Operation, Pending, only
from hpctrain.collectives.operation_arguments import check_reduction, chosen_op, controller_of
from hpctrain.collectives.reductions import compressed, reduction
from hpctrain.compress.compressor import Compressor
from hpctrain.compress.half import Compression
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def allreduce(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
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
        tensor: the same shape and dtype on every rank; dense, on the CPU, of any layout.
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
    op = chosen_op(op, average)
    return compressed(
        compression,
        [tensor],
        lambda given: check_reduction(given, op, prescale_factor, postscale_factor),
        lambda small: reduced(small, name, op, prescale_factor, postscale_factor, process_set),
    )[0]


def allreduce_async(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Operation:
    """Start what ``allreduce`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``allreduce``.
    """
    op = chosen_op(op, average)
    request = reduction(Kind.ALLREDUCE, (tensor,), name, op, prescale_factor, postscale_factor)
    return Operation(controller_of(process_set).submit(request), only)


def allreduce_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Replace ``tensor`` by its average, or what else ``op`` says, and return it. Collective.

    As ``allreduce``, but not differentiable.
    """
    op = chosen_op(op, average)
    request = reduction(
        Kind.ALLREDUCE, (tensor,), name, op, prescale_factor, postscale_factor, in_place=True
    )
    return cast("Tensor", controller_of(process_set).run(request)[0])


def allreduce_async_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Pending:
    """Start what ``allreduce_`` does; see ``allreduce_async``."""
    if average is not None or op.__class__ is not ReduceOp:
        op = chosen_op(op, average)
    controller = controller_of(process_set)
    if name is not None:
        again = controller.submit_again(name, tensor, op, prescale_factor, postscale_factor)
        if again is not None:
            return again
    request = reduction(
        Kind.ALLREDUCE, (tensor,), name, op, prescale_factor, postscale_factor, in_place=True
    )
    return controller.submit_tensor(request, name)
