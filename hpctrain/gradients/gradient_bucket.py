"""Bucket of gradients, with a slot and a presence mark for each gradient."""

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.comm.bucket import BucketPlan
from hpctrain.comm.bucket_storage import ReduceBackend, new_storage
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_bucket import TensorBucket
from hpctrain.core.torch_compat import foreach_copy_, version_of
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.sparse_gradients import GradientState, as_sparse


class Slot(GradientState):
    """Part of a bucket that stores the gradient of one parameter.

    ``.grad`` shares the memory of the slot but is a separate tensor: if the program replaces the
    ``data`` or storage of ``.grad``, the slot does not change.
    """

    def __init__(
        self, name: str, parameter: Parameter, bucket: int, view: Tensor, mark: Tensor
    ) -> None:
        super().__init__(name, parameter, None)
        self.bucket, self.view, self.mark = bucket, view, mark
        self.layout, self.is_filled = parameter.stride(), False
        self.version = 0  # version of ``.grad`` after the last reduction
        self._address = view.data_ptr()
        self._shown = _of_its_own(view)
        self._sparse_grad: Tensor | None = None

    def fits(self, parameter: Tensor) -> bool:
        """Return whether the parameter has the device, dtype, shape and strides of the slot."""
        return (
            self.view.dtype == parameter.dtype
            and self.view.shape == parameter.shape
            and self.layout == parameter.stride()
            and self.view.device == parameter.device
        )

    def fill(
        self,
        weight: float,
        *,
        keeps_result: bool,
        copies: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Copy the gradient times ``weight`` to the slot, and make ``.grad`` a view of the slot.

        The slot is filled with zeros if the gradient is missing or the weight is zero, since the
        mean over no samples is NaN.

        Args:
            weight: factor of the gradient.
            keeps_result: whether this rank contributes a gradient that was reduced before.
            copies: list to which the pair of slot and gradient is appended, so that the caller
                copies the gradient; None to copy immediately.
        """
        grad = self.parameter.grad
        self.is_filled = True
        self.is_present = grad is not None
        if grad is None:
            self.view.zero_()
            return
        if grad.is_sparse:
            self.sparse_dim = grad.sparse_dim()
        if weight == 0.0 or (not keeps_result and self.holds_result):
            self.view.zero_()
        elif not grad.is_sparse and self.holds(grad):
            if weight != 1.0:
                self.view.mul_(weight)
            return
        else:
            dense = grad.to_dense() if grad.is_sparse else grad.detach()
            if weight != 1.0:
                torch.mul(dense, weight, out=self.view)
            elif copies is None:
                self.view.copy_(dense)
            else:
                copies.append((self.view, dense))
        self.show()

    def settle(self) -> None:
        """Set ``.grad`` to the sum, also if only other ranks had a gradient."""
        if not self.is_present and self.mark.item() > 0:
            self.show()
        if self.sparse_dim is not None and self.parameter.grad is not None:
            self.parameter.grad = self._sparse_grad = as_sparse(self.view, self.sparse_dim)
        self.is_result = self.parameter.grad is not None
        self.version = version_of(self._shown)

    @property
    def is_written(self) -> bool:
        """Whether the program has changed the reduced gradient in place, such as by clipping."""
        changed = self.version != version_of(self._shown)
        return changed and self.holds_result and self.view.numel() > 0

    def adopt(self) -> None:
        """Copy the gradient, which is already equal on all ranks, to the slot."""
        grad = self.parameter.grad
        self.is_present = self.is_result = grad is not None
        if grad is None:
            return
        if grad.is_sparse:
            self.sparse_dim = grad.sparse_dim()
        if self.sparse_dim is None:
            self.view.copy_(grad.detach())
            self.show()
        else:
            self.parameter.grad = self._sparse_grad = as_sparse(grad, self.sparse_dim)

    def forget_result(self) -> None:
        """Set ``.grad`` to zeros: another rank contributes this sum to the next reduction."""
        grad = self.parameter.grad
        if grad is not None and grad.is_sparse:
            self.parameter.grad = None
        else:
            self.view.zero_()

    def holds(self, grad: Tensor) -> bool:
        """Return whether ``grad`` is stored in the slot."""
        if grad.is_sparse:
            return grad is self._sparse_grad
        return (
            (grad.data_ptr() == self._address or not grad.numel())
            and grad.stride() == self.view.stride()
            and grad.dtype == self.view.dtype
            and not (grad.is_conj() or grad.is_neg())
        )

    def show(self) -> None:
        """Make ``.grad`` a view of the slot."""
        if self._shown.data_ptr() != self._address:  # the program has replaced the storage
            self._shown = _of_its_own(self.view)
        self.parameter.grad = self._shown.detach()


def _of_its_own(view: Tensor) -> Tensor:
    """Return a tensor in the memory of ``view`` with a separate version counter.

    On the CPU the storage object is separate, too.
    """
    if not view.is_cpu:
        place = view.storage_offset(), view.shape, view.stride()
        return torch.empty_like(view[:0]).set_(view.untyped_storage(), *place)
    if not view.numel():
        return view.detach()
    flat = view.as_strided((view.numel(),), (1,))  # a slot has no gaps
    memory = flat.view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


class GradientBucket(TensorBucket):
    """Bucket with slots for gradients, and one mark per slot.

    A mark is 1 on a rank that has the gradient, else 0. The marks are summed with the gradients.

    The constructor allocates the bucket; it is collective.

    Args:
        comm: ranks that sum the bucket.
        parameters: all parameters with their names.
        plan: members of the bucket, all on one device, and their offsets.
        index: index of the bucket in its layout, from 0.
        backend: backend that sums the bucket; see ``new_storage``.
    """

    __slots__ = ("memory", "num_empty", "slots")

    def __init__(
        self,
        comm: Communicator,
        parameters: NamedParameters,
        plan: BucketPlan,
        index: int,
        *,
        backend: ReduceBackend,
    ) -> None:
        num_marks, members = len(plan.members), [parameters[member] for member in plan.members]
        tensors = [parameter for _, parameter in members]
        room = plan.numel - num_marks, num_marks, plan.dtype
        bucket, storage = new_storage(comm, tensors[0].device, *room, backend=backend)
        super().__init__(
            bucket,
            tensors,
            plan.offsets,
            num_marks=num_marks,
            storage=storage,
            keeps_strides=True,  # fused optimizers require gradients with the parameter's strides
        )
        self.slots = [
            Slot(name, parameter, index, place, mark)
            for (name, parameter), place, mark in zip(
                members, self.places, self.marks, strict=True
            )
        ]
        self.num_empty = len(self.slots)
        flat = self.flat
        self.memory = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        """First address of the bucket, and the address after its last byte."""

    def fill_at_once(self, weight: float, *, keeps_result: bool) -> None:
        """Fill all slots; on an accelerator by one call of torch."""
        if self.storage.makers is not None:
            made = (slot.parameter.grad for slot in self.slots)
            self.storage.makers.join([g for g in made if g is not None and not g.is_sparse])
        copies: list[tuple[Tensor, Tensor]] = []
        for slot in self.slots:
            slot.fill(weight, keeps_result=keeps_result, copies=copies)
        if copies:
            places, gradients = map(list, zip(*copies, strict=True))
            foreach_copy_(places, gradients)

    def write_marks(self) -> None:
        """Set the mark of each slot to 1 if this rank has the gradient, else to 0."""
        self.marks.fill_(1)
        for slot in self.slots:
            if not slot.is_present:
                slot.mark.zero_()
