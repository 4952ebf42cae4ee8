"""Buffers into which tensors are packed, and which are summed over ranks as one message."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.ops import scale_
from hpctrain.core.torch_compat import foreach_copy_


class PackedTensors:
    """A flat buffer for several tensors, with a view for each tensor.

    Args:
        flat: the buffer, 1-D.
        tensors: the tensors to pack; only shapes and strides are used.
        offsets: index of the first element of each tensor; None for contiguous tensors.
        keeps_strides: whether views have the strides of the tensors, which must be dense.
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
        """Copy ``tensors`` of one dtype to a new buffer, which has ``dtype`` if given."""
        numel = sum(tensor.numel() for tensor in tensors)
        made = cls(tensors[0].new_empty(numel, dtype=dtype), tensors)
        made.pack(tensors)
        return made

    def pack(self, tensors: list[Tensor]) -> None:
        """Copy ``tensors`` to the buffer."""
        if self._are_joined:
            torch.cat(tensors, out=self.flat)  # twice as fast as foreach
        else:
            foreach_copy_(self.places, tensors)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the buffer to ``tensors``."""
        foreach_copy_(tensors, self.places)

    @property
    def offsets(self) -> list[int]:
        """Index of the first element of each tensor in the buffer."""
        start = self.flat.storage_offset()
        return [int(place.storage_offset() - start) for place in self.places]

    def places_in(self, flat: Tensor) -> list[Tensor]:
        """Return a view for each tensor in another buffer with the same number of elements."""
        start = flat.storage_offset()
        return [
            flat.as_strided(place.shape, place.stride(), start + offset)
            for place, offset in zip(self.places, self.offsets, strict=True)
        ]


def _strided_as(part: Tensor, tensor: Tensor) -> Tensor:
    dense = torch.empty_like(tensor, device="meta")  # keeps the strides of dense tensors
    return part.as_strided(tensor.shape, dense.stride())


class BucketStorage:
    """Storage of the elements of a bucket; ``TensorBucket`` adds the marks.

    Subclasses store elements on accelerators. This base class is for elements in host memory,
    which are part of the bucket.

    Args:
        flat: the elements, 1-D.
    """

    makers: Any = None
    """Records the streams that compute the elements; None on the host."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat  # where gradients are computed
        self.summed = flat  # the same elements, where they are summed

    def depart(self) -> None:
        """Permit the sum to start after all work queued on the caller's stream. Not collective."""

    def weigh(self, factor: float) -> None:
        """Multiply the elements of this rank by ``factor`` before the sum. Not collective."""
        scale_(self.summed, factor)

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:
        """Sum the elements over the ranks. Collective.

        Args:
            sum_on_host: sums elements in host memory and scales them.
            scale: factor of the sum for elements that are not summed on the host.
        """
        del scale  # applied by ``sum_on_host``
        sum_on_host()

    def arrive(self) -> None:
        """Make the caller's stream wait for the sum. Not collective."""


class TensorBucket(PackedTensors):
    """Packs tensors that are summed over the ranks as one message.

    Args:
        bucket: buffer on the host with the elements, if the host sums them, and then the marks.
        tensors: the tensors to pack, of one dtype and device.
        offsets: see ``PackedTensors``.
        num_marks: number of marks, see ``plan_buckets``.
        storage: the elements of the tensors; None if they are in ``bucket``.
        keeps_strides: see ``PackedTensors``.
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
        self.message: Bucket | Tensor = bucket  # summed by a communicator or codec
        self.storage = storage or BucketStorage(bucket.flat[:end])
        flat, summed = self.storage.flat, self.storage.summed
        super().__init__(flat, tensors, offsets, keeps_strides=keeps_strides)
        self.parts = self.places if summed is flat else self.places_in(summed)
        """View of each tensor where it is summed."""

    def send(
        self, reduce: Callable[[Any], object], *, factor: float = 1.0, scale: float | None = None
    ) -> None:
        """Replace the elements, times ``factor``, by their sum over the ranks. Collective.

        Args:
            reduce: sums and scales the message on the host, by a codec or a communicator.
            factor: factor of this rank's elements.
            scale: factor of the sum, for storage that sums its own elements.
        """
        if factor != 1.0:
            self.storage.weigh(factor)
        self.storage.reduce(lambda: reduce(self.message), scale)
