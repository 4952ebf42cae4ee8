"""``TensorBucket``: tensors that are packed into one message, summed over ranks, and unpacked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.ops import scale_
from hpctrain.core.torch_compat import foreach_copy_


class PackedTensors:
    """Tensors in one flat buffer, each in a place of its shape.

    Args:
        flat: the buffer, 1-D.
        tensors: what is packed; shapes and strides alone are used.
        offsets: the element at which each tensor begins; None for one behind the other.
        keeps_strides: whether places have the strides of the tensors, which have no gaps.
    """

    __slots__ = ("_are_joined", "flat", "places")

    def __init__(
        self,
        flat: Tensor,
        tensors: Sequence[Tensor],
        offsets: Sequence[int] | None = None,
        *,
        keeps_strides: bool = False,
    ) -> None:
        numels = [tensor.numel() for tensor in tensors]
        parts: Sequence[Tensor] = (
            flat.split(numels)
            if offsets is None
            else [flat[at : at + n] for at, n in zip(offsets, numels, strict=True)]
        )
        self.flat = flat
        self._are_joined = offsets is None and all(tensor.dim() == 1 for tensor in tensors)
        if not self._are_joined:
            pairs = zip(parts, tensors, strict=True)
            form = _strided_as if keeps_strides else Tensor.view_as
            parts = [form(part, tensor) for part, tensor in pairs]
        self.places = [*parts]

    @classmethod
    def copied(cls, tensors: list[Tensor], dtype: torch.dtype | None = None) -> "PackedTensors":
        """Copy tensors of one dtype into a new buffer, which may have another one."""
        numel = sum(tensor.numel() for tensor in tensors)
        made = cls(tensors[0].new_empty(numel, dtype=dtype), tensors)
        made.pack(tensors)
        return made

    def pack(self, tensors: list[Tensor]) -> None:
        """Copy tensors into their places."""
        if self._are_joined:
            torch.cat(tensors, out=self.flat)  # in half the time
        else:
            foreach_copy_(self.places, tensors)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy what is in the places into tensors."""
        foreach_copy_(tensors, self.places)

    @property
    def offsets(self) -> list[int]:
        """The element at which each place begins."""
        start = self.flat.storage_offset()
        return [int(place.storage_offset() - start) for place in self.places]

    def places_in(self, flat: Tensor) -> list[Tensor]:
        """Return the same places of another buffer of as many elements."""
        start = flat.storage_offset()
        return [
            flat.as_strided(place.shape, place.stride(), start + offset)
            for place, offset in zip(self.places, self.offsets, strict=True)
        ]


def _strided_as(part: Tensor, tensor: Tensor) -> Tensor:
    dense = torch.empty_like(tensor, device="meta")  # keeps strides that have no gaps
    return part.as_strided(tensor.shape, dense.stride())


class BucketStorage:
    """The elements of a bucket without its marks, where they are made and where they are summed.

    What is defined here is right for elements of the host, which are in the bucket itself.
    """

    makers: Any = None
    """The streams that make the elements; None on the host."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat  # where tensors are made
        self.summed = flat  # the same elements where they are summed

    def depart(self) -> None:
        """Start, after all that the caller's stream has queued. Not collective."""

    def weigh(self, factor: float) -> None:
        """Multiply the elements of this rank that are about to be summed. Not collective."""
        scale_(self.summed, factor)

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:
        """Sum over the ranks, times ``scale``; the host sums its elements. Collective."""
        del scale  # the host has it
        sum_on_host()

    def arrive(self) -> None:
        """Let the caller's stream continue once the sum is there, and not before."""


class TensorBucket(PackedTensors):
    """One message of tensors: its memory, the places of the tensors, and its sum over the ranks.

    Args:
        bucket: memory of the host. Marks follow the elements that the host sums.
        tensors: what is packed, of one dtype and device.
        offsets: as for ``PackedTensors``, like ``keeps_strides``.
        num_marks: elements that each rank sends in addition to the tensors.
        storage: the elements of the tensors; None where these are in the bucket.
    """

    __slots__ = ("bucket", "marks", "message", "parts", "storage")

    def __init__(
        self,
        bucket: Bucket,
        tensors: Sequence[Tensor],
        offsets: Sequence[int] | None = None,
        *,
        num_marks: int = 0,
        storage: BucketStorage | None = None,
        keeps_strides: bool = False,
    ) -> None:
        self.bucket, end = bucket, bucket.numel - num_marks
        self.marks = bucket.flat[end:]
        self.message: Bucket | Tensor = bucket  # what a communicator or codec sums
        self.storage = storage or BucketStorage(bucket.flat[:end])
        flat, summed = self.storage.flat, self.storage.summed
        super().__init__(flat, tensors, offsets, keeps_strides=keeps_strides)
        self.parts = self.places if summed is flat else self.places_in(summed)
        """Where each tensor is summed."""

    def send(
        self, reduce: Callable[[Any], object], *, factor: float = 1.0, scale: float | None = None
    ) -> None:
        """Replace the elements, times ``factor``, by their sum over the ranks. Collective.

        ``reduce`` sums the message on the host, by a codec or a communicator; other storage sums
        its own elements, times ``scale``.
        """
        if factor != 1.0:
            self.storage.weigh(factor)
        self.storage.reduce(lambda: reduce(self.message), scale)
