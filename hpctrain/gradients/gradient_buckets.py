"""Slots of gradients: one per parameter, in buckets that travel as one message."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import Bucket, BucketPlan, TensorSpec, plan_buckets
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.sparse_gradients import GradientState, as_sparse


class Slot(GradientState):
    """The place of one parameter's gradient in its bucket.

    A program sees the place as ``.grad``, by a tensor that shares its memory and nothing else:
    what is done to that tensor's ``data`` or storage leaves the place as it is.
    """

    __slots__ = (
        "_address",
        "_shown",
        "_sparse_grad",
        "bucket",
        "is_filled",
        "layout",
        "mark",
        "view",
    )

    def __init__(
        self, name: str, parameter: Parameter, bucket: int, view: Tensor, mark: Tensor
    ) -> None:
        super().__init__(name, parameter, None)
        self.bucket = bucket
        self.layout = parameter.stride()
        self.view = view
        self.mark = mark
        self.is_filled = False
        self._address = view.data_ptr()
        self._shown = _of_its_own(view)
        self._sparse_grad: Tensor | None = None

    @property
    def found_sparse_dim(self) -> int | None:
        """Sparse dimensions of the gradient as far as this rank knows; None if it is dense."""
        grad = self.parameter.grad
        return grad.sparse_dim() if grad is not None and grad.is_sparse else self.sparse_dim

    def fits(self, parameter: Tensor) -> bool:
        """Say whether the parameter still has the dtype, shape and strides of its place."""
        return (
            self.view.dtype == parameter.dtype
            and self.view.shape == parameter.shape
            and self.layout == parameter.stride()
        )

    def fill(self, weight: float, *, keeps_result: bool) -> None:
        """Put the gradient, times ``weight``, into its place, and let ``.grad`` be that place.

        A parameter without a gradient adds zeros. A weight of zero adds zeros too, so that the
        NaN which a mean over no samples is stays out of the sum. What was reduced already is
        added where this rank ``keeps_result``; one rank of a sum does.
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
            if weight == 1.0:
                self.view.copy_(dense)
            else:
                torch.mul(dense, weight, out=self.view)
        self._show()

    def settle(self) -> None:
        """After the sum: give the parameter its gradient, also if only other ranks had one."""
        if not self.is_present and self.mark.item() > 0:
            self._show()
        if self.sparse_dim is not None and self.parameter.grad is not None:
            self.parameter.grad = self._sparse_grad = as_sparse(self.view, self.sparse_dim)
        self.is_result = self.parameter.grad is not None

    def adopt(self) -> None:
        """Take over what is the same on all ranks already, from another place."""
        grad = self.parameter.grad
        self.is_present = self.is_result = grad is not None
        if grad is None:
            return
        if grad.is_sparse:
            self.sparse_dim = grad.sparse_dim()
        if self.sparse_dim is None:
            self.view.copy_(grad.detach())
            self._show()
        else:
            self.parameter.grad = self._sparse_grad = as_sparse(grad, self.sparse_dim)

    def forget_result(self) -> None:
        """Let ``.grad`` be zeros: another rank keeps the sum that was there."""
        grad = self.parameter.grad
        if grad is not None and grad.is_sparse:
            self.parameter.grad = None
        else:
            self.view.zero_()

    def holds(self, grad: Tensor) -> bool:
        """Say whether a gradient of the parameter lies in its place, as it should."""
        if grad.is_sparse:
            return grad is self._sparse_grad
        return (
            (grad.data_ptr() == self._address or not grad.numel())
            and grad.stride() == self.view.stride()
            and grad.dtype == self.view.dtype
            and not (grad.is_conj() or grad.is_neg())
        )

    def _show(self) -> None:
        if self._shown.data_ptr() != self._address:  # a program has moved the storage
            self._shown = _of_its_own(self.view)
        self.parameter.grad = self._shown.detach()


def memory_of(flat: Tensor) -> tuple[int, int]:
    """Return the first address of a bucket, and the one behind it."""
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


def _of_its_own(view: Tensor) -> Tensor:
    """Return a tensor on the same memory, which has a storage of its own."""
    if not view.numel() or not view.is_cpu:
        return view.detach()
    flat = view.as_strided((view.numel(),), (1,))  # it has no gaps
    memory = flat.view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


class GradientBucket:
    """One message: its slots, and for each a mark that says whether any rank has a gradient."""

    __slots__ = ("bucket", "marks", "num_empty", "slots")

    def __init__(self, bucket: Bucket, slots: list[Slot], marks: Tensor) -> None:
        self.bucket = bucket
        self.slots = slots
        self.num_empty = len(slots)
        self.marks = marks

    @property
    def parts(self) -> list[Tensor]:
        """The places of its gradients, and the marks."""
        return [*(slot.view for slot in self.slots), self.marks]

    def write_marks(self) -> None:
        """Say which parameters have a gradient on this rank."""
        self.marks.fill_(1)
        for slot in self.slots:
            if not slot.is_present:
                slot.mark.zero_()


