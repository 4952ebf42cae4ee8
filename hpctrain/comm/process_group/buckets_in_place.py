"""All-reduces of the buckets of DistributedDataParallel in place, in node memory.

A backend in Python cannot determine where DDP allocates its buckets. So the first all-reduce of a
bucket replaces its storage by memory that all ranks of the node map. Later all-reduces sum the
bucket in place, without copies to and from the stage.
"""

import sys
import weakref

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.ops import Op
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.torch_compat import BACKWARD, can_move_storage, move_storage
from hpctrain.core.units import MIB

LARGE_BYTES = MIB
"""From this size on, ranks compare the locations of the tensor, which costs a barrier."""

_MOVABLE = -1  # location of a tensor that the rank can move; buckets count from 1


class BucketsInPlace:
    """All-reduces large tensors over the ranks of one node, in place if possible.

    Args:
        comm: the ranks, which must share memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self.size = comm.size
        assert comm.node is not None, "the ranks must share memory"
        self._comm, self._node = comm, comm.node
        self._known: dict[int, Bucket] = {}  # by address of the elements
        self._offered: set[int] = set()  # addresses of tensors that may be moved
        self._has_room = True

    @staticmethod
    def of(comm: Communicator) -> "BucketsInPlace | None":
        """Return an instance if ``comm`` is on one node and torch supports moves, else None."""
        is_one_node = comm.node is not None and comm.num_rails == 0
        return BucketsInPlace(comm) if is_one_node and can_move_storage else None

    def offer(self, tensor: Tensor) -> None:
        """Permit moving the storage of ``tensor`` if DDP has called the group. Not collective.

        DDP calls the group from C++ in a backward pass. Tensors of other callers are not moved,
        since a NumPy array of the same memory, for example, would not follow.
        """
        caller = sys._getframe(3)  # noqa: SLF001 - the caller of ``on_cpu``
        is_ddp = caller.f_code is BACKWARD and tensor.is_contiguous()
        if is_ddp and tensor.nbytes == tensor.untyped_storage().nbytes():
            self._offered.add(tensor.data_ptr())

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """All-reduce as the communicator does, with a bitwise identical result. Collective."""
        from hpctrain.comm.call_check import tensor_call  # noqa: PLC0415 - a world of one needs no MPI

        bucket = self._known.get(tensor.data_ptr())
        number = 0
        if tensor.data_ptr() in self._offered:
            self._offered.discard(tensor.data_ptr())
            number = _MOVABLE if self._has_room else 0
        if bucket is not None:
            is_whole = (bucket.numel, bucket.flat.dtype) == (tensor.numel(), tensor.dtype)
            number = bucket.number if is_whole else 0
        call = tensor_call(op, tensor.dtype, tensor.numel(), scale)
        # Ranks may differ: with DDP's ``join``, a rank without inputs reduces another tensor of
        # zeros.
        if not self._node.compare(call, number) or number == 0:
            bucket = None
        elif number == _MOVABLE:
            bucket = self._move(tensor)
        return self._comm.allreduce_(tensor if bucket is None else bucket, op=op, scale=scale)

    def _move(self, tensor: Tensor) -> Bucket | None:
        """Move the storage of ``tensor`` to a new bucket in node memory, and return the bucket.

        Returns None on all ranks if memory is short.
        """
        try:
            bucket = self._node.new_bucket(tensor.numel(), tensor.dtype)
        except NodeMemoryError:
            self._has_room = False
            return None
        bucket.flat.copy_(tensor.view(-1))
        memory = bucket.flat.view(torch.uint8).numpy()
        other = torch.frombuffer(memory, dtype=torch.uint8)
        address = bucket.flat.data_ptr()
        self._known[address] = bucket
        # After this function only the storage refers to ``memory``.
        weakref.finalize(memory, self._known.pop, address, None).atexit = False
        move_storage(tensor, other)
        return bucket
