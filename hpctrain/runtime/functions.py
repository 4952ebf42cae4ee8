"""Collective functions on tensors and objects, with Horovod's names."""

import enum
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.agreement import require_equal
from hpctrain.errors import ConfigError
from hpctrain.runtime.world import current

T = TypeVar("T")


class ReduceOp(enum.Enum):
    """How the values of all ranks become one."""

    AVERAGE = "average"
    SUM = "sum"


Average, Sum = ReduceOp.AVERAGE, ReduceOp.SUM


def allreduce(tensor: Tensor, name: str | None = None, *, op: ReduceOp = Average) -> Tensor:
    """Return the average (or sum) of ``tensor`` over all ranks. Collective.

    Args:
        tensor: the same shape and dtype on every rank.
        name: accepted for Horovod's scripts; order decides what belongs together.
        op: ``Average`` or ``Sum``. Averages of integers are rounded towards zero.
    """
    return allreduce_(tensor.detach().clone(), name, op=op)


def allreduce_(tensor: Tensor, name: str | None = None, *, op: ReduceOp = Average) -> Tensor:  # noqa: ARG001
    """Replace ``tensor`` by its average (or sum) over all ranks, and return it. Collective."""
    if op not in (Average, Sum):
        raise ConfigError(f"op must be Average or Sum, got {op!r}")
    comm = current().comm
    averages = op is Average and comm.size > 1
    scales = averages and tensor.is_floating_point()
    comm.allreduce_(tensor, scale=1.0 / comm.size if scales else None).wait()
    if averages and not scales:
        tensor.div_(comm.size, rounding_mode="trunc")
    return tensor


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:  # noqa: ARG001
    """Replace ``tensor`` by that of ``root_rank``, and return it. Collective."""
    current().comm.broadcast_(tensor, root_rank).wait()
    return tensor


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None) -> T:  # noqa: ARG001
    """Return the (picklable) ``obj`` of ``root_rank`` on every rank. Collective."""
    return current().comm.broadcast_object(obj, root_rank)


def barrier() -> None:
    """Return when every rank has called this. Collective."""
    current().comm.barrier()


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Replace every tensor by that of ``root_rank``. Collective.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``; entries that are no
            tensors must not be there.
        root_rank: the rank whose values all ranks take.

    Raises:
        ConfigError: an entry is not a tensor.
        MismatchError: the ranks do not have the same tensors; on every rank.
    """
    comm = current().comm
    named = list(params.items() if isinstance(params, Mapping) else params)
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"broadcast_parameters takes tensors, {name} is a {type(tensor).__name__}; "
                f"send it by broadcast_object"
            )
    require_equal(comm, [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named], "tensors")
    for _, tensor in named:
        comm.broadcast_(tensor, root_rank).wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give every rank the optimizer state of ``root_rank``. Collective.

    The state of the other ranks is replaced as a whole, also where they have none yet. No step is
    taken to make one: Horovod calls ``step()`` with zero gradients here, which moves weights that
    decay.
    """
    comm = current().comm
    is_root = comm.rank == root_rank
    tensors: list[Tensor] = []
    skeleton = _lift(optimizer.state_dict(), tensors) if is_root else None
    layout = [(tuple(t.shape), t.dtype) for t in tensors]
    skeleton, layout = comm.broadcast_object((skeleton, layout), root_rank)
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
    for tensor in tensors:
        comm.broadcast_(tensor, root_rank).wait()
    if not is_root:
        optimizer.load_state_dict(_lower(skeleton, tensors))


class _Place(int):
    """Stands for the tensor of this number."""


def _lift(value: Any, tensors: list[Tensor]) -> Any:
    """Copy nested containers with every tensor moved into ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _lift(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_lift(item, tensors) for item in value)
    return value


def _lower(value: Any, tensors: list[Tensor]) -> Any:
    """Put the tensors back where ``_lift`` took them."""
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _lower(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_lower(item, tensors) for item in value)
    return value
