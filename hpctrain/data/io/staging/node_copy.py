"""One rank's share of the copy of a data set, checked while it is written."""

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import PART, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.data.format.crc import combine
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.staging.staging_plan import Chosen, ShardPlan
from hpctrain.data.tools.pieces import SavedPiece, cut
from hpctrain.data.tools.salvage import UNREADABLE, ShardBlocks

FIRST_S, EVERY_S = 10.0, 30.0
"""When a copy says how far it is, and how often from then on."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(slots=True)
class CopyShare:
    """What one rank has copied of one shard."""

    crc32: int = 0
    """Of the bytes, where the whole shard is copied."""
    num_bytes: int = 0
    """What was copied."""
    complete: bool = False
    """Whether nothing is missing of this rank's part."""


@dataclass(slots=True)
class Copied:
    """What one rank has done; the ranks exchange it."""

    shares: dict[int, CopyShare] = field(default_factory=dict)
    """By the number of the shard."""
    error: DataError | None = None
    """Why it stopped."""
    full: str = ""
    """Why the storage took no more."""


class Copier:
    """Copies this rank's part of each shard of a plan."""

    def __init__(
        self, source: Path, target: Path, manifest: Manifest, *, rank: int, size: int
    ) -> None:
        """Prepare.

        Args:
            source: directory of the data set.
            target: a directory of the node.
            manifest: of the data set.
            rank: of this process among those that share the work; rank 0 tells of the progress.
            size: number of those.
        """
        self._source = source
        self._target = target
        self._manifest = manifest
        self._rank = rank
        self._size = size
        self._stopped = target / "stopped"

    def copy(self, plans: list[ShardPlan]) -> Copied:
        """Copy until all is there, the storage is full, or any rank has met an error."""
        done = Copied()
        told = _Told(sum(plan.num_bytes for plan in plans) / self._size, self._target, self._rank)
        for plan in plans:
            mine = done.shares[plan.index] = CopyShare()
            try:
                self._copy_shard(plan, mine, told)
            except DataError as error:
                done.error = error if isinstance(error, CorruptError) else DataError(str(error))
                with suppress(OSError):  # then the others find out at their end
                    self._stopped.touch()
                return done
            except _StorageFullError as error:
                done.full = str(error)
                return done
        return done

    def _copy_shard(self, plan: ShardPlan, mine: CopyShare, told: "_Told") -> None:
        shard = self._manifest.shards[plan.index]
        try:
            with ShardBlocks(self._source, self._manifest, plan.index) as blocks:
                if blocks.num_bytes != shard.num_bytes:
                    why = f"it has {shard.num_bytes} bytes by its manifest, got {blocks.num_bytes}"
                    raise self._damaged(plan.index, why)
                pieces = list(cut(blocks))
                part = (self._rank + plan.index) % self._size
                first, last = (len(pieces) * p // self._size for p in (part, part + 1))
                tables = {} if plan.blocks is None else _tables(blocks)
                target = _open(self._target / (shard.file + PART), shard.num_bytes)
                work = _Work(target, tables, mine)
                try:
                    for piece in pieces[first:last]:
                        if self._stopped.exists():
                            return
                        if plan.blocks is None or piece.field is None:
                            _copy_bytes(blocks, piece, work)
                        else:
                            self._copy_blocks(blocks, piece, work, plan.blocks)
                        told.advance(mine.num_bytes)
                finally:
                    os.close(target)
        except (CorruptError, _StorageError):
            raise
        except UNREADABLE as error:
            raise self._damaged(plan.index, reason_of(error)) from error
        told.finish(mine.num_bytes)
        mine.complete = True

    def _copy_blocks(
        self, blocks: ShardBlocks, piece: SavedPiece, work: "_Work", chosen: Chosen
    ) -> None:
        """Copy the chosen blocks of a piece; neighbours are read at once."""
        name = piece.field or ""
        edges = blocks.bounds(name) * blocks.row_bytes(name)
        offset = piece.start - int(edges[piece.blocks.start])
        here = chosen[piece.blocks.start : piece.blocks.stop]
        numbers = np.flatnonzero(here) + piece.blocks.start
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            if not len(run):
                continue
            start, stop = offset + int(edges[run[0]]), offset + int(edges[run[-1] + 1])
            data = blocks.read_bytes(start, stop)
            for number in run.tolist():
                first, last = (offset + int(edge) - start for edge in edges[number : number + 2])
                if crc32(data[first:last]) != work.tables[name][number]:
                    why = f"block {number} of field {name} has the wrong crc32"
                    raise self._damaged(blocks.index, why, *blocks.samples(number, number + 1))
            work.mine.num_bytes += len(data)
            _write(work.target, data, start)

    def _damaged(self, index: int, why: str, *samples: int) -> CorruptError:
        return damaged(self._source, self._manifest, index, why, *samples)


def damaged(
    directory: Path, manifest: Manifest, index: int, why: str, *samples: int
) -> CorruptError:
    """Return the error for a shard that cannot be copied; ``samples`` by default all of it."""
    shard = manifest.shards[index]
    first = sum(before.num_samples for before in manifest.shards[:index])
    start, stop = samples or (first, first + shard.num_samples)
    return CorruptError(
        f"shard {directory / shard.file} is damaged, so it is not copied to the node: {why} "
        f"(samples {start} to {stop - 1}); find all damage with hpctrain data verify {directory}",
        start,
        stop,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What the copy of a shard goes to, and is checked by."""

    target: int
    """Descriptor."""
    tables: dict[str, NDArray[Any]]
    """The crc32 of each block, by field."""
    mine: CopyShare


class _StorageError(DataError):
    """The storage of the node does not work."""


class _StorageFullError(Exception):
    """The storage of the node takes no more."""


class _Told:
    """Tells how far a long copy is."""

    def __init__(self, total_bytes: float, target: Path, rank: int) -> None:
        self._total_bytes = total_bytes
        self._target = target
        self._rank = rank
        self._before = 0
        self._start = time.monotonic()
        self._next = self._start + FIRST_S

    def advance(self, num_bytes: int) -> None:
        """Say it when it is time to; ``num_bytes`` of the present shard are copied."""
        now = time.monotonic()
        if self._rank or now < self._next:
            return
        self._next = now + EVERY_S
        logger.warning(
            "this rank has copied %s of about %s to %s after %s",
            format_bytes(self._before + num_bytes),
            format_bytes(self._total_bytes),
            self._target,
            format_seconds(now - self._start),
        )

    def finish(self, num_bytes: int) -> None:
        """Count a shard."""
        self._before += num_bytes


def rank_of(part: int, shard: int, size: int) -> int:
    """Return which rank copies a part of a shard.

    It changes from shard to shard, as of small ones one part alone is not empty.
    """
    return (part - shard) % size


def _tables(blocks: ShardBlocks) -> dict[str, NDArray[Any]]:
    tables = {name: blocks.table(name) for name in blocks.manifest.fields}
    for name, table in tables.items():
        if crc32(table.data) != blocks.shard.places[name].crc32:
            raise DataError(f"the checksums of field {name} are damaged")
    return tables


def _copy_bytes(blocks: ShardBlocks, piece: SavedPiece, work: _Work) -> None:
    data = blocks.read_bytes(piece.start, piece.stop)
    work.mine.crc32 = combine(work.mine.crc32, crc32(data), len(data))
    work.mine.num_bytes += len(data)
    _write(work.target, data, piece.start)


def _open(path: Path, num_bytes: int) -> int:
    """Open the copy of a shard, in its full size, with holes."""
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        os.ftruncate(target, num_bytes)
    except OSError as error:
        os.close(target)
        raise _refused(path, error) from error
    return target


def _write(target: int, data: memoryview, offset: int) -> None:
    try:
        while data:
            count = os.pwrite(target, data, offset)
            data, offset = data[count:], offset + count
    except OSError as error:
        raise _refused(Path(f"/proc/self/fd/{target}"), error) from error


def _refused(path: Path, error: OSError) -> Exception:
    if error.errno in _FULL:
        return _StorageFullError(reason_of(error))
    named = path.readlink() if path.is_symlink() else path
    return _StorageError(
        f"cannot write {named}: {reason_of(error)}; check the storage of this node, or read the "
        f"data set where it is: stage=None"
    )
