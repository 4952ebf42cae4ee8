"""Writers of a data set, on one rank or many; the manifest is written last."""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.atomic import make_folder
from hpctrain.core.checks import Number, checked, require_open
from hpctrain.core.errors import DataError
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import Self
from hpctrain.data.format.columns import Samples, checked_rows, count
from hpctrain.data.format.dataset_manifest import MANIFEST, Field, Manifest, shard_part
from hpctrain.data.format.hdf5_values import load_filters, rows_per_chunk
from hpctrain.data.format.part import ShardPart
from hpctrain.data.format.writer_files import (
    Journal,
    Publication,
    WriterLock,
    explained,
    manifest_in,
    sweep,
)
from hpctrain.data.samples import Ragged

BLOCK_SIZE = 16

FieldSpec = Field | tuple[tuple[int, ...], Any]  # a field, or the shape of a sample and its dtype


def write_arrays(
    directory: Path | str,
    arrays: Mapping[str, ArrayLike | Ragged],
    *,
    samples_per_shard: int,
    split: str = "train",
    block_size: int = BLOCK_SIZE,
    compression: str | None = None,
) -> Manifest:
    """Write arrays as a data set; the first dimension of each array counts samples.

    Args:
        directory: created if missing; a data set in it is replaced atomically at the end.
        arrays: for each field an array or a ``Ragged``, all with the same number of samples.
        samples_per_shard: samples of each file except the last; 256 MiB to 2 GiB per file
            are a good size.
        split: name of this part of the data, such as ``train``; a directory holds one split.
        block_size: samples per crc32.
        compression: compression of every field: None or ``zstd``.

    Returns:
        The manifest, as published.

    Raises:
        DataError: the lengths differ, a dtype is not supported, or a file cannot be written.
    """
    whole = {
        name: array if isinstance(array, Ragged) else np.asarray(array)
        for name, array in arrays.items()
    }
    fields = {name: _field_of(name, array) for name, array in whole.items()}
    with ShardWriter(
        directory,
        fields,
        samples_per_shard=samples_per_shard,
        split=split,
        block_size=block_size,
        compression=compression,
    ) as writer:
        writer.append(whole)
    return writer.manifest


