"""The end of writing: the shards of all ranks get their names, then the manifest names them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.agreement import agreed
from hpctrain.core.atomic import reason_of, sync
from hpctrain.core.errors import DataError
from hpctrain.data.format.journal import Journal, remove_journals
from hpctrain.data.format.layout import SHARD_FILE, Manifest, ShardEntry, shard_file, write_classes
from hpctrain.data.format.part import number

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class Publication:
    """Makes one data set of the finished shards of all ranks; used once."""

    named = False
    """A manifest may name the shards of this rank: they must not be removed."""

    def __init__(self, directory: Path, comm: "Communicator", journal: Journal | None) -> None:
        self._directory, self._comm, self._journal = directory, comm, journal

    def publish(self, draft: Manifest) -> Manifest:
        """Replace the data set in the directory at once. Collective.

        ``draft`` holds the finished shards of this rank, under the names of parts. Returns the
        manifest, the same on every rank: the shards of rank 0, then of rank 1, ...

        Raises:
            DataError: no rank has samples, the disk refuses, or rank 0 does not see a shard.
        """
        sizes = self._comm.allgather_object((len(draft.shards), draft.num_samples))
        num_shards = sum(some for some, _ in sizes)
        if not num_shards:
            raise DataError("a data set needs at least one sample, got none")
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
            # Every rank knows that one has failed, so nobody goes on to the manifest.
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
            # The shards of the first ranks have their place from the start.
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
                        # The last step may fail when the manifest has its place: all is whole.
                        is_published = names_shards_of(self._directory, manifest.uuid)
                        if is_published:
                            self._sweep(manifest)
        finally:
            self.named = self._comm.broadcast_object(is_published)

    def _check_seen(self, manifest: Manifest) -> None:
        for shard in manifest.shards:
            path = self._directory / shard.file
            try:
                num_bytes = path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"all ranks write to one directory, but rank 0 does not see {path}: "
                    f"{reason_of(error)}; choose a directory that all nodes share"
                ) from error
            if num_bytes != shard.num_bytes:
                raise DataError(
                    f"shard {path} has {shard.num_bytes} bytes, rank 0 sees {num_bytes}; "
                    f"check the file system"
                )

    def _sweep(self, manifest: Manifest) -> None:
        named = {shard.file for shard in manifest.shards}
        remove_shards(self._directory, f"{manifest.split}-*", keep=named)
        remove_journals(self._directory, manifest.split)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Raise what the file system and HDF5 say as a DataError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"cannot write a data set to {directory}: {reason_of(error)}; "
            f"make room or choose another directory"
        ) from error


def names_shards_of(directory: Path, uuid: str) -> bool:
    """Return whether the manifest in a directory is of this data set."""
    with suppress(OSError, DataError):
        return Manifest.read(directory).uuid == uuid
    return False


def split_in(directory: Path) -> str | None:
    """Return the split that a directory holds; None without a manifest, or with a damaged one.

    What is damaged can be replaced: its error advises just that.

    Raises:
        DataError: the file system refuses.
    """
    try:
        return Manifest.read(directory).split
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return None


def remove_shards(directory: Path, pattern: str, keep: Collection[str] = ()) -> None:
    """Remove shards and parts of shards, but for some, as far as the system allows."""
    for path in directory.glob(pattern):
        if SHARD_FILE.fullmatch(path.name) and path.name not in keep:
            with suppress(OSError):
                path.unlink()
