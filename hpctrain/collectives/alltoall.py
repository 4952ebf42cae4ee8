"""``alltoall``: every rank sends rows to every other rank."""

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
    """Send rows of ``tensor`` to each rank, and return the received rows. Collective.

    Differentiable: the gradient of a row is sent back to the rank that sent the row.

    Args:
        tensor: ``(rows, ...)``; the number of rows may differ between ranks, other dimensions and
            the dtype must be equal. Dense, on any device, of any memory format.
        splits: number of rows for each rank of the process set, in rank order; integers. Remaining
            rows are not sent. None sends the same number to each rank.
        name: identifies the tensor on all ranks; without names, ranks match their calls by order.
        process_set: the ranks that take part; None for all.

    Returns:
        The rows that this rank has received, in rank order of the senders. If ``splits`` was
            given, also the number of rows from each rank, as a tensor with the dtype of
            ``splits``, or int32 if ``splits`` was a list.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or this rank is
            not in it.
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks passed tensors of different dtypes.
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
    """Start an ``alltoall``; ``tensor`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``. ``synchronize`` returns the received rows and
            the number of rows from each rank, also without ``splits``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        ConfigError: as in ``alltoall``.
    """
    controller = controller_of(process_set)
    request = _request(controller, tensor, splits, name)

    def take(result: Result) -> tuple[Tensor, Tensor]:
        rows, received = result
        return rows, _like(received, splits)

    return controller.submit(request, take)


def _request(
    controller: Controller, tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None
) -> Request:
    check_rows(tensor, "alltoall")
    size = controller.comm.size
    if splits is None and len(tensor) % size:
        raise ConfigError(
            f"without splits the rows of alltoall must be a multiple of {size}, the number of "
            f"ranks, got {len(tensor)} rows; pass the rows for each rank as splits"
        )
    numbers = None if splits is None else _checked(splits, len(tensor), size)
    return Request(Kind.ALLTOALL, named(Kind.ALLTOALL, name), (tensor,), splits=numbers)


def _checked(splits: Tensor | Sequence[int], num_rows: int, size: int) -> list[int]:
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits, device="cpu")
    numbers = given.tolist() if given.dim() == 1 else []
    is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)
    if not numbers or not is_integer or len(numbers) != size or min(numbers) < 0:
        raise ConfigError(
            f"splits must be a list or tensor of {size} integers of at least 0, the numbers of "
            f"rows for each rank, got {splits}"
        )
    if sum(numbers) > num_rows:
        raise ConfigError(
            f"splits must sum to at most the number of rows, got {numbers}, {sum(numbers)} in "
            f"all, for {num_rows} rows"
        )
    return cast("list[int]", numbers)


def _like(received: Tensor, splits: Tensor | Sequence[int] | None) -> Tensor:
    return received.to(splits.dtype) if isinstance(splits, Tensor) else received


class _Alltoall(CarriedOut):
    """Autograd function of ``alltoall``: sends gradients back to the senders of the rows."""

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
        if num_lost := ctx.rows[0] - len(back):  # rows that were not sent
            back = torch.cat([back, back.new_zeros(num_lost, *back.shape[1:])])
        return None, None, back
