"""``check_replicas``: comparison of the model over all ranks."""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.comm.agreement import differing
from hpctrain.comm.communicator import Communicator
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
) -> None:
    """Return if the ranks hold the same bits; collective over the process set.

    For any place between two steps where replicas should be equal. Each rank hashes what it has,
    and one small message compares the hashes; names travel only where they differ.

    Args:
        model: its parameters are compared.
        optimizer: its state and its groups are compared too.
        buffers: compare all buffers, or none. None compares those of ``SyncBatchNorm``, which all
            ranks calculate together; those of other layers differ by each rank's own samples.
        process_set: the ranks to compare; None for all.

    Raises:
        ReplicaError: some differ; names them with their ranks, on every rank.
        CheckpointError: the optimizer's state holds what has no hash.
        NotInitializedError: ``hpctrain.init()`` was not called.
    """
    which = process_set or global_process_set
    sets = world.current().sets
    if which.process_set_id is not None and not which.included():
        return
    require_equal_replicas(sets.communicator(which), model, optimizer, buffers=buffers)


def require_equal_replicas(
    comm: Communicator,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    buffers: bool | None = None,
) -> None:
    """Return if the ranks of ``comm`` hold the same bits; see ``check_replicas``. Collective."""
    if comm.size == 1:
        return
    values = dict(_of_model(model, buffers=buffers))
    if optimizer is not None:
        values |= _of_optimizer(model, optimizer)
    mine = value_hashes(values)
    whole = hashlib.sha256(repr(mine).encode()).hexdigest()[:16]
    if len(set(comm.allgather_object(whole))) == 1:
        return
    every = comm.allgather_object(mine)
    num_names = len({name for hashes in every for name in hashes})
    differ = differing(every, "not there")
    shown = "; ".join(f"{name} ({found})" for name, found in list(differ.items())[:_MOST_NAMED])
    raise ReplicaError(
        f"replicas must be equal on every rank, {len(differ)} of {num_names} values differ: "
        f"{shown}; look for what some ranks do alone, such as a change outside optimizer.step(), "
        f"and begin with broadcast_parameters(model.state_dict())"
    )


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
