"""The memory in which small tensors travel together, used again and again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.errors import NodeMemoryError
from hpctrain.units import KIB, MIB

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

BUCKET_BYTES = 128 * KIB
"""From here on a message lies in node memory: one copy less for two more meetings."""
_MOST_VIEWS = 1 << 14
"""Views that are kept: making one costs as much as copying some KiB."""


class Layout(NamedTuple):
    """The part of the buffer that is in use."""

    whole: Bucket | Tensor
    """For the communicator."""
    flat: Tensor
    """Its values."""
    views: list[Tensor]
    """A view of it for every tensor."""


class FusionBuffer:
    """Bytes that are looked at as tensors of some dtype, one after the other."""

    def __init__(self, comm: "Communicator") -> None:
        """Take the communicator over which messages are reduced; nothing is made yet."""
        self._comm = comm
        self._bucket: Bucket | None = None
        self._layouts: OrderedDict[object, Layout] = OrderedDict()
        self._num_views = 0

    def layout(self, tensors: Sequence[Tensor], key: object = None) -> Layout:
        """Return the buffer laid out for ``tensors`` of one dtype; good until the next call.

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
        return found

    def _lay_out(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Layout:
        numels = [tensor.numel() for tensor in tensors]
        num_bytes = sum(numels) * dtype.itemsize
        bucket = self._enough(num_bytes).part(sum(numels), dtype)
        parts = bucket.flat.split(numels)
        views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        whole = bucket if num_bytes >= BUCKET_BYTES else bucket.flat
        return Layout(whole, bucket.flat, views)

    def _enough(self, num_bytes: int) -> Bucket:
        """Return a bucket of at least so many bytes."""
        if self._bucket is None or self._bucket.numel < num_bytes:
            self._layouts.clear()  # they look at the memory that goes
            self._num_views = 0
            self._bucket = None
            size = MIB
            while size < num_bytes:
                size *= 2
            self._bucket = self._grown(size)
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

    def _keep(self, key: object, layout: Layout) -> None:
        self._layouts[key] = layout
        self._num_views += len(layout.views)
        while self._num_views > _MOST_VIEWS and len(self._layouts) > 1:
            _, (_, _, views) = self._layouts.popitem(last=False)
            self._num_views -= len(views)
