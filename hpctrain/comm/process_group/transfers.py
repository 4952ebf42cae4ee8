"""Data movement for torch.distributed through the methods of a communicator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of


class Transfers:
    """Moves tensors between the ranks of ``comm``. All methods are collective.

    Tensors are 1-D and contiguous. ``outs`` and ``parts`` have one tensor per rank. The methods
    raise ``MismatchError`` or ``CommError`` if sizes do not match between ranks.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    def broadcast(self, values: Tensor, root: int) -> None:
        """Replace ``values`` by the values of rank ``root``."""
        self.comm.broadcast_(values, root).wait()

    def all_gather(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        """Copy ``mine`` of each rank r to ``outs[r]`` on all ranks."""
        _fill(outs, self.comm.all_gather(mine))

    def gather(self, outs: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
        """Copy ``mine`` of each rank r to ``outs[r]`` on rank ``root``.

        ``outs`` is None on other ranks.
        """
        given = [mine if rank == root else mine[:0] for rank in range(self.size)]
        call = f"gather of {mine.numel()} {name_of(mine.dtype)} on {root}"
        received = self.comm.alltoall(given, call)
        if outs is not None:
            _fill(outs, received)

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
        """Copy ``parts[r]`` of rank ``root`` to ``out`` of each rank r."""
        call = f"scatter of {out.numel()} {name_of(out.dtype)} from {root}"
        _fill([out], [self.comm.alltoall(parts or [out[:0]] * self.size, call)[root]])

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Send ``parts[r]`` to rank r; store the received tensors in ``outs``."""
        _fill(outs, self.comm.alltoall(parts))

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: Op, scale: float | None
    ) -> None:
        """Reduce ``parts[r]`` over the ranks, and store the result in ``out`` of rank r."""
        numels = [part.numel() for part in parts]
        whole = torch.cat(list(parts))
        out.copy_(self.comm.reduce_scatter(whole, op=op, scale=scale, numels=numels))


def _fill(outs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for out, values in zip(outs, given, strict=True):
        out.copy_(values.view(out.shape))
