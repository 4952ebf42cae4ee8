"""Reductions of torch.distributed, performed by a ``Communicator``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from hpctrain.comm.process_group.buckets_in_place import BucketsInPlace

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
        """Create the reduction for a ``ReduceOp``, its type, or options; a sum for None."""
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
