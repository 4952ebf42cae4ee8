"""A bucket: the flat buffer in which gradients travel."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.node.slices import chunks_of


class BucketOwner(Protocol):
    """A node level, as buckets know it."""

    num_bytes: int
    """Bytes that this rank has read and written in node memory so far."""


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
    owner: BucketOwner | None = None
    """The node level that made it; None in private memory."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel()

    def part(self, numel: int, dtype: torch.dtype, first_byte: int = 0) -> "Bucket":
        """Return ``numel`` values of ``dtype`` in the same memory. Not collective.

        All ranks that reduce it have made it alike. It is valid as long as this bucket is.
        """
        own = slice(first_byte, first_byte + numel * dtype.itemsize)
        flat = self.flat.view(torch.uint8)[own].view(dtype)
        if not self.peers:
            return Bucket(flat, number=self.number, owner=self.owner)
        local_rank = next(rank for rank, peer in enumerate(self.peers) if peer is self.flat)
        peers = [peer.view(torch.uint8)[own].view(dtype) for peer in self.peers]
        peers[local_rank] = flat
        chunks = chunks_of(peers, local_rank)
        return Bucket(flat, tuple(peers), chunks, self.number, self.owner)
