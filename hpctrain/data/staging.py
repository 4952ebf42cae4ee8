"""Copy a data set to storage that the ranks of a node share: once per node, not once per rank."""

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.cluster import env
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.core.atomic import PART, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.core.logs import logger
from hpctrain.core.units import MIB, format_bytes
from hpctrain.data.format.dataset_manifest import Manifest, ShardEntry
from hpctrain.data.io.shardfile import IO, OpenShard, check_file
from hpctrain.data.io.values import ChunkCache
from hpctrain.data.node_folder import NodeFolder, sites, sweep
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.tools.rank_work import in_turns

FIRST_S, EVERY_S = 10.0, 30.0  # seconds before the first progress report, and between reports

_PIECE_BYTES = 8 * MIB
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def stage(dataset: ShardedDataset, node: Communicator, to: Path | str = "auto") -> ShardedDataset:
    """Copy a data set to a folder that this node's ranks share, and read it from the copy.

    Collective over the ranks of a node. Each rank copies some of the shards, and all ranks return
    when the copy is complete. The checksums of the shards are checked. The copy is removed when
    no rank of the node uses the returned data set any more. Copies of killed jobs are removed by
    the next job that copies to the same folder.

    Shards that do not fit are read from the original data set, and one line is logged.

    Args:
        dataset: the same on every rank.
        node: the ranks of one node.
        to: a folder, created if missing. The default, ``auto``, considers
            ``HPCTRAIN_STAGE_DIR``, the job's folders for temporary files, and the node's memory.
            It chooses the folder with room for the most bytes of the data set, or the first of
            several such folders. At most half of the free memory is used.

    Returns:
        The data set, which reads from the copy; ``dataset`` itself if nothing was copied.

    Raises:
        DataError: on every rank of the node, if a shard of the data set is damaged, or the folder
            cannot be used.
    """
    held: NodeFolder | None = None
    chosen: list[int] = []
    with agreed(node, DataError), _explained(dataset):
        if node.rank == 0:
            held, chosen = _choose(dataset, to)
    path, chosen = node.broadcast_object((held.path if held else None, chosen))
    if path is None:
        return dataset
    try:
        with agreed(node, DataError), _explained(dataset):
            held = held or NodeFolder.join(path)
        copies = _Copies(
            dataset, path, chosen[node.rank :: node.size], logs_progress=node.rank == 0
        )
        in_turns(node, copies.left, copies.add)
        done = node.allgather_object((copies.present, copies.full))
    except BaseException:
        if held is not None:
            held.close()
        raise
    present = frozenset(index for some, _ in done for index in some)
    if node.rank == 0:
        _log_result(dataset, path, present, next((full for _, full in done if full), ""))
    if not present:
        held.close()
        return dataset
    return dataset.with_opener(StagedOpener(path, present, held))


