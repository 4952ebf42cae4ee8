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


def allreduce(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    compression: None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Return the average (or sum) of ``tensor`` over all ranks. Collective.

    Args:
        tensor: the same shape and dtype on every rank.
        average: Horovod's old way to say ``op``.
        name: accepted for Horovod's scripts; the order of calls decides what belongs together.
        compression: not supported yet; None.
        op: ``Average`` (the default) or ``Sum``. Averages of integers are rounded towards zero.
        prescale_factor: factor of every rank's tensor; floating point and complex only.
        postscale_factor: factor of the result; floating point and complex only.
        process_set: not supported yet; None, for all ranks.

    Raises:
        ConfigError: an argument is not valid, or there is no average of this dtype.
        CommError: tensors of this dtype cannot be summed.
    """
    require_default("compression", compression, None)
    copy = tensor.detach().clone()
    return allreduce_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(  # noqa: PLR0913, PLR0917 - Horovod's arguments, in its order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,  # noqa: ARG001
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Replace ``tensor`` by its average (or sum) over all ranks, and return it. Collective.

    See ``allreduce`` for the arguments.
    """
    require_default("process_set", process_set, None)
    comm = current().comm
    is_average = _operation(average, op) is Average
    divisor = comm.size if is_average else 1
    if tensor.is_floating_point() or tensor.is_complex():
        # The factors commute with the sum, so they are applied once, in its last pass.
        scale = prescale_factor * postscale_factor / divisor
        comm.allreduce_(tensor, scale=None if scale == 1.0 else scale).wait()
        return tensor
    require_default("prescale_factor", prescale_factor, 1.0)
    require_default("postscale_factor", postscale_factor, 1.0)
    if is_average and not (tensor.dtype.is_signed or tensor.dtype is torch.uint8):
        raise ConfigError(f"there is no average of {tensor.dtype}; use op=Sum, or convert it")
    comm.allreduce_(tensor).wait()
    return tensor if divisor == 1 else tensor.div_(divisor, rounding_mode="trunc")


def _operation(average: bool | None, op: ReduceOp | None) -> ReduceOp:  # noqa: FBT001
    if average is not None and op is not None:
        raise ConfigError(f"say average or op, not both, got average={average} and op={op!r}")
    if average is not None:
        return Average if average else Sum
    if op not in (None, Average, Sum):
        raise ConfigError(f"op must be Average or Sum, got {op!r}")
    return op or Average


def require_default(name: str, value: object, default: object) -> None:
    """Refuse a value that would have no effect.

    Raises:
        ConfigError: it is not the default.
    """
    if value != default:
        raise ConfigError(f"{name} can only be {default} in this release, got {value!r}")


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001 - Horovod's
    process_set: None = None,
) -> Tensor:
    """Replace ``tensor`` by that of ``root_rank``, and return it. Collective."""
    require_default("process_set", process_set, None)
    current().comm.broadcast_(tensor, root_rank).wait()
    return tensor


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001 - Horovod's
    process_set: None = None,
) -> T:
    """Return the (picklable) ``obj`` of ``root_rank`` on every rank. Collective."""
    require_default("process_set", process_set, None)
    return current().comm.broadcast_object(obj, root_rank)


def barrier(process_set: None = None) -> None:
    """Return when every rank has called this. Collective."""
    require_default("process_set", process_set, None)
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
