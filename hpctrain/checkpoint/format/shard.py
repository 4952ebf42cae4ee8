"""Parts of tensors that ranks hold, as used by saving, loading and resharding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from torch import Tensor

from hpctrain.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of ``shape`` elements at ``offset`` in a tensor of shape ``global_shape``."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("global_shape", "offset", "shape"):
            object.__setattr__(self, name, tuple(int(size) for size in getattr(self, name)))
        dims = len(self.global_shape)
        if not dims == len(self.offset) == len(self.shape) or not all(
            start >= 0 and size >= 0 and start + size <= whole
            for whole, start, size in zip(self.global_shape, self.offset, self.shape, strict=True)
        ):
            raise CheckpointError(
                f"a shard must be inside its tensor and have as many dimensions, got a shard of "
                f"shape {list(self.shape)} at {list(self.offset)} of a tensor of shape "
                f"{list(self.global_shape)}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Shard":
        """Return the shard that contains the whole tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: "Shard") -> "Shard | None":
        """Return the intersection of two shards of a tensor; None if it is empty.

        Raises:
            CheckpointError: the shards belong to tensors of different shapes.
        """
        if self.global_shape != other.global_shape:
            raise CheckpointError(
                f"shards of one tensor must have the same global shape, got "
                f"{list(self.global_shape)} and {list(other.global_shape)}; convert the "
                f"checkpoint, or change the model"
            )
        starts = tuple(map(max, self.offset, other.offset))
        stops = map(min, self.stop, other.stop)
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        if any(size <= 0 for size in shape):
            return None
        return Shard(self.global_shape, starts, shape)

    def relative_to(self, other: "Shard") -> "Shard":
        """Return the same elements as a shard of ``other``, which contains them."""
        places = (a - b for a, b in zip(self.offset, other.offset, strict=True))
        return Shard(other.shape, tuple(places), self.shape)

    def slices(self, part: "Shard") -> tuple[slice, ...]:
        """Return the slices that select ``part`` in a tensor with the shape of this shard."""
        return tuple(
            slice(start - origin, start - origin + size)
            for start, origin, size in zip(part.offset, self.offset, part.shape, strict=True)
        )

    def span(self, part: "Shard") -> tuple[int, int]:
        """Return the smallest range of row-major indices of this shard that contains ``part``."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        starts = [start - origin for start, origin in zip(part.offset, self.offset, strict=True)]
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        last = sum((size - 1) * stride for size, stride in zip(part.shape, strides, strict=True))
        return (first, first + last + 1) if part.numel else (first, first)

    @property
    def stop(self) -> tuple[int, ...]:
        """End of the shard in every dimension: ``offset + shape``."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of a sharded tensor on this rank; ``tensor`` has the shape of ``shard``."""

    tensor: Tensor
    shard: Shard

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.shard.shape:
            raise CheckpointError(
                f"the tensor of a TensorPiece must have the shape of the shard, "
                f"{list(self.shard.shape)}, got {list(self.tensor.shape)}"
            )


def fault_of_cover(shape: Sequence[int], shards: Sequence[Shard]) -> str | None:
    """Return None if the shards cover each element of a tensor once, otherwise the fault."""
    held = sum(shard.numel for shard in shards)
    total = math.prod(shape)
    if held != total:
        return f"the parts hold {held} of {total} elements"
    filled = [shard for shard in shards if shard.numel]
    dims = [
        dim for dim, size in enumerate(shape) if any(shard.shape[dim] != size for shard in filled)
    ]
    # Boxes cover the tensor once if and only if their corners cancel, except those of the tensor.
    if 1 << len(dims) <= len(filled) and _corners(filled, dims) == _corners(
        [Shard.whole(shape)], dims
    ):
        return None
    return _overlap(filled)


def _corners(shards: Sequence[Shard], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return the sum of the signs of all boxes at each corner, without zeros.

    The sign of a corner is -1 if it is at the end of the box in an odd number of ``dims``, and 1
    otherwise. These are the mixed differences of the sum of the indicator functions.
    """
    found: dict[tuple[int, ...], int] = {}
    for shard in shards:
        stop = shard.stop
        for ends in product(*(((shard.offset[dim], 1), (stop[dim], -1)) for dim in dims)):
            corner = tuple(place for place, _ in ends)
            found[corner] = found.get(corner, 0) + math.prod(sign for _, sign in ends)
    return {corner: count for corner, count in found.items() if count}


def _overlap(shards: Sequence[Shard]) -> str | None:
    """Return the first two shards that overlap, as a text; None without overlap. Quadratic."""
    starts = np.array([shard.offset for shard in shards])
    stops = starts + np.array([shard.shape for shard in shards])
    for number in range(1, len(shards)):
        meets = (starts[:number] < stops[number]) & (starts[number] < stops[:number])
        if other := np.flatnonzero(meets.all(axis=1)).tolist():
            return f"the parts at {shards[other[0]].offset} and {shards[number].offset} overlap"
    return None
