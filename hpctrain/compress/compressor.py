"""Horovod's form of compression: a tensor before it is sent, and after it was summed."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import FINISHED, Communicator, Work
from hpctrain.compress.codec import Stateless


class Compressor(Protocol):
    """Makes another tensor of each one, which travels and is summed in its place."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what ``decompress`` needs to know."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the sum of what has travelled, in the form of the original tensors."""


class TensorByTensor(Stateless):
    """The codec for a compressor of somebody else: every tensor of a bucket is sent by itself."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._parts_of: dict[int, Sequence[Tensor]] = {}

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:  # noqa: ARG002
        """Keep the parts."""
        self._parts_of[id(bucket)] = parts

    def forget(self) -> None:
        """Drop all parts."""
        self._parts_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of what the compressor makes of each tensor."""
        return sum(
            self._compressor.compress(part)[0].nbytes for part in self._parts_of[id(bucket)]
        )

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum what the compressor makes of each tensor; the marks travel as they are."""
        *tensors, marks = self._parts_of[id(bucket)]
        for tensor in tensors:
            compressed, ctx = self._compressor.compress(tensor)
            comm.allreduce_(compressed, scale=scale).wait()
            tensor.copy_(self._compressor.decompress(compressed, ctx))
        comm.allreduce_(marks, scale=scale).wait()
        return FINISHED
