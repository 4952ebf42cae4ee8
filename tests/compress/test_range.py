"""Check that finite gradients of any size stay finite and close to float64.

The values are extreme for all dtypes: subnormal, at the ends of the range, single, equal, of both
signs and mixed.
"""

import math

import pytest
import torch

import hpctrain
from hpctrain.compress.by_name import codec_for
from hpctrain.compress.int8 import Int8
from hpctrain.compress.largest import DeepGradientCompression, TopK
from hpctrain.compress.power_sgd import PowerSGD
from hpctrain.compress.qsgd import QSGD
from hpctrain.compress.sign import OneBit, SignSGD
from tests.compress.nodes import Gradients, nodes

SHAPES = ((20, 30), (7,), (16, 16, 3), (8, 90), (1, 1))
SIZES = (1e-45, 1e-40, 1e-30, 6e-8, 6e4, 1e19, 1e37, 3.4e38)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = 2.0**-149


def patterns(rank, dtype, room=1.0):
    """Yield tensors of different patterns, in each size that fits into the dtype."""
    generator = torch.Generator().manual_seed(rank)
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps

    def signs(shape):
        return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0

    def alone(shape, size):
        values = torch.zeros(shape, dtype=torch.float64)
        values.view(-1)[-1] = size
        return values

    def mixed(shape, size):
        part = torch.rand(shape, generator=generator, dtype=torch.float64)
        return signs(shape) * size * (least / size) ** part

    for size in (size for size in SIZES if least <= size <= limits.max * room):
        made = (
            mixed(SHAPES[0], size),
            alone(SHAPES[1], size),
            torch.full(SHAPES[2], size, dtype=torch.float64),
            signs(SHAPES[3]) * size,
            alone(SHAPES[4], size),
        )
        yield [values.to(dtype) for values in made]


def begin_with(gradients, codec):
    """Let another codec, which has no state, reduce the same bucket first."""
    gradients.codec = codec_for(codec)
    parts = [*gradients.tensors, gradients.marks]
    gradients.codec.prepare(gradients.bucket, parts, gradients.comm)


def reduced(gradients, values):
    """Return the codec's mean over all ranks, and the mean in float64."""
    comm = gradients.comm
    got = gradients.reduce(values, scale=1.0 / comm.size)
    of_ranks = zip(*comm.allgather_object(values), strict=True)
    exact = [sum(value.double() for value in each) / comm.size for each in of_ranks]
    return [tensor.double() for tensor in got], exact


ONE_STEP = {
    # Relative to the largest value: the tolerance of the codec, with one rounding per rank and one
    # of the sum; and the part of the range in which sums of all ranks fit.
    "none": (codec_for("none"), 1e-6, 0.3),
    "bf16": (codec_for("bf16"), 2**-7, 0.3),
    "int8": (Int8(64), 2 / 255, 1.0),
    "int8 of odd blocks": (Int8(7), 2 / 255, 1.0),
    "int8 with feedback": (Int8(64, error_feedback=True), 2 / 255, 1.0),
    "qsgd": (QSGD(16, 64), 8 / 16, 0.3),
    "top k": (TopK(1.0), 1e-6, 1.0),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_is_close_to_the_mean_in_float64(name, dtype):
    codec, part, room = ONE_STEP[name]
    with nodes(1) as comm:
        gradients = Gradients(codec_for(codec), comm, SHAPES, dtype)
        for values in patterns(comm.rank, dtype, room):
            begin_with(gradients, codec)
            got, exact = reduced(gradients, values)
            limits = torch.finfo(dtype)
            # A step of int8, and half a step in bfloat16, may have only a few subnormal bits.
            rounded = 300 * TINY + 3 * limits.smallest_normal * limits.eps + 2.0**-132
            bound = (part + 2 * limits.eps) * max(
                float(value.double().abs().max()) for value in values
            ) + rounded
            for one, other in zip(got, exact, strict=True):
                assert one.isfinite().all(), values[0].view(-1)[:4]
                assert float((one - other).abs().max()) <= bound, values[0].view(-1)[:4]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "codec",
    [Int8(64, error_feedback=True), OneBit(), TopK(0.1), PowerSGD(), DeepGradientCompression(0.1)],
    ids=lambda codec: type(codec).__name__,
)
def test_stored_values_are_finite(codec):
    """At most a hundredth of the range: unsent values accumulate."""
    with nodes(1) as comm:
        gradients = Gradients(codec_for(codec), comm, SHAPES, torch.float32)
        for values in patterns(comm.rank, torch.float32, 0.03):
            begin_with(gradients, codec)
            for _ in range(3):
                got, _ = reduced(gradients, values)
                assert all(tensor.isfinite().all() for tensor in got), values[0].view(-1)[:4]
                for kept in gradients.codec.state_dict().values():
                    assert all(memory.isfinite().all() for memory in kept["memory"].values())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_are_those_of_the_majority(dtype):
    with nodes(1) as comm:
        gradients = Gradients(SignSGD(), comm, SHAPES, dtype)
        for values in patterns(comm.rank, dtype):
            got = gradients.reduce(values, scale=1.0 / comm.size)
            scaled = [(value.double() / comm.size).to(dtype) for value in values]
            votes = comm.allgather_object([(value >= 0) * 2 - 1 for value in scaled])
            for one, of_ranks in zip(got, zip(*votes, strict=True), strict=True):
                assert torch.equal(one.double(), (sum(of_ranks) >= 0) * 2.0 - 1.0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20, 1e37, 1e38])
