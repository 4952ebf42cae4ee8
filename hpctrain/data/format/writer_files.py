"""Lock, journal and publication of a data set writer."""

import fcntl
import json
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.core.atomic import publishing, reason_of, refusal, sync
from hpctrain.core.errors import DataError
from hpctrain.core.logs import logger
from hpctrain.data.format.dataset_manifest import (
    LOCK,
    Manifest,
    ShardEntry,
    leftovers,
    shard_file,
    shard_of,
    shard_record,
    write_classes,
)
from hpctrain.data.format.part import number

_FORMAT = 1


class Journal:
    """File that lists the finished shards of one rank, so that a later writer can resume.

    ``terms`` are arguments of the writer; a later writer resumes only if its terms are identical.
    """

    def __init__(self, directory: Path, draft: Manifest, rank: int, terms: dict[str, Any]) -> None:
        self.path = directory / f"{draft.split}-r{rank:05d}.journal"
        self._directory = directory
        self._terms = {
            "format": _FORMAT,
            "fields": draft.fields_record(),
            "block_size": draft.block_size,
            **terms,
        }

    def uuid(self) -> str | None:
        """Return the uuid of the unfinished data set, or None if there is none to resume."""
        record = self._read()
        return None if record is None else str(record["uuid"])

    def recover(self, uuid: str) -> list[ShardEntry]:
        """Return the finished shards up to the first missing file; undo a partial publication.

        Raises ``OSError``: a file cannot be renamed or read.
        """
        record = self._read()
        if record is None or record["uuid"] != uuid:
            return []
        kept: list[ShardEntry] = []
        shards = [shard_of(one) for one in record["shards"]]
        for index, shard in enumerate(shards):
            path = self._directory / shard.file
            if record["published_as"] and not path.exists():
                with suppress(FileNotFoundError):
                    (self._directory / record["published_as"][index]).rename(path)
            if not path.exists() or path.stat().st_size != shard.num_bytes:
                break
            if record["published_as"]:
                # The writer was killed during publication: some attributes may have changed.
                first_index = sum(before.num_samples for before in kept)
                number(path, shard, index=index, first_index=first_index)
            kept.append(shard)
        return kept

    def write(
        self, uuid: str, shards: Sequence[ShardEntry], published_as: Sequence[str] = ()
    ) -> None:
        """Replace the journal. ``published_as`` are the future names of the shards.

        Raises ``OSError``: the file cannot be written; the former journal is unchanged.
        """
        record = {
            **self._terms,
            "uuid": uuid,
            "shards": [shard_record(shard) for shard in shards],
            "published_as": list(published_as),
        }
        with publishing(self.path) as part:
            part.write_text(json.dumps(record))

    def _read(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        terms = json.loads(json.dumps(self._terms))
        same = isinstance(record, dict) and terms.items() <= record.items()
        return record if same else None


class WriterLock:
    """Lock on the directory of a data set; the kernel releases the lock when the process ends.

    Rank 0 of a writer holds the lock.

    On a file system without locks, such as Lustre mounted without ``flock``, concurrent writers
    are not detected, and a warning is logged.

    Raises:
        DataError: another writer holds the lock.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        # The previous writer may remove the lock file after this process has opened it.
        while not self._take():
            self._file.close()

    def _take(self) -> bool:
        # NFS requires write access for an exclusive lock.
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise DataError(
                f"a data set must have one writer at a time, but {holder} writes to "
                f"{self._path.parent}; wait until it ends, or choose another directory"
            ) from None
        except OSError as error:
            logger.warning(
                "the directory of a writer must be on a file system with locks, but %s has no "
                "locks (%s); make sure that no other program writes there meanwhile",
                self._path.parent,
                error.strerror,
            )
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                with suppress(OSError):  # on a full disk the lock works without its text
                    os.ftruncate(self._file.fileno(), 0)
                    text = f"process {os.getpid()} on {platform.node()}"
                    os.write(self._file.fileno(), text.encode())
                return True
        return False

    def close(self) -> None:
        """Release the lock, so that another process may write. Idempotent."""
        if not self._file.closed:
            with suppress(OSError):
                self._path.unlink()
            self._file.close()


class Publication:
    """Publication of the finished shards of all ranks as one data set; used once."""

    named = False  # whether a manifest may list this rank's shards, which must then not be removed

    def __init__(self, directory: Path, comm: Communicator, journal: Journal | None) -> None:
        self._directory, self._comm, self._journal = directory, comm, journal

    def publish(self, draft: Manifest) -> Manifest:
        """Replace the data set in the directory atomically. Collective.

        ``draft`` lists the finished shards of this rank with their unpublished names. The returned
        manifest is the same on every rank; it lists the shards of rank 0, then of rank 1, ...
        Raises ``DataError``: no rank has samples, a file cannot be written, or rank 0 does not
        see a shard.
        """
        sizes = self._comm.allgather_object((len(draft.shards), draft.num_samples))
        num_shards = sum(some for some, _ in sizes)
        if not num_shards:
            raise DataError("a data set must have at least one sample, got none")
        before = sizes[: self._comm.rank]
        first = sum(some for some, _ in before)
        names = [
            shard_file(draft.split, draft.uuid, first + index, num_shards)
            for index in range(len(draft.shards))
        ]
        try:
            with agreed(self._comm, DataError):
                with explained(self._directory):
                    shards = self._rename(draft, names, first, sum(n for _, n in before))
                self.named = True
        except DataError:
            # All ranks receive the error of one rank, so no rank writes the manifest.
            self.named = False
            raise
        all_shards = [shard for some in self._comm.allgather_object(shards) for shard in some]
        manifest = replace(draft, shards=tuple(all_shards))
        self._write(manifest)
        return manifest

    def _rename(
        self, draft: Manifest, names: list[str], first: int, first_index: int
    ) -> list[ShardEntry]:
        if self._journal:
            self._journal.write(draft.uuid, draft.shards, published_as=names)
        shards: list[ShardEntry] = []
        for index, (shard, name) in enumerate(zip(draft.shards, names, strict=True)):
            path = self._directory / shard.file
            # If lower ranks have no shards, the attributes already contain the right position.
            named = (
                number(path, shard, index=first + index, first_index=first_index)
                if first
                else shard
            )
            path.rename(self._directory / name)
            shards.append(replace(named, file=name))
            first_index += shard.num_samples
        sync(self._directory)
        return shards

    def _write(self, manifest: Manifest) -> None:
        is_published = False
        try:
            with agreed(self._comm, DataError):
                if self._comm.rank == 0:
                    try:
                        with explained(self._directory):
                            self._check_seen(manifest)
                            manifest.write(self._directory)
                            write_classes(self._directory, manifest.classes)
                    finally:
                        # If an error occurs after the manifest was renamed, the data set is
                        # published nevertheless.
                        with suppress(DataError):
                            there = manifest_in(self._directory)
                            is_published = there is not None and there.uuid == manifest.uuid
                        if is_published:
                            sweep(self._directory, manifest)
        finally:
            self.named = self._comm.broadcast_object(is_published)

    def _check_seen(self, manifest: Manifest) -> None:
        for shard in manifest.shards:
            path = self._directory / shard.file
            try:
                num_bytes = path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"all ranks must write to one directory, but rank 0 does not see {path}: "
                    f"{reason_of(error)}; choose a directory that all nodes share"
                ) from error
            if num_bytes != shard.num_bytes:
                raise DataError(
                    f"shard {path} must have {shard.num_bytes} bytes, but rank 0 sees "
                    f"{num_bytes}; check the file system"
                )


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Convert errors of the file system and of HDF5 inside the block to ``DataError``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"cannot write a data set to {directory}: {refusal(error, 'choose another directory')}"
        ) from error


def manifest_in(directory: Path) -> Manifest | None:
    """Return the manifest of a directory; None if it is missing or damaged.

    A writer may replace a damaged manifest. Raises ``DataError``: the file cannot be read.
    """
    try:
        return Manifest.read(directory)
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return None


def sweep(directory: Path, manifest: Manifest | None, keep: Collection[str] = ()) -> None:
    """Remove leftovers, except the lock and ``keep``; ignore files that cannot be removed."""
    for name in {*leftovers(directory, manifest)} - {LOCK, *keep}:
        with suppress(OSError):
            (directory / name).unlink()
