"""Reduction of sparse gradients, by gathering the rows of all ranks."""

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op, combination
from hpctrain.core.torch_compat import version_of


class GradientState:
    """State of one parameter's gradient, dense or sparse."""

    __slots__ = (
        "fires",
        "is_present",
        "is_result",
        "name",
        "parameter",
        "sparse_dim",
    )

    def __init__(self, name: str, parameter: Parameter, sparse_dim: int | None) -> None:
        self.name = name
        self.parameter = parameter
        self.sparse_dim = sparse_dim
        """Number of sparse dimensions; None if the gradient is dense on all ranks."""
        self.fires = 0
        self.is_present = False
        self.is_result = False
        """Whether ``.grad`` is the result of a reduction, without a later backward."""

    @property
    def holds_result(self) -> bool:
        """Whether ``.grad`` is the result of a reduction, and was not replaced afterwards."""
        grad = self.parameter.grad
        return self.is_result and grad is not None and self.holds(grad)

    @property
    def is_touched(self) -> bool:
        """Whether the gradient was dropped, replaced or added after the last reduction."""
        if self.is_result:
            return not self.holds_result
        return self.parameter.grad is not None

    @property
    def found_sparse_dim(self) -> int | None:
        """Number of sparse dimensions of the gradient, now or in earlier steps; None if dense."""
        grad = self.parameter.grad
        return grad.sparse_dim() if grad is not None and grad.is_sparse else self.sparse_dim

    @property
    def has_values(self) -> bool:
        """Whether the gradient has a nonzero element."""
        grad = self.parameter.grad
        return grad is not None and bool(grad.any())

    def holds(self, grad: Tensor) -> bool:
        """Return whether ``grad`` is stored in the slot."""
        raise NotImplementedError


def writes_of(tensor: Tensor) -> tuple[int, int]:
    """Return version counter and address of a tensor; a write changes at least one of the two."""
    return version_of(tensor), 0 if tensor.is_sparse else tensor.data_ptr()


class SparseSlot(GradientState):
    """Sparse gradient of one parameter, usually the weight of an embedding.

    The gradient is sent after the buckets: first the indices, then the values. If the gradient of
    a rank is dense, its nonzero rows are sent.
    """

    __slots__ = ("_gradient", "_rows", "_total")

    sparse_dim: int  # the same on every rank

    def __init__(self, name: str, parameter: Parameter, sparse_dim: int) -> None:
        super().__init__(name, parameter, sparse_dim)
        self._gradient: Tensor | None = None
        self._rows: tuple[Tensor, Tensor] | None = None  # indices and values to send, on the host
        self._total: Tensor | None = None

    def holds(self, grad: Tensor) -> bool:
        """Return whether ``grad`` is the result of the last reduction."""
        return grad is self._gradient

    def forget_result(self) -> None:
        """Drop the gradient: another rank contributes this sum to the next reduction."""
        self.parameter.grad = None

    def fits(self, parameter: Tensor) -> bool:
        """Return whether ``parameter`` is the parameter of this slot, with any dtype or layout."""
        return parameter is self.parameter

    def adopt(self) -> None:
        """Store the gradient, which is already equal on all ranks, as the result."""
        grad = self.parameter.grad
        self.is_present = self.is_result = grad is not None
        self._gradient = None if grad is None else as_sparse(grad, self.sparse_dim)
        self.parameter.grad = self._gradient

    def depart(self, weight: float, *, keeps_result: bool) -> None:
        """Copy the gradient rows of this rank, times ``weight``, to the host.

        No rows are sent if the weight is zero, or if the gradient is an earlier result and
        ``keeps_result`` is False.
        """
        counts = weight != 0.0 and (keeps_result or not self.holds_result)
        indices, values = self._own(weight if counts else 0.0)
        self._rows, self._total = (indices.cpu(), values.cpu()), None
        self.is_result = False

    def reduce(self, comm: Communicator, rest: float, scale: float | None) -> None:
        """Gather and sum the gradient rows of all ranks. Collective.

        Args:
            comm: ranks to sum over.
            rest: factor of this rank's rows.
            scale: factor of the sum.
        """
        assert self._rows is not None
        indices, values = self._rows
        self._rows = None
        all_indices = comm.all_gather(indices)
        all_values = comm.all_gather(values if rest == 1.0 else values * rest)
        there = [rank for rank, found in enumerate(all_indices) if found.dim() == 2]
        if not there:
            return
        # A sum in 16 bits could overflow.
        wide = combination(values.dtype, Op.SUM).accumulate_dtype
        rows = torch.cat([all_values[rank] for rank in there])
        total = torch.sparse_coo_tensor(
            torch.cat([all_indices[rank] for rank in there], dim=1),
            rows if rows.is_complex() else rows.to(wide),
            self.parameter.shape,
            check_invariants=False,
        ).coalesce()
        if scale is not None:
            total.values().mul_(scale)
        self._total = total.to(values.dtype)

    def arrive(self) -> None:
        """Set ``.grad`` to the sum; if no rank has a gradient, ``.grad`` stays None."""
        if self._total is not None:
            self.parameter.grad = self._gradient = self._total.to(self.parameter.device)
            self._total, self.is_result = None, True

    def _own(self, weight: float) -> tuple[Tensor, Tensor]:
        """Return the indices and the values of this rank's rows.

        Indices have shape ``(sparse dimensions, rows)``; 1-D and empty without a gradient.
        """
        grad = self.parameter.grad
        self.is_present = grad is not None
        if grad is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=self.parameter.dtype)
        rows = as_sparse(grad.detach(), self.sparse_dim)
        if weight == 0.0:  # the mean over no samples is NaN
            return rows.indices()[:, :0], rows.values()[:0]
        return rows.indices(), rows.values() if weight == 1.0 else rows.values().mul(weight)


def as_sparse(gradient: Tensor, sparse_dim: int) -> Tensor:
    """Return a gradient as a coalesced tensor with ``sparse_dim`` sparse dimensions."""
    if gradient.is_sparse and gradient.sparse_dim() == sparse_dim:
        return gradient.coalesce()
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to_sparse(sparse_dim).coalesce()
