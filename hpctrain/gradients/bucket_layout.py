"""``BucketLayout``, which assigns each gradient a slot in a bucket, identically on all ranks."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import BucketPlan, TensorSpec, plan_buckets
from hpctrain.comm.bucket_storage import ReduceBackend, by_first_backend
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan
from hpctrain.compress.codec import Codec, Identity, settings_of
from hpctrain.core.errors import CommError
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot
from hpctrain.gradients.parameter_names import Grouping, NamedParameters
from hpctrain.gradients.sparse_gradients import SparseSlot


class SharedGradientError(CommError):
    """Error: the gradient of parameter ``name`` shares the memory of another gradient's slot."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"each gradient must have its own memory, but {self.name}.grad shares the memory of "
            f"another gradient, or has another order of elements than before; set "
            f"{self.name}.grad to a clone"
        )


class BucketLayout:
    """Assigns each gradient of a set of parameters to a slot in a bucket.

    ``build`` allocates the buckets. Sparse gradients have slots outside of buckets.

    Args:
        comm: ranks whose gradients are reduced.
        plan: provides the bucket size, and whether buckets are reduced during backward.
        codec: compression of the buckets.
        grouping: groups of parameters that are sent in one message.
    """

    def __init__(self, comm: Communicator, plan: Plan, codec: Codec, grouping: Grouping) -> None:
        self._comm, self._plan, self._codec, self.grouping = comm, plan, codec, grouping
        self.buckets: list[GradientBucket] = []
        self.dense: list[Slot] = []
        self.sparse: list[SparseSlot] = []
        self.slot_of: dict[Tensor, Slot | SparseSlot] = {}
        self.slot_by_id: dict[int, Slot | SparseSlot] = {}
        self.found_new_sparse = False  # whether ``is_new_sparse`` was True for a filled slot
        self._parameters: NamedParameters = ()
        self._dims: dict[Tensor, int] = {}  # number of sparse dimensions of sparse gradients

    @property
    def slots(self) -> Collection[Slot | SparseSlot]:
        """All slots; dense slots first."""
        return self.slot_of.values()

    def build(self, parameters: NamedParameters, results: Sequence[Tensor] = ()) -> None:
        """Allocate the buckets for ``parameters``, identically on every rank. Collective.

        Args:
            parameters: all parameters with their names.
            results: parameters whose gradients are already equal on all ranks. Parameters whose
                slot holds the result of a reduction are added automatically.

        Raises:
            MismatchError: ranks have different parameters or groups; raised on all ranks.
        """
        groups = self.grouping.numbers([p for _, p in parameters])
        lines = [f"{n} {tuple(p.shape)} {p.dtype} strides {p.stride()}" for n, p in parameters]
        if len(places := _device_numbers([p for _, p in parameters])) > 1:
            numbers = [places[p.device] for _, p in parameters]
            lines = [f"{line} device {n}" for line, n in zip(lines, numbers, strict=True)]
        if groups:
            pairs = zip(lines, groups, strict=True)
            lines = [f"{line} group {group}" for line, group in pairs]
        require_equal(
            self._comm, [f"compression {settings_of(self._codec)}", *lines], "parameters"
        )
        results = [*results, *(p for p, slot in self.slot_of.items() if slot.holds_result)]
        self._parameters = parameters
        self._lay_out()
        for parameter in results:
            if parameter in self.slot_of:
                self.slot_of[parameter].adopt()

    def fits(self, parameters: NamedParameters) -> bool:
        """Return whether the buckets match ``parameters``, also in dtype and layout."""
        slot_of = self.slot_of
        return len(parameters) == len(slot_of) and all(
            (slot := slot_of.get(p)) is not None and slot.fits(p) for _, p in parameters
        )

    def is_new_sparse(self, slot: Slot) -> bool:
        """Return whether the gradient of ``slot`` is sparse, but not yet recorded as sparse."""
        return slot.found_sparse_dim is not None and slot.parameter not in self._dims

    def learn_sparse(self) -> None:
        """Agree on the gradients that are sparse, and rebuild the buckets. Collective."""
        own = [self.slot_of[p].found_sparse_dim for _, p in self._parameters]
        self._dims = {}
        for dims in reversed(self._comm.allgather_object(own)):  # the lowest rank decides
            pairs = zip(self._parameters, dims, strict=True)
            self._dims |= {p: dim for (_, p), dim in pairs if dim is not None}
        self._lay_out()
        for slot in self.slots:
            slot.adopt()
        self.found_new_sparse = False

    def check_place(self, slot: Slot) -> None:
        """Raise ``SharedGradientError`` if a gradient shares the memory of another slot."""
        grad = slot.parameter.grad
        if grad is None or grad.is_sparse or slot.holds(grad):
            return
        address = grad.data_ptr()
        if any(first <= address < end for first, end in self._memory):
            raise SharedGradientError(slot.name)

    def _lay_out(self) -> None:
        """Allocate buckets for all dense gradients, last parameter first. Collective.

        Raises:
            NodeMemoryError: memory is not sufficient; raised on all ranks.
        """
        named = self._parameters
        numbers = self.grouping.numbers([p for _, p in named])
        apart = {} if self.grouping.sparse_as_dense else self._dims
        order = [i for i in reversed(range(len(named))) if named[i][1] not in apart]
        dense = [named[i] for i in order]
        places = _device_numbers([p for _, p in named])
        plans = plan_buckets(
            [
                TensorSpec(name=n, numel=p.numel(), dtype=p.dtype, device=places[p.device])
                for n, p in dense
            ],
            None if self._plan.overlap == "end" else self._plan.bucket_bytes,
            marks_per_tensor=1,
            groups=[numbers[i] for i in order] if numbers else (),
        )
        self.buckets = self._new_buckets(dense, plans)
        self.dense = [slot for bucket in self.buckets for slot in bucket.slots]
        self._memory = [bucket.memory for bucket in self.buckets]
        self.sparse = [SparseSlot(n, p, apart[p]) for n, p in named if p in apart]
        self.slot_of = {slot.parameter: slot for slot in self.dense}
        self.slot_of |= {slot.parameter: slot for slot in self.sparse}
        self.slot_by_id = {id(parameter): slot for parameter, slot in self.slot_of.items()}
        for slot in self.dense:
            slot.sparse_dim = self._dims.get(slot.parameter)
        self._codec.forget()
        for bucket in self.buckets:
            self._codec.prepare(bucket.bucket, [*bucket.parts, bucket.marks], self._comm)

    def _new_buckets(
        self, dense: NamedParameters, plans: Sequence[BucketPlan]
    ) -> list[GradientBucket]:
        """Allocate buckets, on accelerators if accelerators can compute the sums. Collective."""

        def make(backend: ReduceBackend) -> list[GradientBucket]:
            return [
                GradientBucket(self._comm, dense, plan, index, backend=backend)
                for index, plan in enumerate(plans)
            ]

        refusal = "" if dense else "there are no parameters"
        if not isinstance(self._codec, Identity):
            refusal = f"gradients are compressed by {type(self._codec).__name__}"
        return by_first_backend(self._comm, {p.device for _, p in dense}, make, refusal)


def _device_numbers(tensors: Sequence[Tensor]) -> dict[torch.device, int]:
    """Return the index of each device of ``tensors``, from 0, in order of first occurrence.

    Ranks compare these indices, since the indices of torch devices may differ between ranks.
    """
    return {device: n for n, device in enumerate(dict.fromkeys(t.device for t in tensors))}
