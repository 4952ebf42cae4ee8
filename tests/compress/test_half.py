"""Check 16-bit codecs: the rounded values, and the error of a sum."""

import pytest
import torch

from hpctrain.compress.by_name import codec_for
from hpctrain.compress.codec import Identity
from hpctrain.compress.half import Compression, HalfCodec
from hpctrain.core.config import Settings
from tests.comm.conftest import connected

HALVES = pytest.mark.parametrize(
    "half", [Compression.fp16, Compression.bf16], ids=["fp16", "bf16"]
)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


@pytest.fixture(params=[None, 2], ids=["one node", "nodes of two"])
def comm(request):
    """Connect all ranks."""
    with connected(Settings(probe="off", ranks_per_node=request.param)) as made:
        yield made.comm


@HALVES
def test_floats_are_rounded_and_returned_in_their_dtype_and_other_values_are_unchanged(half):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.tensor([1.0, -2.5, 0.0, 1 / 3], dtype=dtype)
        compressed, ctx = half.compress(tensor)
        back = half.decompress(compressed, ctx)
        assert (compressed.dtype, back.dtype) == (half.dtype, dtype)
        torch.testing.assert_close(back.double(), tensor.double(), rtol=2**-8, atol=0.0)
    whole = [(half, torch.tensor([0, 1, 1], dtype=dtype)) for dtype in INTEGERS]
    for how, tensor in [*whole, (Compression.none, torch.ones(3))]:
        compressed, ctx = how.compress(tensor)
        assert how.decompress(compressed, ctx) is compressed is tensor
    assert isinstance(codec_for(Compression.none), Identity)


@pytest.mark.ranks(1, 2, 3, 4)
@HALVES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_bucket_is_summed_to_the_precision_of_its_message(comm, half, dtype):
    numel, scale = 1000, 1.0 / comm.size
    of_ranks = [
        torch.linspace(-1, 1 + rank, numel, dtype=torch.float64) for rank in range(comm.size)
    ]
    exact = sum(of_ranks) * scale
    codec = codec_for(half)
    bucket = comm.new_bucket(numel, dtype)
    codec.prepare(bucket, [bucket.flat], comm)
    for _ in range(2):
        bucket.flat.copy_(of_ranks[comm.rank])
        codec.allreduce_(bucket, comm, scale=scale).wait()
        bits = 8 if half is Compression.bf16 and dtype.itemsize > 2 else 11
        # Rounded when sent and when summed, once on each level.
        torch.testing.assert_close(
            bucket.flat.double(), exact, rtol=0.0, atol=3 * comm.size * 2**-bits
        )
        everywhere = comm.all_gather(bucket.flat)
        assert all(torch.equal(other, bucket.flat) for other in everywhere)
    codec.forget()


@pytest.mark.ranks(2, 3, 4)
def test_sums_of_16_bits_are_formed_in_float32(comm):
    bucket = comm.new_bucket(1, torch.float32)
    codec = HalfCodec(torch.float16)
    codec.prepare(bucket, [bucket.flat], comm)
    bucket.flat.fill_(60000.0)
    codec.allreduce_(bucket, comm, scale=1.0 / comm.size).wait()
    assert bucket.flat.item() == 60000.0  # the sum itself exceeds float16


@pytest.mark.ranks(2, 3, 4)
@HALVES
def test_a_node_sums_in_full_precision_and_only_its_slice_is_rounded(comm, half):
    small = 2.0**-13  # lost when added to 1 in both 16-bit dtypes, and exact alone
    bucket = comm.new_bucket(130, torch.float32)
    codec = codec_for(half)
    codec.prepare(bucket, [bucket.flat], comm)
    bucket.flat.fill_((1.0 + small, -1.0, 0.0, 0.0)[comm.rank])
    codec.allreduce_(bucket, comm, scale=0.5).wait()
    assert bucket.flat.tolist() == [small / 2] * 130
    if comm.num_rails:
        bucket.flat.fill_(1.0 + small)
        codec.allreduce_(bucket, comm, scale=1 / comm.size).wait()
        assert bucket.flat.tolist() == [1.0] * 130


@pytest.mark.ranks(2, 3)
def test_without_node_memory_each_rank_rounds_its_values():
    with connected(Settings(probe="off", shared_memory="off")) as made:
        comm, bucket = made.comm, made.comm.new_bucket(130, torch.float32)
        codec = HalfCodec(torch.bfloat16)
        codec.prepare(bucket, [bucket.flat], comm)
        bucket.flat.fill_((1.0 + 2.0**-13, -1.0, 0.0)[comm.rank])
        codec.allreduce_(bucket, comm, scale=None).wait()
        assert bucket.flat.tolist() == [0.0] * 130
        assert codec.num_bytes(bucket) == 260