def test_power_sgd_finds_a_product_of_any_size(size):
    left, right = torch.linspace(1, 2, 20)[:, None], torch.linspace(-1, 1, 30)[None]
    with nodes(1) as comm:
        gradients = Gradients(PowerSGD(2), comm, SHAPES, torch.float32)
        values = [torch.zeros(shape) for shape in SHAPES]
        values[0] = left * right * size
        for _ in range(3):
            got, exact = reduced(gradients, values)
            assert float((got[0] - exact[0]).abs().max()) <= 1e-4 * size


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_any_size_are_clipped_before_momentum(size):
    with nodes(1) as comm:
        codec = DeepGradientCompression(1.0, momentum=0.0, clip_norm=0.5)
        gradients = Gradients(codec, comm, SHAPES, torch.float32)
        values = [torch.full(shape, size) for shape in SHAPES]
        got, _ = reduced(gradients, values)
        scaled = torch.tensor(size / comm.size, dtype=torch.float32).double()
        norm = float(scaled) * math.sqrt(20 * 30 + 16 * 16 * 3 + 8 * 90 + 1)
        factor = min(1.0, 0.5 / math.sqrt(comm.size) / (norm + 1e-6))
        expected = comm.size * float(scaled) * factor
        assert torch.allclose(got[0], torch.full_like(got[0], expected), rtol=1e-3, atol=8 * TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_qsgd_is_unbiased_at_any_size(size, dtype):
    codec, generator = QSGD(4, 64), torch.Generator().manual_seed(1)
    values = (torch.linspace(-1, 1, 256, dtype=torch.float64) * size).to(dtype)
    norms = values.double().view(4, 64).norm(dim=1).clamp(max=torch.finfo(dtype).max)
    mean = torch.zeros(256, dtype=torch.float64)
    for _ in range(400):
        restored = codec.restored(*codec.quantized(values, generator)).double()
        assert ((restored.view(4, 64) - values.view(4, 64)).abs() <= norms[:, None] / 4).all()
        mean += restored.view(-1) / 400
    bound = 5 * norms.repeat_interleave(64) / 4 / 2 / math.sqrt(400) + 4 * TINY
    assert ((mean - values).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.ranks(2)
def test_one_bit_sends_the_means_of_rows_of_any_size(size):
    generator = torch.Generator().manual_seed(1)
    values = [(torch.rand(shape, generator=generator) * 2 - 1) * size for shape in SHAPES]
    with nodes(1) as comm:
        gradients = Gradients(OneBit(), comm, ((16, 48),), torch.float32)
        [got], [exact] = reduced(gradients, [values[2].view(16, 48)])
    is_high = exact >= 0
    for row, high, out in zip(exact, is_high, got, strict=True):
        expected = torch.where(high, row[high].mean(), row[~high].mean())
        assert torch.allclose(out, expected, rtol=1e-4, atol=4 * TINY)


@pytest.mark.ranks(2)
def test_an_optimizer_with_qsgd_takes_gradients_of_1e19():
    hpctrain.init(ranks_per_node=1)
    weights = torch.nn.Parameter(torch.zeros(512))
    optimizer = hpctrain.DistributedOptimizer(
        torch.optim.SGD([weights], lr=0.0), compression="qsgd"
    )
    mean = torch.zeros(512)
    for _ in range(20):
        optimizer.zero_grad()
        (weights * 1e19).sum().backward()
        mean += weights.grad / 20
        optimizer.step()
    hpctrain.shutdown()
    # On each node a gradient is 0 or 1.4e19.
    assert float(mean.mean()) == pytest.approx(1e19, rel=0.05)
