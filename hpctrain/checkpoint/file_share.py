"""Files of a checkpoint that the ranks of a node share."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import entry_name, file_name
from hpctrain.checkpoint.format.tensor_file import EntrySpec
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.threaded import start_on


@dataclass(frozen=True, slots=True)
class FileShare:
    """The file of this rank, which may contain tensors of the other ranks of its node."""

    rank: int
    first_rank: int  # of the ranks that share the file
    specs: list[EntrySpec]  # tensors of all these ranks

    @classmethod
    def of(cls, comm: Communicator, files: str, tensors: Mapping[str, Tensor]) -> "FileShare":
        """Exchange names and shapes of the tensors that each rank writes.

        Collective over the node if ``files`` is ``node``; otherwise each rank has its own file.
        """
        node = comm.node if files == "node" else None
        first_rank = comm.node_ranks[0] if node else comm.rank
        of_ranks = [
            [
                EntrySpec(
                    entry_name(name, comm.rank, first_rank), name_of(one.dtype), tuple(one.shape)
                )
                for name, one in tensors.items()
            ]
        ]

        def exchange() -> None:
            assert node is not None
            of_ranks[:] = node.gather(of_ranks[0])

        if node is not None:
            start_on(comm, exchange).wait()
        return cls(comm.rank, first_rank, list(chain(*of_ranks)))

    def write(self, room: Path, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Write the tensors of this rank, and return the crc32 of their blocks by name."""
        entries = {name: entry_name(name, self.rank, self.first_rank) for name in tensors}
        named = {entries[name]: tensor for name, tensor in tensors.items()}
        crcs = tensor_file.write(room / file_name(self.first_rank), named, self.specs)
        return {name: crcs[entry] for name, entry in entries.items()}
