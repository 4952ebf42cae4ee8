"""Write a data set: shard after shard, the manifest last."""

import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.data.layout import MANIFEST, SHARD_FILE, Field, Manifest, shard_file
from hpctrain.data.part import ShardPart
from hpctrain.errors import DataError
from hpctrain.files import PART, reason_of, sync

BLOCK_SIZE = 16


def write_arrays(
    directory: Path | str,
    arrays: Mapping[str, ArrayLike],
    *,
    samples_per_shard: int,
    split: str = "train",
    block_size: int = BLOCK_SIZE,
) -> Manifest:
    """Write arrays, whose first dimension counts samples, as a data set.

    Args:
        directory: made when missing; a data set in it is replaced, at once, at the end.
        arrays: one array per field, all of the same length.
        samples_per_shard: samples of each file but the last; aim at 256 MiB to 2 GiB.
        split: name of this part of the data, such as ``train``; a directory holds one.
        block_size: samples per crc32.

    Returns:
        The manifest, as published.

    Raises:
        DataError: the lengths differ, a dtype is not supported, or the disk refuses.
    """
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in whole.items():
        if not array.ndim:
            raise DataError(f"the first dimension counts samples, field {name} has no dimension")
    fields = {name: (array.shape[1:], array.dtype) for name, array in whole.items()}
    with ShardWriter(
        directory, fields, samples_per_shard=samples_per_shard, split=split, block_size=block_size
    ) as writer:
        writer.append(whole)
    return writer.manifest


class ShardWriter:
    """Writes samples into a new data set; a context manager, one at a time per directory.

    The data set appears, or replaces the one in the directory, when the block ends well. After
    an exception the directory holds what it held before. After a kill it does so too, and
    besides at most some files that the next writer removes.
    """

    manifest: Manifest
    """What is written; published, and with all shards, once the block has ended."""

    def __init__(
        self,
        directory: Path | str,
        fields: Mapping[str, tuple[tuple[int, ...], Any]],
        *,
        samples_per_shard: int,
        split: str = "train",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Start a data set.

        Args:
            directory: made when missing.
            fields: shape of one sample and dtype by name, such as ``{"x": ((8, 8), "f4")}``.
            samples_per_shard: samples of each file but the last.
            split: name of this part of the data, such as ``train``.
            block_size: samples per crc32.

        Raises:
            DataError: an argument is not valid, the directory cannot be had, or it holds
                another split.
        """
        if samples_per_shard < 1:
            raise DataError(f"samples_per_shard must be positive, got {samples_per_shard}")
        self.manifest = Manifest(
            uuid=uuid.uuid4().hex,
            split=split,
            block_size=block_size,
            fields={name: Field.of(*spec) for name, spec in fields.items()},
            shards=(),
        )
        self._directory = Path(directory)
        self._samples_per_shard = samples_per_shard
        self._part: ShardPart | None = None
        with _explained(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._check_split()
            # Shards without a manifest may be all that is left of a data set: keep them for now.
            self._remove(f"{split}-*{PART}")

    def append(self, samples: Mapping[str, ArrayLike]) -> None:
        """Add samples: one array per field, ``(num_samples, ...)``, any number at a time.

        Raises:
            DataError: the arrays do not fit the fields, or the disk refuses.
        """
        rows = self._checked(samples)
        start, stop = 0, len(next(iter(rows.values())))
        with _explained(self._directory):
            while start < stop:
                part = self._part = self._part or self._new_part()
                some = slice(start, start + part.num_free)
                part.append({name: array[some] for name, array in rows.items()})
                start = min(some.stop, stop)
                if not part.num_free:
                    self._finish_part()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish the data set, or after an exception remove what was written of it."""
        try:
            if kind is None:
                with _explained(self._directory):
                    self._publish()
        except BaseException:
            self._abandon()
            raise
        if kind is not None:
            self._abandon()

    def _checked(self, samples: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
        fields = self.manifest.fields
        if samples.keys() != fields.keys():
            raise DataError(f"samples have the fields {sorted(fields)}, got {sorted(samples)}")
        rows = {}
        for name, field in fields.items():
            array = np.asarray(samples[name])
            if array.shape[1:] != field.shape or not array.ndim:
                raise DataError(
                    f"field {name} has shape (num_samples, *{field.shape}), got {array.shape}"
                )
            if not np.can_cast(array.dtype, field.dtype, "safe"):
                raise DataError(
                    f"field {name} holds {field.dtype}, which cannot hold every {array.dtype}; "
                    f"convert the array first"
                )
            rows[name] = array.astype(field.dtype, copy=False)
        lengths = {name: len(array) for name, array in rows.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"all fields have the same number of samples, got {lengths}")
        return rows

    def _check_split(self) -> None:
        if (self._directory / MANIFEST).exists():
            split = Manifest.read(self._directory).split
            if split != self.manifest.split:
                raise DataError(
                    f"a directory holds one split, {self._directory} holds {split!r}; "
                    f"write {self.manifest.split!r} to another directory"
                )

    def _new_part(self) -> ShardPart:
        name = shard_file(self.manifest.split, self.manifest.uuid, len(self.manifest.shards))
        return ShardPart(
            self._directory / (name + PART),
            self.manifest,
            capacity=self._samples_per_shard,
            first_index=self.manifest.num_samples,
        )

    def _finish_part(self) -> None:
        part = self._part
        assert part
        if part.num_free:
            part = self._part = part.shortened(part.path.with_suffix(f".short{PART}"))
        shard = part.finish(len(self.manifest.shards))
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, shard))
        self._part = None

    def _publish(self) -> None:
        if self._part:
            self._finish_part()
        if not self.manifest.shards:
            raise DataError("a data set needs at least one sample, got none")
        parts, draft = self.manifest.shards, self.manifest
        shards = tuple(
            replace(part, file=shard_file(draft.split, draft.uuid, index, len(parts)))
            for index, part in enumerate(parts)
        )
        self.manifest = replace(draft, shards=shards)
        for part, shard in zip(parts, shards, strict=True):
            (self._directory / part.file).rename(self._directory / shard.file)
        sync(self._directory)
        self.manifest.write(self._directory)
        self._sweep()

    def _abandon(self) -> None:
        with suppress(OSError, RuntimeError):
            if self._part:
                self._part.abandon()
        with suppress(OSError, DataError):
            # The last step may fail after the manifest took its place: then the new set is whole.
            if Manifest.read(self._directory).uuid == self.manifest.uuid:
                return
        self._remove(f"{self.manifest.split}-{self.manifest.uuid[:8]}-*")

    def _sweep(self) -> None:
        """Remove shards of this split that no manifest names."""
        named = {shard.file for shard in self.manifest.shards}
        self._remove(f"{self.manifest.split}-*", keep=named)

    def _remove(self, pattern: str, keep: Collection[str] = ()) -> None:
        for path in self._directory.glob(pattern):
            if SHARD_FILE.fullmatch(path.name) and path.name not in keep:
                with suppress(OSError):
                    path.unlink()


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise what the file system and HDF5 say as a DataError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"cannot write a data set to {directory}: {reason_of(error)}; "
            f"make room or choose another directory"
        ) from error
