"""Gradients of 32 and 64 bits that travel as 16, and Horovod's names of compressors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.work import FINISHED, Work
from hpctrain.compress.codec import Codec
from hpctrain.compress.compressor import Compressor, TensorByTensor
from hpctrain.compress.identity import Identity


class NoCompression:
    """The compressor that changes nothing."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG002 - Horovod's
        """Return the tensor itself."""
        return tensor


class Half:
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


class HalfCodec:
    """The codec that sends buckets of 32 and 64 bits as 16.

    What arrives is summed in float32 and rounded once, as ``comm`` does with 16 bits. A sum that
    crosses nodes is rounded once per level.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Take ``torch.float16`` or ``torch.bfloat16``."""
        self._dtype = dtype
        self._half_of: dict[int, Bucket] = {}

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:  # noqa: ARG002
        """Make the bucket that travels."""
        dtype = bucket.flat.dtype
        if dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize:
            self._half_of[id(bucket)] = comm.new_bucket(bucket.numel, self._dtype)

    def forget(self) -> None:
        """Drop all buckets."""
        self._half_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the bucket that travels in its place."""
        return self._half_of.get(id(bucket), bucket).flat.nbytes

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Round, sum, and take back; buckets of other dtypes are summed where they lie."""
        half = self._half_of.get(id(bucket))
        if half is None:
            return comm.allreduce_(bucket, scale=scale)
        half.flat.copy_(bucket.flat)
        comm.allreduce_(half, scale=scale).wait()
        bucket.flat.copy_(half.flat)
        return FINISHED


def codec_for(compressor: Compressor) -> Codec:
    """Return a codec that sends buckets as ``compressor`` sends tensors.

    Args:
        compressor: one of ``Compression``, or anything with its two functions; a class too, as in
            Horovod.
    """
    if isinstance(compressor, NoCompression):
        return Identity()
    if isinstance(compressor, Half):
        return HalfCodec(compressor.dtype)
    return TensorByTensor(compressor)
