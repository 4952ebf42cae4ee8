"""``check_replicas``, which compares the model between ranks and repairs differences."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.comm.agreement import gather_distinct, is_equal, maxima, places_of_differences
from hpctrain.comm.communicator import Communicator
from hpctrain.core import logs
from hpctrain.core.errors import ReplicaError
from hpctrain.core.units import by_rank
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
    """Check that the model is bitwise identical on all ranks. Collective over the process set.

    Call this function between two steps, where replicas must be equal. Each rank hashes its
    tensors, and one small message compares the hashes; names are sent only if hashes differ.

    Args:
        model: module whose parameters are compared.
        optimizer: optimizer whose state and parameter groups are also compared.
        buffers: whether to compare all buffers. None compares only the buffers of
            ``SyncBatchNorm``, which are computed from the samples of all ranks; buffers of other
            layers depend on each rank's samples.
        process_set: ranks to compare; None for all ranks.
        heal: whether to repair tensors that differ: the value that more than half of the ranks
            have is copied to the other ranks, and a warning names the tensors.

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
    if is_equal(comm, mine):
        return
    lists = gather_distinct(comm.allgather_object, [*mine]) or [[*mine]]
    names = [*dict.fromkeys(chain.from_iterable(filter(None, lists)))]
    hashes = [int(mine.get(name, "0"), 16) >> 1 for name in names]
    differ = [names[place] for place in places_of_differences(comm, hashes)]
    found = f"{len(differ)} of {len(names)} values differ: {_shown(comm, mine, differ)}"
    no_majority = ""
    if heal:
        owners = _owners(comm, mine, differ)
        lost = next((name for name, owner in owners.items() if owner.rank is None), None)
        if lost is None:
            _heal(comm, values, owners)
            if comm.rank == 0:
                logs.logger.warning(
                    f"replicas must be equal on every rank, but {found}; healed: the values of "
                    f"the majority were copied to the other ranks"
                )
            return
        no_majority = f", and {lost} is not the same tensor on more than half of the ranks"
    raise ReplicaError(
        f"replicas must be equal on every rank, but {found}{no_majority}; find changes that only "
        "some ranks make, such as outside optimizer.step(), and start with "
        "broadcast_parameters(model.state_dict())"
    )


def _shown(comm: Communicator, mine: Mapping[str, str], differ: Sequence[str]) -> str:
    """Return a text with the hashes of the first values that differ, by rank. Collective."""
    named = differ[:_MOST_NAMED]
    of_ranks = comm.allgather_object([mine.get(name, "not there") for name in named])
    return "; ".join(
        f"{name} ({by_rank(hashes)})"
        for name, hashes in zip(named, zip(*of_ranks, strict=True), strict=True)
    )


class _Owner(NamedTuple):
    """A rank that has the value of more than half of the ranks."""

    rank: int | None  # None if no value is the same on more than half of the ranks
    is_equal: bool  # whether this rank has the same value


def _owners(
    comm: Communicator, mine: Mapping[str, str], differ: Sequence[str]
) -> dict[str, _Owner]:
    """Return an owner of each value that differs. Collective.

    The hash of the majority is found bit by bit: if more than half of the ranks have the same
    hash, each of its bits is the bit that more than half of the ranks have. So the bytes sent do
    not depend on the number of ranks.
    """
    hashes = [int(mine.get(name, "0"), 16) for name in differ]
    bits = torch.tensor([[number >> place & 1 for place in range(64)] for number in hashes])
    comm.allreduce_(bits).wait()
    most = [
        sum(1 << place for place, count in enumerate(counts) if 2 * count > comm.size)
        for counts in bits.tolist()
    ]
    has = [number == each and number > 0 for number, each in zip(hashes, most, strict=True)]
    counts = torch.tensor(has, dtype=torch.int64)
    comm.allreduce_(counts).wait()
    ranks = maxima(comm, [-comm.rank if one else -comm.size for one in has])
    return {
        name: _Owner(-rank if 2 * count > comm.size else None, one)
        for name, rank, count, one in zip(differ, ranks, counts.tolist(), has, strict=True)
    }


@torch.no_grad()
def _heal(comm: Communicator, values: Mapping[str, Any], owners: Mapping[str, _Owner]) -> None:
    """Broadcast each value from its owner to the ranks whose values differ. Collective."""
    facts = [_facts(values.get(name)) for name in owners]
    numbers = [zlib.crc32(repr(one).encode()) for one in facts]
    differ = {*places_of_differences(comm, numbers)}
    for place, name in enumerate(owners):
        if place in differ or facts[place] is None:
            raise ReplicaError(
                f"values to heal must be dense tensors of one shape and dtype on all ranks, but "
                f"{name} is not; load a checkpoint"
            )
    for name, owner in owners.items():
        value: Tensor = values[name].detach()
        copy = value.to("cpu", copy=True).contiguous()
        comm.broadcast_(copy, root=owner.rank or 0).wait()
        if not owner.is_equal:
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
