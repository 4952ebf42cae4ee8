"""Ways of torch.distributed between ranks, from and into memory of the caller."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of


class Transfers:
    """Over the methods of the communicator; every method is collective.

    Tensors are flat and contiguous. ``outs`` and ``parts`` have one for each rank, by rank. What
    a rank gives has the size that the others expect, else ``MismatchError`` or ``CommError``.
    """

    def __init__(self, comm: Communicator) -> None:
        """Take the ranks."""
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    def broadcast(self, values: Tensor, root: int) -> None:
        """Replace ``values`` by those of ``root``."""
        self.comm.broadcast_(values, root).wait()

    def all_gather(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        """Write what every rank has into ``outs``."""
        _fill(outs, self.comm.all_gather(mine))

    def gather(self, outs: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
        """Write what every rank has into ``outs`` of rank ``root``."""
        given = [mine if rank == root else mine[:0] for rank in range(self.size)]
        call = f"gather of {mine.numel()} {name_of(mine.dtype)} on {root}"
        received = self.comm.alltoall(given, call)
        if outs is not None:
            _fill(outs, received)

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
        """Write this rank's part of those of rank ``root`` into ``out``."""
        call = f"scatter of {out.numel()} {name_of(out.dtype)} from {root}"
        _fill([out], [self.comm.alltoall(parts or [out[:0]] * self.size, call)[root]])

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write what every rank has for this one into ``outs``."""
        _fill(outs, self.comm.alltoall(parts))

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: Op, scale: float | None
    ) -> None:
        """Write the reduction over all ranks of this rank's part into ``out``."""
        numels = [part.numel() for part in parts]
        whole = torch.cat(list(parts))
        out.copy_(self.comm.reduce_scatter(whole, op=op, scale=scale, numels=numels))


def _fill(outs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for out, values in zip(outs, given, strict=True):
        out.copy_(values.view(out.shape))