def require_same_parameters(
    comm: Communicator, parameters: NamedParameters, groups: Sequence[int | None]
) -> None:
    """Return if all ranks have the same parameters in the same groups. Collective.

    Groups are those of ``Grouping.numbers``. Else raise ``MismatchError``, on every rank.
    """
    lines = [f"{n} {tuple(p.shape)} {p.dtype} strides {p.stride()}" for n, p in parameters]
    if groups:
        lines = [f"{line} group {group}" for line, group in zip(lines, groups, strict=True)]
    require_equal(comm, lines, "parameters")


def build_buckets(
    comm: Communicator,
    parameters: NamedParameters,
    bucket_bytes: int | None,
    groups: Sequence[int | None] = (),
) -> list[GradientBucket]:
    """Lay the gradients out, last parameter first, and make the buckets. Collective.

    ``bucket_bytes`` is the largest bucket of those that were not grouped; None for one per dtype.
    Groups are those of ``Grouping.numbers``. Without memory enough all raise ``NodeMemoryError``.
    """
    ready_order = list(reversed(parameters))
    specs = [TensorSpec(name=n, numel=p.numel(), dtype=p.dtype) for n, p in ready_order]
    plans = plan_buckets(specs, bucket_bytes, marks_per_tensor=1, groups=list(reversed(groups)))
    return [_make_bucket(comm, ready_order, plan, i) for i, plan in enumerate(plans)]


def _make_bucket(
    comm: Communicator, parameters: NamedParameters, plan: BucketPlan, index: int
) -> GradientBucket:
    bucket = comm.new_bucket(plan.numel, plan.dtype)
    marks = bucket.flat[plan.numel - len(plan.members) :]
    slots = []
    for position, (member, offset) in enumerate(zip(plan.members, plan.offsets, strict=True)):
        name, parameter = parameters[member]
        place = bucket.flat[offset : offset + parameter.numel()]
        slots.append(Slot(name, parameter, index, _like(parameter, place), marks[position]))
    return GradientBucket(bucket, slots, marks)


def _like(parameter: Parameter, place: Tensor) -> Tensor:
    """View ``place`` with the parameter's strides, which fused optimizers want of gradients."""
    dense = torch.empty_like(parameter, device="meta")  # keeps strides that have no gaps
    return place.as_strided(parameter.shape, dense.stride())


Groups = int | Sequence[Sequence[Tensor]]
"""How many groups of about as many parameters each, or the groups; 0 for none."""


class Grouping:
    """Groups of parameters; each travels as one message for each dtype in it."""

    def __init__(self, groups: Groups | None) -> None:
        """Check the groups: ``ConfigError`` if it is no such thing, or has a parameter twice.

        Parameters of lists need not be trained; those in no list travel in ordinary buckets.
        """
        self._num_groups = 0
        self._group_of: dict[Tensor, int] = {}
        if groups is None:
            return
        if isinstance(groups, int):
            if groups < 0:
                raise ConfigError(f"groups is a non-negative number or lists, got {groups}")
            self._num_groups = groups
        else:
            self._group_of = _numbered(groups)

    def numbers(self, parameters: Sequence[Parameter]) -> list[int | None]:
        """Return the group of each parameter, None for no group; empty without any groups.

        Where only a number of groups was given, all parameters are cut into so many parts.
        """
        if self._group_of:
            return [self._group_of.get(parameter) for parameter in parameters]
        if not self._num_groups:
            return []
        return [i * self._num_groups // len(parameters) for i in range(len(parameters))]


def _numbered(groups: object) -> dict[Tensor, int]:
    group_of: dict[Tensor, int] = {}
    for number, group in enumerate(_iterated(groups)):
        for parameter in _iterated(group):
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"groups consist of parameters, got {type(parameter).__name__} in group "
                    f"{number}; give lists of the tensors themselves"
                )
            if parameter in group_of:
                raise ConfigError(
                    f"a parameter is in one group, got one of shape {tuple(parameter.shape)} in "
                    f"groups {group_of[parameter]} and {number}; take it out of one"
                )
            group_of[parameter] = number
    return group_of


def _iterated(groups: object) -> list[Any]:
    if isinstance(groups, Tensor | str) or not isinstance(groups, Iterable):
        raise ConfigError(
            f"groups is a non-negative number or a list of lists of parameters, got "
            f"{type(groups).__name__}"
        )
    return list(groups)
