"""Broadcast of the parameters of a model and the state of its optimizer."""

import io
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

from hpctrain.collectives.objects import allgather_object, broadcast_object, broadcast_tensors_
from hpctrain.collectives.operation import shares_elements
from hpctrain.comm.agreement import require_equal_by
from hpctrain.core.errors import ConfigError
from hpctrain.runtime.process_sets import ProcessSet, global_process_set
from hpctrain.runtime.world import current


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int = 0,
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Replace every tensor in ``params`` by the tensor of ``root_rank``. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``; all
            values must be tensors. Entries of a mapping are matched by name, other entries by
            position.
        root_rank: the rank of the world whose values are copied.
        process_set: the ranks that take part; None for all.

    Raises:
        ConfigError: an entry is not a dense tensor, or its elements share memory; or a rank is not
            in the process set.
        MismatchError: the ranks do not have the same tensors; raised on every rank.
    """
    named = _named(params)
    faults = [_fault_of(tensor) for _, tensor in named]
    lines = [
        f"{name} is {fault}" if fault else f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for (name, tensor), fault in zip(named, faults, strict=True)
    ]
    gather = partial(allgather_object, name="parameters.lines", process_set=process_set)
    require_equal_by(gather, lines, "parameters")
    for (name, _), fault in zip(named, faults, strict=True):
        if fault:
            raise ConfigError(
                f"broadcast_parameters must get dense tensors, but {name} is {fault}"
            )
    tensors = [tensor for _, tensor in named]
    broadcast_tensors_(tensors, root_rank, "parameters", process_set)


def _fault_of(value: object) -> str:
    """Return why a value cannot be replaced in place, with a remedy; empty if it can."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}; use broadcast_object"
    if value.layout is not torch.strided:
        return "sparse; call to_dense() first"
    if shares_elements(value):
        return "expanded, so that elements share memory; call clone() first"
    return ""


def _named(params: object) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ConfigError(
            f"broadcast_parameters must get a state_dict, named_parameters() or parameters(), got "
            f"a {type(params).__name__}"
        )
    return [
        entry if isinstance(entry, tuple) else (f"parameter {number}", entry)
        for number, entry in enumerate(params)
    ]


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Copy the optimizer state of ``root_rank`` to every rank, with options such as ``lr``.

    Collective. The other ranks load the state like a checkpoint of ``root_rank``; this works for
    every optimizer of torch. If ``root_rank`` has no state yet, missing gradients are set to zero
    on every rank, as in Horovod.

    Differs from Horovod: this function never calls ``step()``. Horovod calls ``step()`` after the
    gradients are set to zero, so that weight decay changes the parameters.

    Args:
        optimizer: a torch optimizer or a ``DistributedOptimizer``, with the same parameters in the
            same order on every rank.
        root_rank: a rank of the world that is in the process set.
        model: module whose sparse embeddings get sparse zero gradients; None for no such module.
        process_set: the ranks that take part; None for all.

    Raises:
        ConfigError: ``optimizer`` is not an optimizer, or a rank is not in the process set.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"broadcast_optimizer_state must get an optimizer of torch, got a "
            f"{type(optimizer).__name__}"
        )
    is_root = current().topology.rank == root_rank
    tensors: list[Tensor] = []
    skeleton = _lift(optimizer.state_dict(), tensors) if is_root else b""
    layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
    sent = (skeleton, layout)
    skeleton, layout = broadcast_object(sent, root_rank, "optimizer_state", process_set)
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
    broadcast_tensors_(tensors, root_rank, "optimizer_state.tensors", process_set)
    state = _lower(skeleton, tensors)
    if not is_root:
        _load(optimizer, state)
    if not state["state"]:
        _fill_gradients(optimizer, _sparse(model))


def _lift(value: object, tensors: list[Tensor]) -> bytes:
    """Pickle ``value`` without its tensors, which are appended to ``tensors``."""

    class Lifting(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> int | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return len(tensors) - 1

    file = io.BytesIO()
    Lifting(file).dump(value)
    return file.getvalue()


def _lower(skeleton: bytes, tensors: list[Tensor]) -> dict[str, Any]:
    """Unpickle the result of ``_lift``, and insert ``tensors``."""

    class Lowering(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return cast("dict[str, Any]", Lowering(io.BytesIO(skeleton)).load())


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer without changing its dtypes.

    ``load_state_dict`` converts state to the dtype of its parameter, but the root may store the
    state of half-precision parameters in another dtype.
    """
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, p in zip(numbers, _parameters(optimizer), strict=True):
        for name, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[p][name]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sparse(model: nn.Module | None) -> set[Tensor]:
    modules = model.modules() if model is not None else ()
    return {m.weight for m in modules if isinstance(m, nn.Embedding) and m.sparse}


def _fill_gradients(optimizer: Optimizer, sparse: set[Tensor]) -> None:
    for p in _parameters(optimizer):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
            if isinstance(optimizer, SparseAdam) or (isinstance(optimizer, SGD) and p in sparse):
                p.grad = p.grad.to_sparse()