class ShardWriter:
    """Context manager that writes samples to a new data set; one writer per directory.

    When the block ends without error, the data set is published, or replaces the data set in the
    directory. After an exception the directory is unchanged. If the process is killed, temporary
    files remain; the next writer removes them or, with ``resume_key``, resumes from them.

    Construction is collective over ``comm``.

    Args:
        directory: created if missing; with ``comm``, on a file system that all ranks share.
        fields: for each name, shape and dtype, such as ``{"x": ((8, 8), "f4")}``, or a ``Field``.
        samples_per_shard: samples of each file, except the last file of each rank.
        split: name of this part of the data, such as ``train``.
        block_size: samples per crc32.
        compression: default compression of the fields: None or ``zstd``.
        comm: ranks that write concurrently. Each rank appends its samples, or none; the data
            set contains the samples of rank 0, then of rank 1, ... An error on one rank is an
            error on every rank, at the latest when the block ends.
        resume_key: a text that identifies the content. Finished shards of a writer that was
            killed or has failed are kept if key, fields, split, sizes and number of ranks
            are the same: continue with sample ``num_written``.
        may_replace: whether to replace a data set in the directory; if False, a data set in the
            directory raises an error.
        classes: names of the labels 0, 1, ..., for the manifest.

    Raises:
        DataError: an argument is not valid or not the same on every rank, the directory cannot
            be created, another writer uses it, or it contains another split.
    """

    manifest: Manifest
    """Manifest with the finished shards of this rank; after the block, of all ranks."""

    def __init__(  # noqa: PLR0913 - all arguments are keywords
        self,
        directory: Path | str,
        fields: Mapping[str, FieldSpec],
        *,
        samples_per_shard: int,
        split: str = "train",
        block_size: int = BLOCK_SIZE,
        compression: str | None = None,
        comm: Communicator | None = None,
        resume_key: str | None = None,
        may_replace: bool = True,
        classes: tuple[str, ...] = (),
    ) -> None:
        self._samples_per_shard = samples_per_shard
        self._comm: Communicator = comm or SerialCommunicator()
        self._part: ShardPart | None = None
        self._lock: WriterLock | None = None
        self._may_replace = may_replace
        self._is_open = True
        with agreed(self._comm, DataError):
            self._directory = absolute(directory)
            draft = _draft(fields, split, block_size, compression)
            self.manifest = replace(draft, classes=classes)
            checked("samples_per_shard", samples_per_shard, Number, DataError)
            terms = {"key": resume_key, "per_shard": samples_per_shard, "ranks": self._comm.size}
            journal = Journal(self._directory, self.manifest, self._comm.rank, terms)
        self._journal = None if resume_key is None else journal
        self._publication = Publication(self._directory, self._comm, self._journal)
        self._check_same((self.manifest.fields_record(), split, block_size, terms))
        try:
            self._open_directory()
            self._recover()
        except BaseException:
            self._release()
            raise

    @property
    def num_written(self) -> int:
        """Number of samples of this rank, including samples kept from an interrupted writer."""
        return self.manifest.num_samples + (self._part.num_samples if self._part else 0)

    def append(self, samples: Samples) -> None:
        """Append any number of samples of this rank. Not collective.

        Args:
            samples: for each field an array ``(num_samples, *shape)``; for a ragged field a list
                of arrays ``(length, *shape)``, or a ``Ragged``.

        Raises:
            DataError: the arrays do not match the fields, a file cannot be written, or the block
                has ended.
        """
        self._require_open()
        rows = checked_rows(self.manifest.fields, samples)
        start, stop = 0, count(rows)
        with explained(self._directory):
            while start < stop:
                part = self._part = self._part or self._new_part()
                end = min(stop, start + part.num_free)
                part.append({name: some[start:end] for name, some in rows.items()})
                start = end
                if not part.num_free:
                    self._finish_part()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Publish the data set; after an exception, remove the new files. Collective."""
        try:
            if error is not None:
                with suppress(type(error), DataError), agreed(self._comm, DataError):
                    raise error
                self._abandon()
                return
            try:
                with agreed(self._comm, DataError), explained(self._directory):
                    if self._part:
                        self._finish_part()
                self.manifest = self._publication.publish(self.manifest)
            except BaseException:
                self._abandon()
                raise
        finally:
            self._release()

    def _check_same(self, arguments: object) -> None:
        first = self._comm.broadcast_object(arguments)
        with agreed(self._comm, DataError):
            if arguments != first:
                raise DataError(
                    f"all ranks must write with the same arguments, but rank 0 has {first} and "
                    f"rank {self._comm.rank} has {arguments}"
                )

    def _open_directory(self) -> None:
        found = None
        with agreed(self._comm, DataError), explained(self._directory):
            if self._comm.rank == 0:
                make_folder(self._directory)
                self._lock = WriterLock(self._directory)
                if not self._may_replace and (self._directory / MANIFEST).exists():
                    raise DataError(
                        f"{self._directory} already contains a data set; choose another directory"
                    )
                there = manifest_in(self._directory)
                if there and there.split != self.manifest.split:
                    raise DataError(
                        f"a directory can contain only one split, but {self._directory} holds "
                        f"{there.split!r}; write {self.manifest.split!r} to another directory"
                    )
                found = self._journal and self._journal.uuid()
                if there and there.uuid == found:
                    found = None
        found = self._comm.broadcast_object(found or self.manifest.uuid)
        self.manifest = replace(self.manifest, uuid=found)

    def _recover(self) -> None:
        with agreed(self._comm, DataError), explained(self._directory):
            if not self._directory.is_dir():
                raise DataError(
                    f"all ranks must write to one directory, but this rank does not see "
                    f"{self._directory}; choose a directory that all nodes share"
                )
            if self._journal:
                shards = self._journal.recover(self.manifest.uuid)
                self.manifest = replace(self.manifest, shards=tuple(shards))
                self._journal.write(self.manifest.uuid, shards)
        mine = [shard.file for shard in self.manifest.shards]
        if self._journal:
            mine.append(self._journal.path.name)
        kept = {name for some in self._comm.allgather_object(mine) for name in some}
        if self._comm.rank == 0:
            # None as manifest keeps finished shards, which may be the rest of a damaged data set.
            sweep(self._directory, None, kept)
        self._comm.barrier()

    def _require_open(self) -> None:
        require_open(self._is_open, "a ShardWriter", DataError)

    def _release(self) -> None:
        self._is_open = False
        if self._lock:
            self._lock.close()

    def _new_part(self) -> ShardPart:
        draft = self.manifest
        name = shard_part(draft.split, draft.uuid, self._comm.rank, len(draft.shards))
        return ShardPart(self._directory / name, draft, capacity=self._samples_per_shard)

    def _finish_part(self) -> None:
        assert self._part
        shards = (*self.manifest.shards, self._part.finish())
        self._part = None
        self.manifest = replace(self.manifest, shards=shards)
        if self._journal:
            self._journal.write(self.manifest.uuid, shards)

    def _abandon(self) -> None:
        with suppress(OSError, RuntimeError):
            if self._part:
                self._part.abandon()
        if self._publication.named:
            return
        draft = self.manifest
        # Without a journal, remove the files of all ranks: no rank writes any more, because every
        # rank has ended its block or is lost.
        mine = f"r{self._comm.rank:05d}-" if self._journal else ""
        kept = {shard.file for shard in draft.shards} if self._journal else set()
        for path in self._directory.glob(f"{draft.split}-{draft.uuid[:8]}-{mine}*"):
            if path.name not in kept:
                with suppress(OSError):
                    path.unlink()


def _draft(
    fields: Mapping[str, FieldSpec], split: str, block_size: int, compression: str | None
) -> Manifest:
    draft = Manifest(
        uuid=uuid.uuid4().hex,
        split=split,
        block_size=block_size,
        fields={name: _field(spec, compression) for name, spec in fields.items()},
        shards=(),
    )
    load_filters(draft.fields)
    for field in draft.fields.values():
        if field.compression:
            rows_per_chunk(field, block_size)
    return draft


def _field(spec: FieldSpec, compression: str | None) -> Field:
    field = spec if isinstance(spec, Field) else Field.of(*spec)
    return replace(field, compression=field.compression or compression)


def _field_of(name: str, array: NDArray[Any] | Ragged) -> Field:
    if isinstance(array, Ragged):
        values = array.values.numpy(force=True)
        return Field.of(values.shape[1:], values.dtype, ragged=True)
    if not array.ndim:
        raise DataError(
            f"the first dimension of a field must count samples, but field {name} is a scalar"
        )
    return Field.of(array.shape[1:], array.dtype)
