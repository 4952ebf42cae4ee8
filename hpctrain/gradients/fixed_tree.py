"""Sums over a fixed binary tree, with the same additions on any number of ranks.

A batch is divided into micro-shards; their number is a power of two. Each leaf of the tree has a
list of values of one micro-shard, such as gradients; an entry is an index in this list. Node i of
level k is the sum of nodes 2i and 2i + 1 of level k - 1; leaves have level 0. A rank with
consecutive leaves sums all complete subtrees of its range; at most 2 log2(leaves) nodes remain.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.planning import machine
from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.core.errors import ConfigError

ALIGNMENT = 64
"""Bytes of the widest vector register; libraries compute unaligned elements differently."""


def own_micro_shards(num_micro_shards: int, rank: int, size: int) -> range:
    """Return the indices of the micro-shards that ``rank`` computes.

    The indices are consecutive. Some ranks have one micro-shard more than others.

    Raises:
        ConfigError: the number of micro-shards is not a power of two, or less than ``size``.
    """
    if num_micro_shards < 1 or num_micro_shards & (num_micro_shards - 1):
        raise ConfigError(
            f"micro_shards must be a power of two, got {num_micro_shards}; use "
            f"{1 << max(num_micro_shards, 1).bit_length()}"
        )
    if num_micro_shards < size:
        raise ConfigError(
            f"micro_shards must be at least the number of ranks, got micro_shards = "
            f"{num_micro_shards} on {size} ranks; use {1 << (size - 1).bit_length()} or more, "
            f"which changes the result, or fewer ranks"
        )
    return range(num_micro_shards * rank // size, num_micro_shards * (rank + 1) // size)


def sample_range(num_samples: int, num_micro_shards: int, shards: range) -> range:
    """Return the range of samples of a global batch that belong to the micro-shards ``shards``.

    The sizes of micro-shards differ by at most one sample.
    """
    return range(
        num_samples * shards.start // num_micro_shards,
        num_samples * shards.stop // num_micro_shards,
    )


def seed_of(seed: int, step: int, micro_shard: int) -> int:
    """Return the random seed of one micro-shard in one step, below 2^64."""
    key = f"{seed} {step} {micro_shard}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little")


def num_samples_of(batch: Any) -> int:
    """Return the number of samples in a batch.

    A batch consists of tensors whose first dimension counts the samples, in tuples, lists and
    mappings.

    Raises:
        ConfigError: the batch contains another object, nothing, or tensors of different lengths.
    """
    found = {len(tensor) if tensor.dim() else -1 for tensor in _tensors_of(batch)}
    if len(found) != 1 or -1 in found:
        raise ConfigError(
            f"the first dimension of every tensor of a batch must be the samples, with one "
            f"length in all tensors, got lengths {sorted(found)} (-1: no dimension); reshape or "
            f"remove tensors with another first dimension"
        )
    return found.pop()


def aligned_part(batch: Any, samples: slice) -> Any:
    """Return a copy of the range ``samples`` of a batch, with contiguous, aligned tensors."""
    if isinstance(batch, Tensor):
        return aligned(batch[samples])
    if isinstance(batch, Mapping):
        return {name: aligned_part(value, samples) for name, value in batch.items()}
    return tuple(aligned_part(value, samples) for value in batch)


def aligned(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of ``tensor`` that begins at a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() * tensor.itemsize + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    memory = room[start : start + tensor.numel() * tensor.itemsize]
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def aligned_parts(
    batch: Any, num_samples: int, num_micro_shards: int, shards: range
) -> Iterator[Any]:
    """Yield a copy of each nonempty micro-shard in ``shards``, in aligned memory.

    ``batch`` contains the samples ``sample_range(num_samples, num_micro_shards, shards)`` of a
    global batch.
    """
    start = sample_range(num_samples, num_micro_shards, shards).start
    for shard in shards:
        own = sample_range(num_samples, num_micro_shards, range(shard, shard + 1))
        if own:
            yield aligned_part(batch, slice(own.start - start, own.stop - start))


def _tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_of(value)
    else:
        raise ConfigError(
            f"a batch must consist of tensors in tuples, lists and mappings, got "
            f"{type(batch).__name__}; return tensors, and pad samples of different lengths"
        )


MESSAGE_BYTES = 4 << 20  # largest message, unless a single value is larger

Absent = Callable[[int, int], Tensor]
"""Function of (entry, level) that returns the sum for a node without a value for the entry."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One node of the tree, with the sum of the leaves below it."""

    level: int
    index: int
    values: list[Tensor | None]
    """Sums by entry, in memory that no other tree node uses; None if no leaf has a value."""


