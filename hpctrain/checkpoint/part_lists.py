"""Lists of the parts of tensors in the files of a checkpoint, read from their headers."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.checkpoint.format.manifest import (
    PRIVATE,
    CheckpointManifest,
    FileRecord,
    Record,
    StoredPart,
    file_name,
    part_of,
    split_entry,
    valid,
)
from hpctrain.checkpoint.format.shard import Shard, fault_of_cover
from hpctrain.checkpoint.format.tensor_file import opened
from hpctrain.checkpoint.refusal import damaged, explained
from hpctrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.node.shared_memory import SharedMemory


class PartList(NamedTuple):
    """The parts that one file contains."""

    parts: dict[str, list[StoredPart]]  # parts of the tensors of the state, by path
    private: dict[int, dict[str, Record]]  # private tensors of each rank, by name


def read_list(directory: Path, file: FileRecord, tensors: Mapping[str, Record]) -> PartList:
    """Read the header of a file, and return the parts that it contains.

    Raises ``CheckpointError``: the header is damaged or hostile. ``OSError``: the file cannot be
    read.
    """
    path = directory / file_name(file.first_rank)
    found = PartList({}, {})
    with opened(path) as given:
        if given.header_crc != file.header_crc:
            raise damaged(path, "the crc32 of its header is wrong")
        for entry in given.metadata:
            spec, crcs = given.spec(entry)
            with valid(path):
                name, rank = split_entry(entry, file.first_rank)
                if not any(rank in run for run in file.ranks):
                    raise ValueError(f"rank {rank} does not write this file")
                is_private = name.partition("/")[0] == PRIVATE
                record = Record(spec.dtype, spec.shape) if is_private else tensors[name]
                if spec.dtype != record.dtype:
                    raise ValueError(f"{name} has dtype {spec.dtype}")
                part = part_of(record, spec.offset, spec.shape, tuple(crcs), rank, file.first_rank)
                if is_private:
                    found.private.setdefault(rank, {})[name] = replace(record, parts=(part,))
                else:
                    found.parts.setdefault(name, []).append(part)
    listed = [rank for rank in found.private if any(rank in run for run in file.private)]
    is_complete = all(PRIVATE in records for records in found.private.values())
    if (
        len(found.private) != len(listed)
        or len(listed) != sum(map(len, file.private))
        or not is_complete
    ):
        raise damaged(path, "its private values are not those that the manifest lists")
    return found


@dataclass(frozen=True, slots=True)
class PartIndex:
    """Parts of tensors in some files of a checkpoint.

    Args:
        directory: directory of the checkpoint.
        manifest: its manifest.
        lists: parts of each file that was read, by first rank.
    """

    directory: Path
    manifest: CheckpointManifest
    lists: dict[int, PartList] = field(default_factory=dict)

    def read(self, files: Collection[int], node: "SharedMemory | None" = None) -> None:
        """Read the part lists of files. With ``node``, collective: its ranks divide the files.

        Args:
            files: first ranks of the files; the same on all ranks of the node.
            node: memory of the node.

        Raises:
            CheckpointError: a header is damaged, or a file cannot be read; on every rank of the
                node.
        """
        wanted = [each for each in self.manifest.files if each.first_rank in files]
        rank, size = (node.local_rank, node.local_size) if node else (0, 1)
        found, failure = {}, ""
        try:
            with explained(f"read checkpoint {self.directory}"):
                for file in wanted[rank::size]:
                    found[file.first_rank] = read_list(self.directory, file, self.manifest.tensors)
        except CheckpointError as error:
            failure = str(error)
        for others, text in node.gather((found, failure)) if node else [(found, failure)]:
            if text:
                raise CheckpointError(text)
            self.lists.update(others)

    def read_for(
        self, want: Mapping[str, Shard], ranks: Collection[int], node: "SharedMemory | None"
    ) -> None:
        """Read the lists of the files that contain the parts that the ranks of a node require.

        Collective over the node. First reads the files of ``ranks``, and the files of tensors that
        a rank requires whole; then other files, only if these files lack elements of ``want``.

        Args:
            want: part of each tensor that this rank requires.
            ranks: ranks of the save whose files contain the required private values, and probably
                the required parts.
            node: memory of the node.
        """
        if not self.manifest.files:
            return
        likely = {self.file_of(rank) for rank in ranks if rank < self.manifest.world}
        tensors = self.manifest.tensors
        whole = [path for path, shard in want.items() if shard.shape == tensors[path].shape]
        self.read(_union(likely | self._files_of(whole), node), node)
        lacking = [path for path in want if self.fault(path, want[path])]
        self.read(_union(self._files_of(lacking) - {*self.lists}, node), node)

    def parts(self, path: str) -> tuple[StoredPart, ...]:
        """Return the parts of a tensor in the files that were read."""
        listed = (each.parts.get(path, ()) for _, each in sorted(self.lists.items()))
        return (*self.manifest.tensors[path].parts, *(part for parts in listed for part in parts))

    def fault(self, path: str, want: Shard) -> str | None:
        """Return None if the parts contain each element of ``want`` once, otherwise the fault."""
        boxes = (part.shard.intersection(want) for part in self.parts(path))
        found = [box.relative_to(want) for box in boxes if box]
        fault = fault_of_cover(want.shape, found)
        return fault and f"{path}: {fault}"

    def records(self) -> dict[str, Record]:
        """Return the tensors of the state with the parts in the files that were read."""
        tensors = self.manifest.tensors.items()
        return {path: replace(record, parts=self.parts(path)) for path, record in tensors}

    def private(self, rank: int) -> dict[str, Record]:
        """Return the private tensors of a rank; empty if it has none. Not collective."""
        if not self.manifest.files:
            return self.manifest.private.get(rank, {})
        if rank >= self.manifest.world:
            return {}
        if (file := self.file_of(rank)) not in self.lists:
            self.read([file])
        return self.lists[file].private.get(rank, {})

    @property
    def num_private(self) -> int:
        """Number of ranks that have private values."""
        runs = (run for file in self.manifest.files for run in file.private)
        return len(self.manifest.private) + sum(map(len, runs))

    def private_ranks(self) -> Iterator[int]:
        """Yield the ranks that have private values."""
        runs = (run for file in self.manifest.files for run in file.private)
        yield from chain(self.manifest.private, *sorted(runs, key=lambda run: run.start))

    def listed_ranks(self) -> list[int]:
        """Return the ranks that have private values in the files that were read."""
        listed = (rank for _, each in sorted(self.lists.items()) for rank in each.private)
        return [*self.manifest.private, *listed]

    def file_of(self, rank: int) -> int:
        """Return the first rank of the file that a rank of the save has written."""
        return next(
            file.first_rank
            for file in self.manifest.files
            if any(rank in run for run in file.ranks)
        )

    def _files_of(self, paths: Collection[str]) -> set[int]:
        ends = {self.manifest.tensors[path].files for path in paths}
        return {
            file.first_rank
            for file in self.manifest.files
            if any(one and one[0] <= file.first_rank <= one[1] for one in ends)
        }


def _union(files: set[int], node: "SharedMemory | None") -> set[int]:
    return files.union(*node.gather(files)) if node else files
