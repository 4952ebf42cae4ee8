"""Large all-reduces in node memory, where DistributedDataParallel keeps its buckets from then on.

Torch lets no backend in Python say where the buckets of DDP are allocated. So the first time that
one is reduced its storage gets memory which all ranks of the node map, and from then on it is
summed where it lies: no byte is copied to a stage and back.
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
"""From here on the ranks ask each other where the tensor lies: a meeting more."""

_MOVABLE = -1  # what a rank tells of a tensor that it would move; buckets count from 1


class BucketsInPlace:
    """All-reduces of large tensors by the ranks of one node; what reductions need of it."""

    def __init__(self, comm: Communicator) -> None:
        """Take the ranks."""
        self.size = comm.size
        assert comm.node is not None, "they share memory"
        self._comm, self._node = comm, comm.node
        self._known: dict[int, Bucket] = {}  # by address
        self._offered: set[int] = set()  # addresses of what may be moved
        self._has_room = True

    @staticmethod
    def of(comm: Communicator) -> "BucketsInPlace | None":
        """Return them where the ranks of ``comm`` share a node and torch can, else None."""
        is_one_node = comm.node is not None and comm.num_rails == 0
        return BucketsInPlace(comm) if is_one_node and can_move_storage else None

    def offer(self, tensor: Tensor) -> None:
        """Let a tensor be moved if DDP has called the method of the group that calls this.

        DDP is C++ code in a backward pass. A program itself may look at the memory of a tensor by
        other means, such as an array of numpy, that would not follow.
        """
        caller = sys._getframe(3)  # noqa: SLF001 - behind this, the method and ``on_cpu``
        is_ddp = caller.f_code is BACKWARD and tensor.is_contiguous()
        if is_ddp and tensor.nbytes == tensor.untyped_storage().nbytes():
            self._offered.add(tensor.data_ptr())

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Do what the communicator does, to the same bits; collective."""
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
        # A rank may have another tensor, as one does that has joined, and sends zeros.
        if not self._node.compare(call, number) or number == 0:
            bucket = None
        elif number == _MOVABLE:
            bucket = self._move(tensor)
        return self._comm.allreduce_(tensor if bucket is None else bucket, op=op, scale=scale)

    def _move(self, tensor: Tensor) -> Bucket | None:
        """Give the storage of ``tensor`` memory of the node; None, on all ranks, without room."""
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
        # The storage alone refers to this array from here on.
        weakref.finalize(memory, self._known.pop, address, None).atexit = False
        move_storage(tensor, other)
        return bucket
