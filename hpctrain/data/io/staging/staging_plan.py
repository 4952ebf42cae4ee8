"""The part of a data set that a node copies: all, or as much as there is room for."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.layout import Manifest
from hpctrain.data.tools.salvage import ShardBlocks

_PAGE_BYTES = 4096

Chosen = NDArray[np.bool_]
"""For each block of checksums of a shard, whether it is wanted."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What is copied of one shard."""

    index: int
    """Number of the shard in the data set."""
    blocks: Chosen | None
    """None for the whole file. Of others all but the data of the other blocks is copied."""
    num_bytes: int
    """What it takes on disk."""


def plan_of(
    directory: Path, manifest: Manifest, wanted: list[Chosen] | None, room_bytes: int
) -> list[ShardPlan]:
    """Choose what to copy, in the order of the shards.

    Args:
        directory: of the data set.
        manifest: of the data set.
        wanted: the blocks of each shard to copy where not all fits; None for any.
        room_bytes: how much may be copied.

    Raises:
        UNREADABLE: the index of a shard cannot be had.
    """
    whole = [ShardPlan(i, None, shard.num_bytes) for i, shard in enumerate(manifest.shards)]
    if sum(plan.num_bytes for plan in whole) <= room_bytes:
        return whole
    if wanted is None:
        return _fitting(whole, room_bytes)
    plans = []
    for plan, chosen in zip(whole, wanted, strict=True):
        if not chosen.any():
            continue
        part = _partial(directory, manifest, plan, chosen, room_bytes)
        if part is not None and part.num_bytes <= room_bytes:
            plans.append(part)
            room_bytes -= part.num_bytes
    return plans


def wanted_blocks(manifest: Manifest, starts: NDArray[np.int64], length: int) -> list[Chosen]:
    """Return for each shard which of its blocks hold some of the samples.

    Args:
        manifest: of the data set.
        starts: first samples of the runs ``[start, start + length)``; the last may be short.
        length: samples of a run.
    """
    size, first, found = manifest.block_size, 0, []
    for shard in manifest.shards:
        rows = np.clip([starts - first, starts - first + length], 0, shard.num_samples)
        begins, ends = rows[:, rows[0] < rows[1]]
        changes = np.zeros(manifest.num_blocks(shard) + 1, np.int64)
        np.add.at(changes, begins // size, 1)
        np.add.at(changes, -(-ends // size), -1)
        found.append(np.cumsum(changes[:-1]) > 0)
        first += shard.num_samples
    return found


def _fitting(plans: Iterable[ShardPlan], room_bytes: int) -> list[ShardPlan]:
    chosen = []
    for plan in plans:
        if plan.num_bytes <= room_bytes:
            chosen.append(plan)
            room_bytes -= plan.num_bytes
    return chosen


def _partial(
    directory: Path, manifest: Manifest, whole: ShardPlan, chosen: Chosen, room_bytes: int
) -> ShardPlan | None:
    """Plan some blocks of a shard; all of it where they cannot be told apart in the file."""
    shard = manifest.shards[whole.index]
    if chosen.all() and whole.num_bytes <= room_bytes:
        return whole
    numbers = np.flatnonzero(chosen)
    costs = np.zeros(len(numbers), np.int64)
    frame_bytes = shard.num_bytes
    with ShardBlocks(directory, manifest, whole.index) as blocks:
        for name, place in shard.places.items():
            edges = blocks.bounds(name) * blocks.row_bytes(name)
            if place.offset is None and edges[-1]:
                return whole
            frame_bytes += 2 * _PAGE_BYTES - int(edges[-1])
            costs += _page_bytes(edges[numbers], edges[numbers + 1])
    num_fitting = int(np.searchsorted(np.cumsum(costs), room_bytes - frame_bytes, side="right"))
    if not num_fitting:
        return None
    fits = np.zeros_like(chosen)
    fits[numbers[:num_fitting]] = True
    return ShardPlan(whole.index, fits, frame_bytes + int(costs[:num_fitting].sum()))


def _page_bytes(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of the pages that each run of bytes takes besides those before it."""
    firsts, lasts = starts // _PAGE_BYTES, -(-stops // _PAGE_BYTES)
    firsts[1:] = np.maximum(firsts[1:], lasts[:-1])
    pages: NDArray[np.int64] = np.maximum(lasts - firsts, 0)
    return pages * _PAGE_BYTES
