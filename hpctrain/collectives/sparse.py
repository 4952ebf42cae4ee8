"""``sparse_allreduce_async``, which sums sparse tensors by gathering their elements."""

import torch
from torch import Tensor

from hpctrain.collectives.operation import check_values, controller_of, named
from hpctrain.core.errors import ConfigError
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Request, Result
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a sum or average of sparse tensors over all ranks.

    Args:
        tensor: layout ``torch.sparse_coo``, of the same shape and dtype on every rank; the stored
            elements may differ.
        name: identifies the tensor on all ranks; None to match calls by order.
        op: ``Average``, of floating-point and complex tensors, or ``Sum``.
        process_set: the ranks that take part; None for all.

    Returns:
        A handle that returns the result when called: a sparse tensor with the elements of all
            ranks, concatenated and not coalesced.

    Raises:
        ConfigError: an argument is not valid; the process set is not registered, or this rank is
            not in it.
    """
    _check(tensor)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ConfigError(f"op of sparse tensors must be Average or Sum, got {op!r}")
    is_average = op is ReduceOp.AVERAGE
    if is_average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"sparse tensors must be floating point or complex to be averaged, got "
            f"{tensor.dtype}; use op=Sum, or convert the tensor"
        )
    controller = controller_of(process_set)
    tensor = tensor.detach()
    parts = (tensor._indices().t().contiguous(), tensor._values())  # noqa: SLF001 - not coalesced
    shape, divisor = tensor.shape, controller.comm.size if is_average else 1

    def take(result: Result) -> Tensor:
        indices, values = result
        return torch.sparse_coo_tensor(
            indices.t(),
            values if divisor == 1 else values / divisor,
            shape,
            is_coalesced=False,
            check_invariants=False,
        )

    return controller.submit(Request(Kind.ALLGATHER, named(Kind.ALLGATHER, name), parts), take)


def _check(tensor: object) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ConfigError(
            f"sparse_allreduce_async must get tensors of layout torch.sparse_coo, got {what}; use "
            f"allreduce for dense tensors"
        )
    check_values(tensor)
