"""Files of a checkpoint that the ranks of a node share."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import (
    PRIVATE,
    FileRecord,
    entry_name,
    file_name,
    runs_of,
)
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.format.tensor_file import EntrySpec
from hpctrain.checkpoint.refusal import explained
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.threaded import start_on
from hpctrain.core.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileShare:
    """The file of this rank, which may contain tensors of the other ranks of its node."""

    comm: Communicator
    ranks: Sequence[int]  # the ranks that share the file
    specs: list[EntrySpec]  # tensors of all these ranks
    tensors: Mapping[str, Tensor]  # tensors of this rank, by name in the file

    @classmethod
    def of(
        cls,
        comm: Communicator,
        files: str,
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, Shard],
    ) -> "FileShare":
        """Exchange names and shapes of the tensors that each rank writes.

        Collective over the node if ``files`` is ``node``; otherwise each rank has its own file.
        ``shards`` contains the place of each tensor that is a part of a larger tensor, by name.
        """
        ranks = comm.node_ranks if files == "node" and comm.node else (comm.rank,)
        names = {name: entry_name(name, comm.rank, ranks[0]) for name in tensors}
        specs = [
            EntrySpec(
                names[name],
                name_of(one.dtype),
                tuple(one.shape),
                shards[name].offset if name in shards else (0,) * one.dim(),
            )
            for name, one in tensors.items()
        ]
        named = {names[name]: one for name, one in tensors.items()}
        own = cls(comm, ranks, [], named)
        return replace(own, specs=list(chain(*own._gathered(specs))))

    def write(self, room: Path) -> dict[str, list[int]]:
        """Write the tensors of this rank, and return the crc32 of their blocks. Not collective."""
        return tensor_file.write(room / file_name(self.ranks[0]), self.tensors, self.specs)

    def finish(self, room: Path, crcs: dict[str, list[int]]) -> FileRecord | None:
        """Write the header after all ranks have written their tensors. Collective.

        Args:
            room: directory of the file.
            crcs: result of ``write``.

        Returns:
            The record of the file on the first of the ranks that share it; None on other ranks.

        Raises:
            CheckpointError: a rank cannot write a header; on every rank.
        """
        private = [one for name, one in self.tensors.items() if PRIVATE in name.split("/")]
        mine = crcs, bool(private), sum(one.nbytes for one in private)
        every, has_private, num_bytes = zip(*self._gathered(mine), strict=True)
        with agreed(self.comm, CheckpointError), explained(f"write checkpoint {room}"):
            if self.comm.rank != self.ranks[0]:
                return None
            path, merged = room / file_name(self.ranks[0]), ChainMap(*every)
            header_crc = tensor_file.write_header(path, self.specs, merged)
        runs = runs_of(self.ranks), runs_of(compress(self.ranks, has_private))
        return FileRecord(*runs, sum(num_bytes), header_crc)

    def _gathered(self, mine: T) -> list[T]:
        """Return the values of the ranks that share the file."""
        found = [mine]
        if len(self.ranks) > 1:
            node = self.comm.node
            assert node is not None
            start_on(self.comm, lambda: found.__setitem__(slice(None), node.gather(mine))).wait()
        return found
