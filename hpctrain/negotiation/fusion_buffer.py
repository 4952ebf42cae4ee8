"""The memory in which small tensors travel together, used again and again.

It has two halves, which messages use in turns: what one message has left in a half may be read by
other ranks until they have met for the next one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.units import KIB, MIB

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

BUCKET_BYTES = 128 * KIB
"""From here on a message lies in node memory: one copy less for two more meetings."""
_MOST_VIEWS = 1 << 14
"""Views of a half that are kept: making one costs as much as copying some KiB."""
_TWO = 2


class Layout(NamedTuple):
    """The part of the buffer that is in use."""

    whole: Bucket | Tensor
    """For the communicator."""
    flat: Tensor
    """Its values."""
    views: list[Tensor]
    """A view of it for every tensor."""
    others: list[Tensor] | None
    """The same of the other rank, where there are two and they share memory."""


class FusionBuffer:
    """Bytes that are looked at as tensors of some dtype, one after the other."""

    def __init__(self, comm: "Communicator") -> None:
        """Take the communicator over which messages are reduced; nothing is made yet."""
        self._comm = comm
        self._bucket: Bucket | None = None
        self._layouts: OrderedDict[object, tuple[Layout, Layout]] = OrderedDict()
        self._num_views = 0
        self._turn = 0

    def layout(self, tensors: Sequence[Tensor], key: object = None) -> Layout:
        """Return half of the buffer laid out for ``tensors`` of one dtype.

        It is this message's until the next but one call.

        Collective: the buffer grows where it has to, on all ranks at once.

        Args:
            tensors: whose values it shall take.
            key: equal only for tensors of the same dtype and shapes; None to make one of these.

        Raises:
            NodeMemoryError: there is not enough memory; on every rank.
        """
        dtype = tensors[0].dtype
        if key is None:
            key = (dtype, tuple([tensor.shape for tensor in tensors]))
        found = self._layouts.get(key)
        if found is None:
            # Made outside of inference mode: what is made inside it cannot be written later.
            with torch.inference_mode(mode=False):
                found = self._lay_out(dtype, tensors)
            self._keep(key, found)
        else:
            self._layouts.move_to_end(key)
        self._turn = 1 - self._turn
        return found[self._turn]

    def count(self, layout: Layout) -> None:
        """Count that the values of this rank were written, and those of the other one read."""
        if self._bucket is not None and self._bucket.owner is not None:
            self._bucket.owner.num_bytes += 2 * layout.flat.nbytes

    def _lay_out(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[Layout, Layout]:
        numel = sum([tensor.numel() for tensor in tensors])
        bucket = self._enough(numel * dtype.itemsize)
        first, second = (
            _layout(bucket.part(numel, dtype, first_byte), tensors, self._comm.size)
            for first_byte in (0, bucket.numel // 2)
        )
        return first, second

    def _enough(self, num_bytes: int) -> Bucket:
        """Return a bucket of which each half has at least so many bytes."""
        if self._bucket is None or self._bucket.numel < 2 * num_bytes:
            self._layouts.clear()  # they look at the memory that goes
            self._num_views = 0
            self._bucket = None
            size = MIB
            while size < num_bytes:
                size *= 2
            self._bucket = self._grown(2 * size)
        return self._bucket

    def _grown(self, num_bytes: int) -> Bucket:
        made, refusal = None, ""
        try:
            made = self._comm.new_bucket(num_bytes, torch.uint8)
        except NodeMemoryError as error:  # on every rank of a node: the others must hear of it
            refusal = str(error)
        refusals = [text for text in self._comm.allgather_object(refusal) if text]
        if made is None or refusals:
            raise NodeMemoryError(refusals[0])
        return made

    def _keep(self, key: object, layouts: tuple[Layout, Layout]) -> None:
        self._layouts[key] = layouts
        self._num_views += len(layouts[0].views)
        while self._num_views > _MOST_VIEWS and len(self._layouts) > 1:
            _, (oldest, _) = self._layouts.popitem(last=False)
            self._num_views -= len(oldest.views)


def _layout(bucket: Bucket, tensors: Sequence[Tensor], num_ranks: int) -> Layout:
    views, others = _views(bucket.flat, tensors), None
    if num_ranks == len(bucket.peers) == _TWO:
        other = next(peer for peer in bucket.peers if peer is not bucket.flat)
        others = _views(other, tensors)
    is_large = bucket.flat.nbytes >= BUCKET_BYTES
    return Layout(bucket if is_large else bucket.flat, bucket.flat, views, others)


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
