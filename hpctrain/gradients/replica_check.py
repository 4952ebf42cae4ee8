"""``check_replicas``, which compares the model between ranks and repairs differences."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.comm.agreement import differing, gather_distinct
from hpctrain.comm.communicator import Communicator
from hpctrain.core import logs
from hpctrain.core.errors import ReplicaError
from hpctrain.gradients.batch_norm import SyncBatchNorm
from hpctrain.runtime import world
from hpctrain.runtime.process_sets import ProcessSet, global_process_set

_MOST_NAMED = 3


def check_replicas(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    buffers: bool | None = None,
    process_set: ProcessSet | None = global_process_set,
    heal: bool = False,
) -> None:
    """Raise unless the model is bitwise identical on all ranks. Collective over the process set.

    Called between two steps, where replicas must be equal. Each rank hashes its tensors, and one
    small message compares the hashes; names are sent only if hashes differ.

    Args:
        model: module whose parameters are compared.
        optimizer: optimizer whose state and parameter groups are also compared.
        buffers: whether to compare all buffers. None compares only the buffers of
            ``SyncBatchNorm``, which are computed from the samples of all ranks; buffers of other
            layers depend on each rank's samples.
        process_set: ranks to compare; None for all ranks.
        heal: whether to copy a tensor that is equal on more than half of the ranks to the other
            ranks, and log a warning with the names of the tensors.

    Raises:
        ReplicaError: values differ; raised on every rank, with names and ranks. With ``heal``,
            raised only if a value has no majority or is not a tensor; then no value is changed.
        CheckpointError: the optimizer state contains a value that cannot be hashed.
        NotInitializedError: ``hpctrain.init()`` was not called.
    """
    which = process_set or global_process_set
    sets = world.current().sets
    if which.process_set_id is not None and not which.included():
        return
    comm = sets.communicator(which)
    require_equal_replicas(comm, model, optimizer, buffers=buffers, heal=heal)


def require_equal_replicas(
    comm: Communicator,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    buffers: bool | None = None,
    heal: bool = False,
) -> None:
    """Compare the ranks of ``comm``; see ``check_replicas``. Collective."""
    if comm.size == 1:
        return
    values = dict(_of_model(model, buffers=buffers))
    if optimizer is not None:
        values |= _of_optimizer(model, optimizer)
    mine = value_hashes(values)
    found_by_rank = gather_distinct(comm.allgather_object, mine, max_sent=comm.size)
    every = [found for found in found_by_rank if found is not None]
    if not every:
        return
    num_names = len({name for hashes in every for name in hashes})
    differ = differing(every, "not there")
    shown = "; ".join(f"{name} ({found})" for name, found in list(differ.items())[:_MOST_NAMED])
    found = f"{len(differ)} of {num_names} values differ: {shown}"
    owners = {name: _owner(name, every) for name in differ}
    lost = next((name for name, rank in owners.items() if rank is None), None)
    if heal and lost is None:
        _heal(comm, values, owners, every)
        if comm.rank == 0:
            logs.logger.warning(
                f"replicas must be equal on every rank, but {found}; healed: the values of the "
                f"majority were copied to the other ranks"
            )
        return
    no_majority = (
        f", and {lost} is not the same tensor on more than half of the ranks" if heal else ""
    )
    raise ReplicaError(
        f"replicas must be equal on every rank, but {found}{no_majority}; find changes that only "
        "some ranks make, such as outside optimizer.step(), and start with "
        "broadcast_parameters(model.state_dict())"
    )


def _owner(name: str, every: Sequence[Mapping[str, str]]) -> int | None:
    """Return a rank that has the value of the majority of ranks; None if there is no majority."""
    seen = [hashes.get(name, "") for hashes in every]
    value, count = Counter(seen).most_common(1)[0]
    return seen.index(value) if value and 2 * count > len(seen) else None


@torch.no_grad()
def _heal(
    comm: Communicator,
    values: Mapping[str, Any],
    owners: Mapping[str, int | None],
    every: Sequence[Mapping[str, str]],
) -> None:
    """Broadcast each value from its owner to the ranks whose values differ. Collective."""
    facts = comm.allgather_object([_facts(values.get(name)) for name in owners])
    for name, found in zip(owners, zip(*facts, strict=True), strict=True):
        if None in found or len(set(found)) > 1:
            raise ReplicaError(
                f"values to heal must be dense tensors of one shape and dtype on all ranks, but "
                f"{name} is not; load a checkpoint"
            )
    for name, owner in owners.items():
        value: Tensor = values[name].detach()
        copy = value.to("cpu", copy=True).contiguous()
        comm.broadcast_(copy, root=owner or 0).wait()
        if every[comm.rank].get(name) != every[owner or 0][name]:
            value.copy_(copy)


def _facts(value: object) -> tuple[Any, ...] | None:
    """Return shape and dtype of a dense tensor; None for other values, which cannot be copied."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.shape, value.dtype


def _of_model(model: nn.Module, *, buffers: bool | None) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for prefix, module in model.named_modules():
        if isinstance(module, SyncBatchNorm) if buffers is None else buffers:
            for name, buffer in module.named_buffers(recurse=False):
                yield f"buffer {prefix}.{name}".replace(" .", " "), buffer


def _of_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key} of optimizer group {number}", value
        for parameter in group["params"]:
            name = name_of.get(parameter, f"a parameter of group {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{key} of {name}", value
