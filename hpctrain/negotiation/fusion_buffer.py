"""Fusion: which all-reduces share a message, and the memory in which their tensors travel."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.agreement import agreed
from hpctrain.comm.bucket import Bucket
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.units import KIB, MIB
from hpctrain.negotiation.request import Kind, ReduceOp, Request

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

DIRECT_BYTES = 1 << 20
"""Tensors from this size on are not fused: to copy them costs more than a message saves."""
BUCKET_BYTES = 128 * KIB
"""From here on a message lies in node memory: one copy less for two more meetings."""
_MOST_VIEWS = 1 << 14
"""Views that are kept: making one costs as much as copying some KiB."""


def runs(requests: Sequence[Request], fusion_bytes: int) -> list[list[int]]:
    """Return the numbers of requests that are carried out together, each once, in order.

    A function of the signatures alone, so the same on all ranks. All-reduces of one dtype,
    operation and factors are put together, in their order, up to ``fusion_bytes``, where the first
    of them has its place; everything else is alone, and so is a request of several dtypes. A
    request is never cut.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, request in enumerate(requests):
        num_bytes = fusible_bytes(request)
        if num_bytes is None:
            found.append([number])
            continue
        signature = request.signature
        key = (signature.dtypes[0], signature.op, signature.prescale, signature.postscale)
        run, filled = filling.get(key, ((), 0))
        if isinstance(run, list) and filled + num_bytes <= fusion_bytes:
            run.append(number)
        else:
            run, filled = [number], 0
            found.append(run)
        filling[key] = run, filled + num_bytes
    return found


def fusible_bytes(request: Request) -> int | None:
    """Return the bytes of a request that may share a message with others; None if it may not."""
    signature = request.signature
    if signature.kind is not Kind.ALLREDUCE or signature.op is ReduceOp.ADASUM:
        return None
    tensors = request.tensors
    if len(tensors) == 1:
        num_bytes = tensors[0].nbytes
        return num_bytes if num_bytes < DIRECT_BYTES else None
    if len(set(signature.dtypes)) != 1:
        return None
    return sum([tensor.nbytes for tensor in tensors if tensor.nbytes < DIRECT_BYTES])


class Layout(NamedTuple):
    """The part of the buffer that is in use."""

    whole: Bucket | Tensor
    """For the communicator."""
    flat: Tensor
    """Its values."""
    views: list[Tensor]
    """A view of it for every tensor."""
    is_flat: bool
    """Whether all tensors have one dimension."""


class FusionBuffer:
    """Bytes that are looked at as tensors of some dtype, one after the other, again and again."""

    def __init__(self, comm: "Communicator") -> None:
        """Take the communicator over which messages are reduced; nothing is made yet."""
        self._comm = comm
        self._bucket: Bucket | None = None
        self._layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self._num_views = 0

    def layout(self, tensors: Sequence[Tensor]) -> Layout:
        """Return the buffer laid out for ``tensors`` of one dtype; until the next call.

        Collective: the buffer grows where it has to, on all ranks at once. ``NodeMemoryError``, on
        every rank, if there is not enough memory.
        """
        dtype = tensors[0].dtype
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
        bucket = self._enough(sum(numels) * dtype.itemsize).part(sum(numels), dtype)
        parts = zip(bucket.flat.split(numels), tensors, strict=True)
        return Layout(
            bucket if bucket.flat.nbytes >= BUCKET_BYTES else bucket.flat,
            bucket.flat,
            [part.view(tensor.shape) for part, tensor in parts],
            all(tensor.dim() == 1 for tensor in tensors),
        )

    def _enough(self, num_bytes: int) -> Bucket:
        """Return a bucket that has at least so many bytes."""
        if self._bucket is None or self._bucket.numel < num_bytes:
            self._layouts.clear()  # they look at the memory that goes
            self._num_views = 0
            self._bucket = None
            size = MIB
            while size < num_bytes:
                size *= 2
            with agreed(self._comm, NodeMemoryError):  # it fails on all ranks of one node
                self._bucket = self._comm.new_bucket(size, torch.uint8)
        assert self._bucket is not None
        return self._bucket

    def _keep(self, key: Hashable, layout: Layout) -> None:
        self._layouts[key] = layout
        self._num_views += len(layout.views)
        while self._num_views > _MOST_VIEWS and len(self._layouts) > 1:
            _, oldest = self._layouts.popitem(last=False)
            self._num_views -= len(oldest.views)
