"""Reduce buckets of a few tensors with codecs on simulated nodes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.compress.codec import Codec
from hpctrain.core.config import Settings
from tests.comm.conftest import connected

SHAPES = ((40, 30), (7,), (64, 16, 3), (5,), (1, 1))
"""With rows that slices cut, tensors that end inside a cache line, and vectors."""


@contextmanager
def nodes(ranks_per_node: int | None, **settings: str) -> Iterator[Communicator]:
    """Connect all ranks as nodes of ``ranks_per_node`` ranks; None for one node."""
    with connected(Settings(probe="off", ranks_per_node=ranks_per_node, **settings)) as made:
        yield made.comm


class Gradients:
    """Hold a bucket of tensors, laid out as by an optimizer, for reductions by a codec."""

    def __init__(
        self,
        codec: Codec,
        comm: Communicator,
        shapes: Sequence[Sequence[int]] = SHAPES,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Lay out the bucket: tensors start at multiples of 64 bytes; the marks are at the end."""
        starts, numel = [], 0
        for shape in shapes:
            starts.append(numel)
            numel += -(-math.prod(shape) * dtype.itemsize // 64) * 64 // dtype.itemsize
        self.bucket = comm.new_bucket(numel + len(shapes), dtype)
        flat = self.bucket.flat
        self.tensors = [
            flat[start : start + math.prod(shape)].view(tuple(shape))
            for start, shape in zip(starts, shapes, strict=True)
        ]
        self.marks = flat[numel:]
        self.codec, self.comm = codec, comm
        codec.prepare(self.bucket, [*self.tensors, self.marks], comm)

    def reduce(
        self,
        values: Sequence[Tensor],
        scale: float | None = None,
        marks: Sequence[float] | None = None,
    ) -> list[Tensor]:
        """Reduce the values of all ranks; return copies of the result, equal on all ranks."""
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)
        self.marks.copy_(torch.tensor(marks or [1.0] * len(self.tensors)))
        self.codec.allreduce_(self.bucket, self.comm, scale=scale).wait()
        everywhere = self.comm.all_gather(self.bucket.flat)
        for other in everywhere:
            torch.testing.assert_close(other, everywhere[0], rtol=0.0, atol=0.0, equal_nan=True)
        return [tensor.clone() for tensor in self.tensors]


def drawn(
    rank: int,
    step: int = 0,
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return the gradients of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(tuple(s), generator=generator, dtype=torch.float64).to(dtype) for s in shapes
    ]


def of_all(comm: Communicator, make: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """Return the sums over all ranks of the tensors that ``make`` returns."""
    return [sum(parts) for parts in zip(*map(make, range(comm.size)), strict=True)]  # type: ignore[misc]
