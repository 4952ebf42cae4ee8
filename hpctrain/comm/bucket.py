"""A bucket: the flat buffer in which gradients travel."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One message of many tensors, laid out alike on every rank."""

    flat: Tensor
    """This rank's own elements, 1-D and contiguous. The sum comes back into it."""
    peers: tuple[Tensor, ...] = ()
    """The same bucket of every rank of the node, by local rank, mapped into this process.
    Empty when the bucket lies in private memory."""
    chunks: tuple[tuple[Tensor, ...], ...] = ()
    """The slice that this rank sums, cut into pieces that fit the cache: one view per peer."""
    number: int = 0
    """Counts the buckets of a communicator: the ranks compare it before they reduce."""
    owner: object = None
    """The node level that made it; None in private memory."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel()
