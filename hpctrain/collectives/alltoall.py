"""Every rank sends rows to every other: ``alltoall``."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hpctrain.collectives.operation import (
    CarriedOut,
    carried_out,
    check_rows,
    controller_of,
    named,
)
from hpctrain.core.errors import ConfigError
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.request import Handle, Kind, Request, Result
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send some rows of ``tensor`` to each rank; return what the ranks have sent here. Collective.

    Differentiable: gradients go back to where the rows came from.

    Args:
        tensor: ``(rows, ...)``; the rows may differ between ranks, all other dimensions and the
            dtype not. Dense, on any device, of any layout.
        splits: how many rows go to each rank of the set, in their order; integers. Rows that are
            left over go nowhere. None sends the same number to each.
        name: by which the ranks find each other's tensors; without one, the order of calls on
            each rank decides what belongs together.
        process_set: the ranks that take part; None is all of them.

    Returns:
        The rows for this rank, by sender. If ``splits`` was given, also how many each rank has
        sent, as a tensor of the dtype of ``splits``; int32 if that was a list.

    Raises:
        ConfigError: ``splits`` does not fit, or another argument is not valid; the process set is
            not registered, or this rank is not in it.
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks give tensors of different dtypes.
        RankLostError: another rank died or left.
    """
    controller = controller_of(process_set)
    request = _request(controller, tensor, splits, name)
    rows, received = carried_out(_Alltoall, request, (tensor,), process_set)
    return rows if splits is None else (rows, _like(received, splits))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``alltoall`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``, which returns the rows and the received splits, always.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``alltoall``.
    """
    controller = controller_of(process_set)
    request = _request(controller, tensor, splits, name)

    def take(result: Result) -> tuple[Tensor, Tensor]:
        rows, received = result
        return rows, _like(received, splits)

    return controller.submit(request, take)


def _request(
    controller: Controller,
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    name: str | None,
) -> Request:
    check_rows(tensor, "alltoall")
    size = controller.comm.size
    if splits is None and len(tensor) % size:
        raise ConfigError(
            f"alltoall without splits sends the same number of rows to each of {size} ranks, got "
            f"{len(tensor)} rows; say by splits how many go where"
        )
    numbers = None if splits is None else _checked(splits, len(tensor), size)
    return Request(Kind.ALLTOALL, named(Kind.ALLTOALL, name), (tensor,), splits=numbers)


def _checked(splits: Tensor | Sequence[int], num_rows: int, size: int) -> list[int]:
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits, device="cpu")
    numbers = given.tolist() if given.dim() == 1 else []
    is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)
    if not numbers or not is_integer or len(numbers) != size or min(numbers) < 0:
        raise ConfigError(
            f"splits is a list or tensor of {size} integers, rows for each rank, got {splits}"
        )
    if sum(numbers) > num_rows:
        raise ConfigError(
            f"splits must not be more than the rows there are, got {numbers}, {sum(numbers)} in "
            f"all, for {num_rows} rows"
        )
    return cast("list[int]", numbers)


def _like(received: Tensor, splits: Tensor | Sequence[int] | None) -> Tensor:
    return received.to(splits.dtype) if isinstance(splits, Tensor) else received


class _Alltoall(CarriedOut):
    """Sends gradients back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, process_set: ProcessSet | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        rows, received = CarriedOut.forward(ctx, request, process_set, *tensors)
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
        back, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        if num_lost := ctx.rows[0] - len(back):  # rows that went nowhere
            back = torch.cat([back, back.new_zeros(num_lost, *back.shape[1:])])
        return None, None, back
