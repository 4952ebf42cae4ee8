"""``allgather`` and its variants: every rank receives the rows of all ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hpctrain.collectives.allreduce import grouped_allreduce
from hpctrain.collectives.operation import (
    CarriedOut,
    carried_out,
    check_group,
    check_tensor,
    controller_of,
    named,
    only,
)
from hpctrain.negotiation.request import Handle, Kind, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension. Collective.

    Differentiable: as in Horovod, the gradient of a rank's rows is averaged over the ranks.

    Args:
        tensor: ``(rows, ...)``; the number of rows may differ between ranks, other dimensions and
            the dtype must be equal. Dense, on any device, of any memory format. A tensor without
            dimensions is one row.
        name: identifies the tensor on all ranks; without names, ranks match their calls by order.
        process_set: the ranks that take part; None for all.

    Returns:
        A new tensor, ``(sum of all rows, ...)``.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or this rank is
            not in it.
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks passed tensors of different dtypes.
        RankLostError: another rank died or left.
    """
    return _gathered([tensor], name, process_set)[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> Handle:
    """Start an ``allgather``; ``tensor`` must not change until the operation is done.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still in flight on this rank.
        ConfigError: as in ``allgather``.
    """
    return controller_of(process_set).submit(_request(_rows([tensor]), name), only)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """Apply ``allgather`` to each tensor, as one operation. Collective.

    The operation starts once all ranks have submitted the whole group. Differentiable, as
    ``allgather``.

    Raises:
        ConfigError: the list is empty, or as in ``allgather``.
        HorovodInternalError: as in ``allgather``.
        RankLostError: as in ``allgather``.
    """
    return _gathered(check_group(tensors), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a ``grouped_allgather``; see ``allgather_async``."""
    request = _request(_rows(check_group(tensors)), name)
    return controller_of(process_set).submit(request)


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Check ``tensors``; return the list with each scalar replaced by a tensor of one row."""
    for tensor in tensors:
        check_tensor(tensor)
    return [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]


def _request(tensors: Sequence[Tensor], name: str | None) -> Request:
    return Request(Kind.ALLGATHER, named(Kind.ALLGATHER, name), tensors)


def _gathered(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet | None
) -> list[Tensor]:
    tensors = _rows(tensors)
    return carried_out(_Allgather, _request(tensors, name), tensors, process_set)


class _Allgather(CarriedOut):
    """Autograd function of ``allgather``: averages gradients, and returns this rank's rows."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        averages = grouped_allreduce(gradients, process_set=ctx.process_set)
        mine = torch.tensor([ctx.rows], device="cpu")
        rows = allgather(mine, process_set=ctx.process_set)
        rank = controller_of(ctx.process_set).comm.rank
        starts = cast("list[int]", rows[:rank].sum(0).tolist())
        cut = zip(averages, starts, ctx.rows, strict=True)
        return None, None, *[average.narrow(0, start, num) for average, start, num in cut]
