"""Reductions of torch.distributed, performed by a ``Communicator``.

A backend in Python cannot determine where DDP allocates its buckets. So the first all-reduce of a
bucket replaces its storage by memory that all ranks of the node map. Later all-reduces sum the
bucket in place, without copies to and from the stage.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.ops import Op
from hpctrain.core.errors import CommError, NodeMemoryError
from hpctrain.core.torch_compat import BACKWARD, can_move_storage, move_storage
from hpctrain.core.units import MIB

_Kind: Any = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: Op.SUM,
    _Kind.AVG: Op.SUM,
    _Kind.PREMUL_SUM: Op.SUM,
    _Kind.PRODUCT: Op.PRODUCT,
    _Kind.MIN: Op.MIN,
    _Kind.MAX: Op.MAX,
    _Kind.BAND: Op.BAND,
    _Kind.BOR: Op.BOR,
    _Kind.BXOR: Op.BXOR,
}


@dataclass(frozen=True, slots=True)
class GroupReduction:
    """A reduction of torch.distributed: an operation, an average, or a sum with factors."""

    op: Op
    averages: bool = False
    factor: float | Tensor | None = None  # of the values of this rank, before the sum

    @classmethod
    def of(cls, given: Any) -> "GroupReduction":
        """Create the reduction of a ``ReduceOp``, of its type, or of options; a sum for None."""
        reduce_op = getattr(given, "reduceOp", given)
        kind = getattr(reduce_op, "op", reduce_op) if reduce_op is not None else _Kind.SUM
        found = _PLAIN.get(kind.value)
        if found is not None:
            return found
        if kind != _Kind.PREMUL_SUM:
            raise ValueError(
                f"the reduction of a group must be one of SUM, AVG, PREMUL_SUM, PRODUCT, MIN, "
                f"MAX, BAND, BOR and BXOR, got {kind}"
            )
        return cls(Op.SUM, factor=reduce_op.__getstate__()[1])

    def scale(self, dtype: torch.dtype, size: int) -> float | None:
        """Return the factor that the communicator applies to the result; None for no factor."""
        is_real = dtype.is_floating_point or dtype.is_complex
        return 1 / size if self.averages and is_real else None

    def weighted(self, values: Tensor) -> Tensor:
        """Return ``values`` times the factor of this rank."""
        return values if self.factor is None else (values * self.factor).to(values.dtype)

    def finish(self, values: Tensor, size: int) -> None:
        """For an average of integers, divide the sum by ``size`` and round towards zero."""
        if self.averages and self.scale(values.dtype, size) is None:
            values.copy_(torch.div(values, size, rounding_mode="trunc"))


# Keys are integers: a lookup by pybind enum takes 0.5 us.
_PLAIN = {
    kind.value: GroupReduction(op, averages=kind == _Kind.AVG)
    for kind, op in _OPS.items()
    if kind != _Kind.PREMUL_SUM
}


def allreduce(comm: "Communicator | BucketsInPlace", tensor: Tensor, how: GroupReduction) -> None:
    """Replace ``tensor`` by its reduction over the ranks. Collective."""
    values = tensor.data  # does not change the version counter
    if how.factor is None and not how.averages:
        comm.allreduce_(values, op=how.op).wait()
        return
    if how.factor is not None:
        values.copy_(how.weighted(values))
    comm.allreduce_(values, op=how.op, scale=how.scale(values.dtype, comm.size)).wait()
    how.finish(values, comm.size)


def sparse_sum(comm: Communicator, tensor: Tensor, how: GroupReduction) -> None:
    """Replace a sparse tensor by its sum or average over the ranks. Collective."""
    if how.op is not Op.SUM or how.factor is not None:
        raise CommError(
            f"a reduction of sparse tensors must be a sum or an average, got {how.op.value}; "
            f"call to_dense() first"
        )
    mine = tensor.detach().coalesce()
    indices, values = comm.all_gather(mine.indices()), comm.all_gather(mine.values())
    whole = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    )
    total = whole.coalesce()
    if (scale := how.scale(tensor.dtype, comm.size)) is not None:
        total = total * scale
    with torch.no_grad():
        tensor.copy_(total)


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
