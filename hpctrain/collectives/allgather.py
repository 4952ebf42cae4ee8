"""Every rank gets the rows of all: ``allgather``, and the same of several tensors at once."""

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
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Return the tensors of all ranks one after the other, along the first dimension. Collective.

    Differentiable: a rank gets the average over the ranks of the gradients of its rows, as in
    Horovod.

    Args:
        tensor: ``(rows, ...)``; the rows may differ between ranks, all other dimensions and the
            dtype not. Dense, on any device, of any layout. A tensor without dimensions is one row.
        name: by which the ranks find each other's tensors; without one, the order of calls on
            each rank decides what belongs together.
        process_set: the ranks that take part; None is all of them.

    Returns:
        A new tensor, ``(sum of all rows, ...)``.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or this rank is
            not in it.
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks give tensors of different dtypes.
        RankLostError: another rank died or left.
    """
    return _gathered([tensor], name, process_set)[0]


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``allgather`` does; ``tensor`` must not change until it is done.

    Returns:
        For ``poll`` and ``synchronize``.

    Raises:
        DuplicateNameError: an operation of this name is still under way on this rank.
        ConfigError: as ``allgather``.
    """
    return controller_of(process_set).submit(_request(_rows([tensor]), name), only)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """Return what ``allgather`` makes of each tensor, as one operation. Collective.

    It starts once all ranks have asked for the whole group. Differentiable as ``allgather`` is.

    Raises:
        ConfigError: there is no tensor, or as ``allgather``.
        HorovodInternalError: as ``allgather``.
        RankLostError: as ``allgather``.
    """
    return _gathered(check_group(tensors), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start what ``grouped_allgather`` does; see ``allgather_async``."""
    request = _request(_rows(check_group(tensors)), name)
    return controller_of(process_set).submit(request)


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with at least one dimension."""
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
    """Gives each rank its rows of the averaged gradients."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        averages = grouped_allreduce(gradients, process_set=ctx.process_set)
        mine = torch.tensor([ctx.rows], device="cpu")
        rows = allgather(mine, process_set=ctx.process_set)
        rank = controller_of(ctx.process_set).comm.rank
        starts = cast("list[int]", rows[:rank].sum(0).tolist())
        cut = zip(averages, starts, ctx.rows, strict=True)
        return None, None, *[average.narrow(0, start, num) for average, start, num in cut]
