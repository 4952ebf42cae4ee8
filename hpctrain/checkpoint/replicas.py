"""Comparison of replicated state between ranks, before a checkpoint is published."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.checkpoint.format.shard import TensorPiece
from hpctrain.checkpoint.format.state_hash import crc_of, device_checksum, is_dense
from hpctrain.comm.agreement import places_of_differences
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import MIB, format_ranks

_POOL_BYTES = 64 * MIB
_BITS = (1 << 62) - 1  # bits of a checksum, so that its negative fits into int64 too
MOST_NAMED = 3
_MOST_GROUPS = 4


class Checksum(NamedTuple):
    """Checksum of the values of a replicated tensor."""

    value: int
    device: str  # device type, such as cuda; checksums of different types are not comparable


def checksums(leaves: Mapping[str, Tensor | TensorPiece]) -> dict[str, Checksum]:
    """Return the checksums of replicated tensors. Not collective.

    The speed is limited by memory bandwidth. The host computes crc32 in as many threads as torch
    has; other devices use integer arithmetic.
    """
    tensors = {path: t for path, t in leaves.items() if isinstance(t, Tensor) and is_dense(t)}
    remote = {path: device_checksum(t) for path, t in tensors.items() if not t.is_cpu}
    local = {path: t for path, t in tensors.items() if t.is_cpu}
    # A thread pool takes about as long to start as checksums of a few MiB.
    many = sum(tensor.nbytes for tensor in local.values()) >= _POOL_BYTES
    with ThreadPoolExecutor(torch.get_num_threads()) if many else nullcontext() as pool:
        crcs = list((pool.map if pool else map)(crc_of, local.values()))
    values: dict[str, int | Tensor] = {**dict(zip(local, crcs, strict=True)), **remote}
    return {
        path: Checksum(int(values[path]) & _BITS, tensor.device.type)
        for path, tensor in tensors.items()
    }


def require_same(comm: Communicator, found: Mapping[str, int]) -> None:
    """Check that each tensor has the same checksum on all ranks. Collective.

    One all-reduce finds the differences; only differing checksums are gathered.

    Args:
        comm: communicator of the ranks.
        found: checksums by name, with the same names in the same order on every rank.

    Raises:
        CheckpointError: checksums differ; the error names tensors and ranks, on every rank.
    """
    if not found:
        return
    names = [*found]
    differ = [names[place] for place in places_of_differences(comm, found.values())]
    if not differ:
        return
    named = differ[:MOST_NAMED]
    of_ranks = comm.allgather_object([found[name] for name in named])
    values = [dict(enumerate(column)) for column in zip(*of_ranks, strict=True)]
    raise difference(dict(zip(named, values, strict=True)), len(found), len(differ))


def difference(
    values: Mapping[str, Mapping[int, int]], num_found: int, num_differ: int = 0
) -> CheckpointError:
    """Return the error for tensors that differ between ranks.

    Args:
        values: by tensor name: the checksum of each rank that holds the tensor, by rank.
        num_found: number of tensors that were compared.
        num_differ: number of tensors that differ; if 0, the number of tensors in ``values``.
    """
    names_of: dict[str, list[str]] = {}
    for name in list(values)[:MOST_NAMED]:
        names_of.setdefault(_grouped(values[name]), []).append(name)
    shown = "; ".join(f"{', '.join(names)} ({groups})" for groups, names in names_of.items())
    return CheckpointError(
        f"tensors that ranks share must be equal on all of them, but "
        f"{num_differ or len(values)} of {num_found} differ: {shown}; pass source_rank=0 to write "
        f"the tensors of rank 0, call hvd.broadcast_parameters() on them before the save, or "
        f"remove them from the state and pass them as private="
    )


def _grouped(values: Mapping[int, int]) -> str:
    """Return a text that groups the ranks by equal values."""
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    shown = [format_ranks(ranks) for ranks in groups.values()]
    if len(shown) > _MOST_GROUPS:
        shown = [*shown[:_MOST_GROUPS], f"{len(shown) - _MOST_GROUPS} more values"]
    return " differs from ".join(shown)
