"""``broadcast`` and its variants: every rank receives the tensor of one rank."""

from typing import Any, cast

from torch import Tensor

from hpctrain.collectives.allreduce import allreduce
from hpctrain.collectives.operation import (
    CarriedOut,
    carried_out,
    check_target,
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

    Differentiable: as in Horovod, the gradient on the root is the average over all ranks, and the
    gradient on other ranks is zero.

    Args:
        tensor: the same shape and dtype on every rank; dense, on any device, of any memory format.
        root_rank: rank in the world whose tensor is sent.
        name: identifies the tensor on all ranks; without names, ranks match their calls by order.
        process_set: the ranks that take part; None for all.

    Returns:
        A new contiguous tensor.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or
            ``root_rank`` or this rank is not in it.
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks passed different roots.
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
    """Start a ``broadcast``; ``tensor`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        ConfigError: as in ``broadcast``.
    """
    request = _request(tensor, root_rank, name, process_set)
    return controller_of(process_set).submit(request, only)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Replace ``tensor`` by the tensor of ``root_rank``; return ``tensor``. Collective.

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
    """Start a ``broadcast_``; see ``broadcast_async``."""
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
    (check_target if in_place else check_tensor)(tensor)
    root = in_set(process_set, root_rank)
    return Request(
        Kind.BROADCAST, named(Kind.BROADCAST, name), (tensor,), in_place=in_place, root=root
    )


class _Broadcast(CarriedOut):
    """Autograd function of ``broadcast``: averages the gradients on the root."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, process_set=ctx.process_set)
        is_root = controller_of(ctx.process_set).comm.rank == ctx.signature.root
        return None, None, reduced if is_root else reduced * 0
