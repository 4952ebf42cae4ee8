"""Checkpoint state of a model and its optimizer, also where each rank has its own."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.comm.agreement import by_rank
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError, NotFiniteError
from hpctrain.gradients.replica_check import require_equal_replicas
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.train.config import SYNCHRONOUS
from hpctrain.train.task import Task


def agree(task: Task, comm: Communicator) -> bool:
    """Say whether all ranks have one model and one optimizer state; the same on every rank."""
    sync = task.sync
    if sync is None or comm.size == 1:
        return True
    return sync.rounds.agrees and sync.facts.get("phase") == SYNCHRONOUS


def check_replicas(task: Task, comm: Communicator) -> bool:
    """Return whether all ranks should have one model now, after a look at it. Collective.

    Raises:
        ReplicaError: they have not; on every rank.
    """
    if task.sync is not None and not task.sync.rounds.agrees:
        return False
    optimizer = task.optimizer if agree(task, comm) else None
    buffers = True if task.steps is not None else None
    require_equal_replicas(comm, task.model, optimizer, buffers=buffers)
    return True


def shared_replica(task: Task, comm: Communicator) -> dict[str, Any]:
    """Return a model and an optimizer state that any number of ranks can begin with. Collective.

    Where ranks have their own, it is the mean of them. Buffers without a mean are those of rank 0.
    """
    sync = task.sync
    differ = sync is not None and comm.size > 1 and not sync.rounds.agrees
    with sync.replica.as_mean() if sync is not None and differ else nullcontext():
        model = dict(task.model.state_dict())
        for name, buffer in task.model.named_buffers():
            if name in model:
                copy = buffer.detach().clone()
                comm.broadcast_(copy).wait()
                model[name] = copy
        if differ:
            model = _copied(model)
    return {"model": model, "optimizer": shared_optimizer(task, comm)}


def shared_optimizer(task: Task, comm: Communicator) -> dict[str, Any]:
    """Return an optimizer state that any number of ranks can begin with. Collective.

    The mean of all ranks' states; where some ranks have none of a parameter, as after a reset or
    before their first samples, the optimizer begins anew.
    """
    state: dict[str, Any] = task.optimizer.state_dict()
    if task.sync is None or agree(task, comm):
        return state
    names = state_hash({"names": [name for name, _ in task.sync.replica.state()]})
    if len(set(comm.allgather_object(names))) > 1:
        return {**state, "state": {}}
    return task.sync.replica.mean_state()


def require_finite_weights(task: Task, comm: Communicator) -> None:
    """Return if the parameters of all ranks are finite, so that they may be kept. Collective.

    Raises:
        NotFiniteError: they are not; on every rank. Not with ``train.on_non_finite = "ignore"``.
    """
    if task.config.train.on_non_finite == "ignore":
        return
    names = [n for n, p in task.model.named_parameters() if not bool(p.isfinite().all())]
    found: Sequence[str | None] = comm.allgather_object(", ".join(names[:3]) or None)
    if any(found):
        raise NotFiniteError(
            f"parameters that are kept must be finite, {by_rank(found)} are not: nothing was "
            f"written\ntake a smaller optimizer.lr, or train.clip_norm (both with --changed)"
        )


def own_replica(task: Task, comm: Communicator) -> dict[str, Any] | None:
    """Return this rank's parameters and optimizer state; None where all ranks agree."""
    if agree(task, comm):
        return None
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    return {"parameters": parameters, "optimizer": task.optimizer.state_dict()}


@torch.no_grad()
def restore(task: Task, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Give model and optimizer what ``shared_replica`` and ``own_replica`` returned.

    ``own`` is None where there is none, or the number of ranks has changed.
    """
    task.model.load_state_dict(shared["model"])
    task.optimizer.load_state_dict(_copied((own or shared)["optimizer"]))
    if own:
        for name, parameter in task.model.named_parameters():
            parameter.copy_(own["parameters"][name])


def restore_sync(
    sync: LocalMethod, method: str, shared: Mapping[str, Any], own: Mapping[str, Any] | None
) -> None:
    """Let a local method go on; ``own`` is None to begin a round. Collective, behind ``restore``.

    Raises:
        CheckpointError: the checkpoint is of another method.
    """
    state = shared.get("sync") or {}
    before = state.get("method", SYNCHRONOUS)
    if before != method:
        raise CheckpointError(
            f"a run goes on by the method that it has begun with, the checkpoint is of "
            f"sync.method = {before!r} and this run has {method!r}; set it back, or begin a run"
        )
    try:
        sync.load_shared_state(state)
        if own is not None:
            sync.load_own_state(own)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit [sync]: {error!r}; go on with the configuration it was "
            f"written with"
        ) from error


def _copied(tree: Any) -> Any:
    """Copy the tensors of a tree: an optimizer keeps those that it is given."""
    match tree:
        case Tensor():
            return tree.clone()
        case dict():
            return {name: _copied(item) for name, item in tree.items()}
        case list() | tuple():
            return type(tree)(_copied(item) for item in tree)
    return tree
