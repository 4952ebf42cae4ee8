"""Micro-shards: the fixed parts of a global batch, whatever the number of ranks."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.core.errors import ConfigError

ALIGNMENT = 64
"""Bytes, a vector register of any CPU: libraries calculate the ends of other arrays apart."""


def own_micro_shards(num_micro_shards: int, rank: int, size: int) -> range:
    """Return the numbers of the micro-shards of a rank: contiguous, all ranks equal or one apart.

    ``ConfigError`` if the number of micro-shards is no power of two, or below that of ranks.
    """
    if num_micro_shards < 1 or num_micro_shards & (num_micro_shards - 1):
        raise ConfigError(
            f"micro_shards is a power of two, got {num_micro_shards}; "
            f"take {1 << max(num_micro_shards, 1).bit_length()}"
        )
    if num_micro_shards < size:
        raise ConfigError(
            f"every rank needs a micro-shard, got micro_shards = {num_micro_shards} on {size} "
            f"ranks; take {1 << (size - 1).bit_length()} or more, which changes the result, "
            f"or fewer ranks"
        )
    return range(num_micro_shards * rank // size, num_micro_shards * (rank + 1) // size)


def sample_range(num_samples: int, num_micro_shards: int, shards: range) -> range:
    """Return the samples of the micro-shards ``shards`` in a global batch: contiguous.

    Micro-shards differ by one sample where their number does not divide that of the batch.
    """
    return range(
        num_samples * shards.start // num_micro_shards,
        num_samples * shards.stop // num_micro_shards,
    )


def seed_of(seed: int, step: int, micro_shard: int) -> int:
    """Return the seed of the random numbers of one micro-shard in one step, below 2^64."""
    key = f"{seed} {step} {micro_shard}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little")


def num_samples_of(batch: Any) -> int:
    """Return how many samples a batch holds.

    It consists of tensors whose first dimension counts the samples, in tuples, lists and mappings;
    ``ConfigError`` if it holds something else, nothing, or tensors of different lengths.
    """
    found = {len(tensor) if tensor.dim() else -1 for tensor in _tensors(batch)}
    if len(found) != 1 or -1 in found:
        raise ConfigError(
            f"tensors of a batch have a first dimension that counts the samples, the same in "
            f"all, got lengths {sorted(found)} (-1: no dimension at all)"
        )
    return found.pop()


def aligned_part(batch: Any, samples: slice) -> Any:
    """Return a copy of some samples of a batch, each tensor contiguous in aligned memory."""
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
    """Yield the micro-shards of a rank that have samples, each as ``aligned_part`` copies it.

    ``batch`` is samples ``sample_range(num_samples, num_micro_shards, shards)`` of a global batch.
    """
    start = sample_range(num_samples, num_micro_shards, shards).start
    for shard in shards:
        own = sample_range(num_samples, num_micro_shards, range(shard, shard + 1))
        if own:
            yield aligned_part(batch, slice(own.start - start, own.stop - start))


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)
    else:
        raise ConfigError(
            f"a batch holds tensors in tuples, lists and mappings, got {type(batch).__name__}; "
            f"pad samples of different lengths to one fixed length"
        )
