"""Every rank gets the tensor of one of them: ``broadcast`` in its four forms."""

from typing import Any, cast

from torch import Tensor

from hpctrain.collectives.allreduce import allreduce
from hpctrain.collectives.operation import (
    CarriedOut,
    carried_out,
    check_tensor,
    controller_of,
    named,
    only,
)
from hpctrain.negotiation.request import Handle, Kind, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set, in_set


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Return the tensor of ``root_rank`` on every rank. Collective.

    Differentiable: the root gets the average of the gradients of all ranks, the others zeros, as
    in Horovod.

    Args:
        tensor: the same shape and dtype on every rank; dense, on any device, of any layout.
        root_rank: number in the world of the rank whose tensor all get.
        name: by which the ranks find each other's tensors; without one, the order of calls on
            each rank decides what belongs together.
        process_set: the ranks that take part; None is all of them.

    Returns:
        A new contiguous tensor.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or one of the two
            ranks is not in it.
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks name different roots.
        RankLostError: another rank died or left.
    """
    request = _request(tensor, root_rank, name, process_set)
    return carried_out(_Broadcast, request, (tensor,), process_set)[0]


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``broadcast`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``broadcast``.
    """
    request = _request(tensor, root_rank, name, process_set)
    return controller_of(process_set).submit(request, only)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Replace ``tensor`` by that of ``root_rank``, and return it. Collective.

    As ``broadcast``, but not differentiable.
    """
    request = _request(tensor, root_rank, name, process_set, in_place=True)
    return cast("Tensor", controller_of(process_set).run(request)[0])


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``broadcast_`` does; see ``broadcast_async``."""
    request = _request(tensor, root_rank, name, process_set, in_place=True)
    return controller_of(process_set).submit(request, only)


def _request(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet | None,
    *,
    in_place: bool = False,
) -> Request:
    check_tensor(tensor)
    root = in_set(process_set, root_rank)
    return Request(
        Kind.BROADCAST, named(Kind.BROADCAST, name), (tensor,), in_place=in_place, root=root
    )


class _Broadcast(CarriedOut):
    """Gives the root the average of the gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, process_set=ctx.process_set)
        is_root = controller_of(ctx.process_set).comm.rank == ctx.signature.root
        return None, None, reduced if is_root else reduced * 0