def push(pending: list[Node], node: Node, absent: Absent) -> None:
    """Append ``node`` to ``pending``, and replace pairs of siblings by their sums."""
    while pending and _are_siblings(pending[-1], node):
        node = _sum(pending.pop(), node, absent)
    pending.append(node)


def whole_nodes(leaves: range) -> list[tuple[int, int]]:
    """Return (level, index) of the largest nodes that cover a range of leaves, in order."""
    pending: list[Node] = []
    for leaf in leaves:
        push(pending, Node(0, leaf, []), _nothing)
    return [(node.level, node.index) for node in pending]


def sum_over_ranks(
    comm: Communicator,
    ranges: Sequence[range],
    pending: Sequence[Node],
    present: Sequence[bool],
    absent: Absent,
) -> list[Tensor | None]:
    """Return the values of the root. Collective; the memory of ``pending`` is reused.

    Each rank sums a slice of the elements over the upper part of the tree, and sends the sums to
    all other ranks. If each of N ranks has one pending node, a rank sends 2 (N-1)/N times the
    bytes of the values, and half as much for each additional pending node. The additional memory
    is about 4 messages, and 2 for each additional pending node.

    Args:
        comm: ranks to sum over.
        ranges: leaves of each rank.
        pending: nodes of this rank.
        present: for each entry, whether any leaf of any rank has a value. The result of an entry
            without a value is None.
        absent: function that returns the sum for a node without a value.
    """
    rows = [
        [_value(node, entry, absent) if there else None for entry, there in enumerate(present)]
        for node in pending
    ]
    if comm.size == 1:
        return rows[0]
    nodes_of = [whole_nodes(leaves) for leaves in ranges]
    for group in _groups(rows[0]):
        columns = [[row[entry] for entry in group] for row in rows]
        _sum_group_(comm, nodes_of, [_present(values) for values in columns])
    return rows[0]


def _sum_group_(
    comm: Communicator, nodes_of: Sequence[Sequence[tuple[int, int]]], rows: list[list[Tensor]]
) -> None:
    """Replace ``rows[0]`` by the values of the root. Collective; all values have one dtype."""
    numel = sum(value.numel() for value in rows[0])
    packed = torch.empty((len(rows), numel), dtype=rows[0][0].dtype)
    for row, room in zip(rows, packed, strict=True):
        PackedTensors(room, row).pack(row)
    received = comm.alltoall(packed.tensor_split(comm.size, dim=1))
    del packed
    pending: list[Node] = []
    for nodes, slices in zip(nodes_of, received, strict=True):
        for (level, index), part in zip(nodes, slices, strict=True):
            push(pending, Node(level, index, [part]), _nothing)
    (root,) = pending
    total = torch.cat(comm.all_gather(_present(root.values)[0]))
    PackedTensors(total, rows[0]).unpack(rows[0])


def _groups(values: Sequence[Tensor | None]) -> Iterator[list[int]]:
    """Yield groups of entries that are sent in one message: consecutive, of one dtype."""
    group: list[int] = []
    num_bytes = 0
    dtype: torch.dtype | None = None
    for entry, value in enumerate(values):
        if value is None:
            continue
        if group and (value.dtype is not dtype or num_bytes + value.nbytes > MESSAGE_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(entry)
        num_bytes += value.nbytes
        dtype = value.dtype
    if group:
        yield group


def _are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.index + 1 == right.index and right.index % 2 == 1


def _sum(left: Node, right: Node, absent: Absent) -> Node:
    for entry, (value, other) in enumerate(zip(left.values, right.values, strict=True)):
        if value is None and other is None:
            continue
        total = absent(entry, left.level) if value is None else value
        left.values[entry] = total.add_(absent(entry, left.level) if other is None else other)
    return Node(left.level + 1, left.index // 2, left.values)


def _value(node: Node, entry: int, absent: Absent) -> Tensor:
    value = node.values[entry]
    return absent(entry, node.level) if value is None else value


def _present(values: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def _nothing(entry: int, level: int) -> Tensor:
    raise AssertionError(f"entry {entry} of a node of level {level} has no value")


def arithmetic(num_threads: int) -> dict[str, str]:
    """Return the facts that determine rounding, by name: processor, libraries and threads.

    Runs with equal facts have bitwise equal results.
    """
    names = ("math kernel library", "mkl-dnn", "onednn", "openmp", "blas_info")
    built = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    libraries = (line.partition(" (")[0] for line in built if line.lower().startswith(names))
    return {
        "processor": machine(1).removeprefix("1 x "),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "libraries": "; ".join(libraries),
        "threads": str(num_threads),
    }
