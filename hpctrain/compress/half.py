"""Gradients of 32 and 64 bits that travel as 16, and Horovod's names of compressors."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, Compressor


class NoCompression(Compressor):
    """The compressor that changes nothing."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor itself."""
        return tensor, None

    @override
    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
        """Return the tensor itself."""
        return tensor


class Half(Compressor):
    """The compressor that rounds floating point tensors to 16 bits, and leaves all others."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Take ``torch.float16`` or ``torch.bfloat16``."""
        self.dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor in 16 bits, and its own dtype."""
        rounded = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return rounded, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return a tensor of ``compress`` in the dtype that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """How tensors travel, with Horovod's names."""

    none = NoCompression()
    """As they are."""
    fp16 = Half(torch.float16)
    """In float16: 11 bits of precision, and values above 65504 become infinite; gradients may
    need a ``gradient_predivide_factor``."""
    bf16 = Half(torch.bfloat16)
    """In bfloat16: 8 bits of precision, the range of float32."""


class HalfCodec(Codec):
    """The codec that sends buckets of 32 and 64 bits as 16.

    A node sums in full precision, and only what crosses its rail is rounded: the slice before it
    leaves, times the factor of the result, and whenever two are combined on the way. Without
    node memory each rank rounds what it has; the sum is formed in float32 and rounded once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Take ``torch.float16`` or ``torch.bfloat16``."""
        self._dtype = dtype
        self._half_of: dict[int, Tensor] = {}

    @override
    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Allocate the 16-bit copy of this rank's part, if the bucket crosses a rail."""
        dtype = bucket.flat.dtype
        is_longer = dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize
        if is_longer and comm.num_rails:
            part = torch.empty_like(comm.part_of(bucket), dtype=self._dtype)
            self._half_of[id(bucket)] = part

    def forget(self) -> None:
        """Drop all buckets."""
        self._half_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the bucket in the dtype in which it travels."""
        dtype = self._dtype if id(bucket) in self._half_of else bucket.flat.dtype
        return bucket.numel * dtype.itemsize

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Round, sum, and take back; what crosses no rail, or is short, is summed as it is."""
        half = self._half_of.get(id(bucket))
        if half is None:
            return comm.allreduce_(bucket, scale=scale)
        return start_on(comm, self._step, bucket, half, comm, scale)

    def _step(self, bucket: Bucket, half: Tensor, comm: Communicator, scale: float | None) -> None:
        # The sum of a node may exceed the range of 16 bits where the average does not. Without
        # node memory nothing is summed before the rounding.
        early, late = (None, scale) if comm.node is None else (scale, None)
        part = comm.reduce_node(bucket, scale=early)
        if comm.internode is not None:
            start = time.perf_counter()
            half.copy_(part)
            comm.internode.allreduce_(half, scale=late).wait()
            part.copy_(half)
            self.rail_s += time.perf_counter() - start
        comm.publish(bucket)
