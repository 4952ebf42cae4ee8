"""Compression of gradients to 16 bits, and compressors with Horovod's names."""

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
    """Compressor that returns tensors unchanged."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return ``tensor`` unchanged."""
        return tensor, None

    @override
    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
        """Return ``tensor`` unchanged."""
        return tensor


class Half(Compressor):
    """Compressor that rounds floating-point tensors to 16 bits; other tensors are unchanged.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor in 16 bits, and its original dtype."""
        rounded = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return rounded, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return a compressed tensor in its original dtype."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Compressors, with Horovod's names."""

    none = NoCompression()
    """No compression."""
    fp16 = Half(torch.float16)
    """float16: 11 bits of precision; values above 65504 become infinite, so gradients may need a
    ``gradient_predivide_factor``."""
    bf16 = Half(torch.bfloat16)
    """bfloat16: 8 bits of precision and the range of float32."""


class HalfCodec(Codec):
    """Codec that sends buckets of 32-bit and 64-bit values in 16 bits.

    Sums inside a node are exact. Only data sent between nodes are rounded: the sums of the nodes,
    after multiplication by ``scale``, and partial sums over nodes. Without node memory each rank
    rounds its values, and the sum is computed in float32 and rounded once.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._half_of: dict[int, Tensor] = {}

    @override
    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Allocate a 16-bit copy of this rank's slice, if the bucket is sent between nodes."""
        dtype = bucket.flat.dtype
        is_longer = dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize
        if is_longer and comm.num_rails:
            part = torch.empty_like(comm.part_of(bucket), dtype=self._dtype)
            self._half_of[id(bucket)] = part

    def forget(self) -> None:
        """Discard the copies of all buckets; see ``Codec``."""
        self._half_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the size of the bucket in the dtype that is sent, in bytes; see ``Codec``."""
        dtype = self._dtype if id(bucket) in self._half_of else bucket.flat.dtype
        return bucket.numel * dtype.itemsize

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum the bucket in 16 bits, if it has a 16-bit copy; see ``Codec``."""
        half = self._half_of.get(id(bucket))
        if half is None:
            return comm.allreduce_(bucket, scale=scale)
        return start_on(comm, self._step, bucket, half, comm, scale)

    def _step(self, bucket: Bucket, half: Tensor, comm: Communicator, scale: float | None) -> None:
        # The sum of a node may exceed the range of 16 bits although the average does not. Without
        # node memory there is no sum before the rounding.
        early, late = (None, scale) if comm.node is None else (scale, None)
        part = comm.reduce_node(bucket, scale=early)
        if comm.internode is not None:
            start = time.perf_counter()
            half.copy_(part)
            comm.internode.allreduce_(half, scale=late).wait()
            part.copy_(half)
            self.rail_s += time.perf_counter() - start
        comm.publish(bucket)
