"""``SharedSlots``, which sums tensors that are not buckets, in node memory."""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket, chunks_of
from hpctrain.comm.call_check import tensor_call
from hpctrain.comm.flight_recorder import Call
from hpctrain.comm.node.kernel import DIRECT, SLICES, Sum
from hpctrain.comm.ops import Combination, combine_to, scale_

if TYPE_CHECKING:
    from hpctrain.comm.node.shared_memory import SharedMemory


class TensorSum(NamedTuple):
    """A sum of tensors of one dtype and size that are not buckets."""

    call: Call
    total: Sum | None  # the sum by the kernel; None if the kernel is off or lacks the sum
    num_chunks: int  # number of slots that the values fill, at least one
    num_bytes: int  # read and written in node memory


Slots = tuple[Tensor, ...]


NUM_PLACES = 11
"""Maximum number of chunks of a tensor in the stage: those in flight between nodes, one being
copied in, one being copied out, and one that another rank may still copy out."""
_PLACE_ALIGN = 4096
MAX_VIEWS = 256  # cached views: creating a view costs as much as a small sum


class SharedSlots:
    """Reduces tensors that are not buckets, through the staging buffers of ``node``.

    Methods that synchronize are collective over the node. The staging buffer of a rank has two
    slots, which the rank writes alternately. Between two writes to the same slot, all ranks
    pass the barrier of the operation that uses the other slot, and so have finished reading. One
    barrier per operation is therefore enough.
    """

    def __init__(self, node: "SharedMemory") -> None:
        self._node = node
        self._num_bytes = len(node.stage[0]) // 2
        self._place_bytes = len(node.stage[0]) // NUM_PLACES // _PLACE_ALIGN * _PLACE_ALIGN
        self._views = lru_cache(MAX_VIEWS)(self._make_views)
        self._bucket_of = lru_cache(MAX_VIEWS)(self._make_bucket)
        self.sum_of = lru_cache(MAX_VIEWS)(self._prepare)

    def numel(self, dtype: torch.dtype) -> int:
        """Return the number of elements of ``dtype`` that fit a slot."""
        return self._num_bytes // dtype.itemsize

    def direct_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum; every rank sums all slots after a single barrier."""
        what, node = self._start(DIRECT, values, combination, scale), self._node
        if what is None:
            return
        node.count(what.num_bytes)
        for chunk in values.split(self.numel(values.dtype)):
            parts = list(self.views(chunk.dtype, chunk.shape, node.turn))
            parts[node.local_rank].copy_(chunk)
            node.await_others(what.call)
            if node.local_rank < 2:
                parts[node.local_rank] = chunk  # reads ``chunk`` in place of the slot
            combine_to(chunk, parts, combination, scale)

    def slices_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum; every rank sums one slice, then reads all slices."""
        what, node = self._start(SLICES, values, combination, scale), self._node
        if what is None:
            return
        for chunk in values.split(self.numel(values.dtype)):
            bucket = self._enter(chunk, what.call)
            node.sum_slice(bucket, combination, scale)
            node.barrier()
            self.leave(chunk, bucket, None)

    def _start(
        self, kind: int, values: Tensor, how: Combination, scale: float | None
    ) -> TensorSum | None:
        """Sum by the kernel and return None; without the kernel, only begin the call."""
        what = self.sum_of(kind, how, values.numel(), scale)
        if what.total is None:
            self._node.begin(what.call)
            return what
        self._node.sum_values(what, values)
        return None

    def _prepare(self, kind: int, how: Combination, numel: int, scale: float | None) -> TensorSum:
        call = tensor_call(how.op, how.storage_dtype, numel, scale)
        total = self._node.waits.sum_of(kind, call, how, numel, scale)
        num_bytes = numel * how.storage_dtype.itemsize
        num_chunks = max(1, -(-num_bytes // self._num_bytes))
        num_passes = 1 + self._node.local_size if kind == DIRECT else 4
        return TensorSum(call, total, num_chunks, num_passes * num_bytes)

    def enter(self, values: Tensor, call: Call) -> Bucket:
        """Copy the 1-D ``values``, which must fit a slot, to this rank's slot; begin ``call``.

        Synchronizes the ranks and returns the slots of all ranks as a bucket.
        """
        self._node.begin(call)
        return self._enter(values, call)

    def _enter(self, values: Tensor, call: Call) -> Bucket:
        bucket = self._bucket(values, self._node.turn * self._num_bytes)
        bucket.flat.copy_(values)
        self._node.await_others(call)
        return bucket

    def chunk_numel(self, num_bytes: int, dtype: torch.dtype) -> int:
        """Return the number of elements of a chunk for ``enter_at``, at most ``num_bytes``."""
        return min(num_bytes, self._place_bytes) // dtype.itemsize

    def enter_at(self, number: int, values: Tensor) -> Bucket:
        """Copy chunk ``number`` to one of ``NUM_PLACES`` places in the stage; synchronize.

        Chunks are numbered from 0. The caller synchronizes the node before the first and after the
        last chunk.

        Returns the chunks of all ranks, of at most ``chunk_numel`` elements, as a bucket.
        """
        first_byte = number % NUM_PLACES * self._place_bytes
        bucket = self._bucket(values, first_byte)
        self._node.require_usable()
        bucket.flat.copy_(values)
        self._node.barrier()
        return bucket

    def _bucket(self, values: Tensor, first: int) -> Bucket:
        """Return the stages from byte ``first`` as a bucket for ``values``; count one copy."""
        self._node.count(values.nbytes)
        return self._bucket_of(values.dtype, values.shape, first)

    def _make_bucket(self, dtype: torch.dtype, shape: torch.Size, first: int) -> Bucket:
        slots, rank = self._views(dtype, shape, first), self._node.local_rank
        return Bucket(slots[rank], slots, chunks_of(slots, rank))

    def leave(self, values: Tensor, bucket: Bucket, scale: float | None) -> None:
        """Copy the sum in the first rank's slot, times ``scale``, to ``values``.

        A barrier must precede the call.
        """
        values.copy_(bucket.peers[0])
        if scale is not None:
            scale_(values, scale)
        self._node.count(values.nbytes)

    def views(self, dtype: torch.dtype, shape: torch.Size, turn: int) -> Slots:
        """Return slot ``turn`` of each rank as a tensor of ``dtype`` and ``shape``. Local."""
        return self._views(dtype, shape, turn * self._num_bytes)

    def _make_views(self, dtype: torch.dtype, shape: torch.Size, first: int) -> Slots:
        end = first + shape.numel() * dtype.itemsize
        # A view created in inference mode could not be written outside of it later.
        with torch.inference_mode(mode=False):
            return tuple(raw[first:end].view(dtype).view(shape) for raw in self._node.stage)