@dataclass(frozen=True)
class StagedOpener:
    """Function that opens a shard in the copy on this node, or in the original. Can be pickled."""

    directory: Path  # directory of the copy
    present: frozenset[int]  # indices of the shards that were copied
    held: NodeFolder | None = field(repr=False, compare=False)
    """Lock that protects the copy from removal; None after unpickling in another process."""

    def __call__(
        self, directory: Path, manifest: Manifest, index: int, *, io: IO, chunks: ChunkCache
    ) -> OpenShard:
        """Open the copy of a shard, or the shard in ``directory`` if no copy is readable."""
        if index in self.present:
            try:
                return OpenShard(self.directory, manifest, index, io=io, chunks=chunks)
            except CorruptError as error:
                logger.warning("%s; this rank reads the shard from %s instead", error, directory)
        return OpenShard(directory, manifest, index, io=io, chunks=chunks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": None}


class _Copies:
    """The shards that this rank copies; ``add`` copies one shard."""

    def __init__(
        self, dataset: ShardedDataset, target: Path, left: list[int], *, logs_progress: bool
    ) -> None:
        self._dataset, self._target, self._logs_progress = dataset, target, logs_progress
        self._next_s = time.monotonic() + FIRST_S
        self.left = left  # indices of the shards to copy
        self.present: list[int] = []  # indices of the shards that were copied completely
        self.full = ""  # text of the system error if the storage is full; otherwise empty

    def add(self, index: int) -> None:
        """Copy a shard, unless the storage is full."""
        if self.full:
            return
        target = self._target / self._dataset.manifest.shards[index].file
        part = target.with_name(target.name + PART)
        try:
            with part.open("wb") as file:
                file.writelines(self._pieces(index))
            part.rename(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno not in _FULL:
                raise DataError(
                    f"cannot write {part}: {reason_of(error)}; check the storage of this "
                    f"node, or omit data.stage or the call of stage() to read the original"
                ) from error
            self.full = reason_of(error)
            return
        self.present.append(index)
        if self._logs_progress and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            sizes = (_size(self._dataset, some) for some in (self.present, self.left))
            logger.warning("this rank has copied %s of %s to %s", *sizes, self._target)

    def _pieces(self, index: int) -> Iterator[bytes]:
        """Yield the bytes of a shard; raise ``CorruptError`` at the end if its crc32 is wrong."""
        directory, manifest = self._dataset.path, self._dataset.manifest
        shard = manifest.shards[index]
        check_file(directory, manifest, index)
        why, crc = "the file has the wrong crc32", 0
        try:
            with (directory / shard.file).open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    crc = crc32(piece, crc)
                    yield piece
        except OSError as error:
            why, crc = reason_of(error), ~shard.crc32
        if crc != shard.crc32:
            first, stop = manifest.samples_of(index)
            raise CorruptError(
                f"shard {directory / shard.file} is damaged, so it is not copied to the node: "
                f"{why} (samples {first} to {stop - 1}); find all damage with "
                f"hpctrain data verify {directory}",
                first,
                stop,
            )


@contextmanager
def _explained(dataset: ShardedDataset) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot copy data set {dataset.path} to this node: {error}; choose a folder that "
            f"every rank of the node can read and write"
        ) from error


def _choose(dataset: ShardedDataset, to: Path | str) -> tuple[NodeFolder | None, list[int]]:
    """Create a folder where most of the data set fits.

    Returns the folder and the indices of the shards that fit, or ``(None, [])`` if none fits.
    """
    found = sites(to, dataset.path)
    for site in found:
        for left_over in sweep(site.folder):
            logger.info("removed %s of a job that was killed", left_over)
    shards, total_bytes = dataset.manifest.shards, dataset.manifest.num_bytes
    if found:
        best = max(found, key=lambda site: min(site.room_bytes, total_bytes))
        if chosen := _fitting(shards, best.room_bytes):
            job = env.job_id() or f"pid{os.getpid()}"
            label = re.sub(r"[^\w.-]", "_", f"{dataset.uuid[:8]}-{job}")
            return NodeFolder.create(best.folder, label), chosen
    rooms = [f"{site.folder} has room for {format_bytes(site.room_bytes)}" for site in found]
    logger.warning(
        "data set %s (%s) is not copied, because no storage of this node has room for one of its "
        "shards: %s",
        dataset.path,
        format_bytes(total_bytes),
        "; ".join(rooms) or "the node has no other storage",
    )
    return None, []


def _fitting(shards: Iterable[ShardEntry], room_bytes: int) -> list[int]:
    chosen = []
    for index, shard in enumerate(shards):
        if shard.num_bytes <= room_bytes:
            chosen.append(index)
            room_bytes -= shard.num_bytes
    return chosen


def _size(dataset: ShardedDataset, indices: Iterable[int]) -> str:
    return format_bytes(sum(dataset.manifest.shards[index].num_bytes for index in indices))


def _log_result(dataset: ShardedDataset, path: Path, present: frozenset[int], why: str) -> None:
    shards = dataset.manifest.shards
    size = _size(dataset, present)
    if len(present) == len(shards):
        logger.info("data set %s is copied to %s: %s", dataset.path, path, size)
        return
    logger.warning(
        "%d of %d shards of data set %s are copied to %s (%s): %s; the other shards are read "
        "from the original",
        len(present),
        len(shards),
        dataset.path,
        path.parent,
        size,
        why or "there is no room for more",
    )
