"""Check the laws that papers state for their codecs, with the predicted values."""

import numpy as np
import pytest
import torch

from hpctrain.comm.mpi_world import find_world
from hpctrain.compress.elias import LARGEST, Reader, codes_of, packed
from hpctrain.compress.int8 import Int8Blocks
from hpctrain.compress.largest import DeepGradientCompression, TopK, largest
from hpctrain.compress.power_sgd import PowerSGD
from hpctrain.compress.qsgd import QSGD
from hpctrain.compress.sign import OneBit, SignSGD
from tests.compress.nodes import Gradients, drawn, nodes, of_all

SHAPES = ((24, 32),)


# QSGD


def qsgd_draws(values, levels, draws=2000):
    """Return mean and mean squared error of rounded values, and the fraction of non-zeros."""
    codec, generator = QSGD(levels, len(values)), torch.Generator().manual_seed(1)
    mean, squared, nonzero = torch.zeros_like(values), 0.0, 0
    for _ in range(draws):
        norms, found = codec.quantized(values, generator)
        rounded = codec.restored(norms, found).view(-1)
        mean += rounded / draws
        squared += float((rounded - values).square().sum()) / draws
        nonzero += int(found.count_nonzero()) / draws
    return mean, squared, nonzero


@pytest.mark.parametrize(("levels", "bound"), [(1, 64.0), (4, 16.0), (64, 1.0)])
def test_qsgd_is_unbiased_with_the_variance_of_its_levels(levels, bound):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance, nonzero = qsgd_draws(values, levels, 500)
    square = float(values.square().sum())
    part = values.abs() * levels / square**0.5
    part -= part.floor()
    exact = float((part * (1 - part)).sum()) / levels**2
    assert variance / square == pytest.approx(exact, rel=0.02)
    assert variance / square < bound
    assert float((mean - values).norm()) / (variance / 500) ** 0.5 == pytest.approx(1.0, abs=0.1)
    if levels == 1:
        assert nonzero < 1 + 64


def test_qsgd_reaches_its_error_bound_if_all_values_are_equal():
    variance = qsgd_draws(torch.ones(4096, dtype=torch.float64), 1, 500)[1]
    assert variance / 4096 == pytest.approx(63.0, rel=0.02)


@pytest.mark.parametrize("numel", [256, 1024, 4096, 65536])
def test_qsgd_needs_under_2_8_bits_of_a_value(numel):
    codec = QSGD(round(numel**0.5), numel)
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    _, levels = codec.quantized(values, generator)
    assert (32 + codec.num_code_bits(levels)) / numel <= 2.8 + 32 / numel + 0.06


def test_elias_code_is_read_back_and_its_first_words_are_those_of_the_table():
    words = {1: "0", 2: "100", 3: "110", 4: "101000", 8: "1110000", 16: "10100100000"}
    numbers = np.array([*words, *range(1, 5000), 2**17 + 5, LARGEST])
    codes, lengths = codes_of(numbers)
    for number, word in words.items():
        place = int(np.flatnonzero(numbers == number)[0])
        assert f"{codes[place]:0{lengths[place]}b}" == word
    # One block each: the number as a gap, then one counted from the other end, as a level below.
    levels = numbers[::-1]
    level_codes, level_lengths = codes_of(levels)
    codes = np.stack([codes, level_codes | 1 << level_lengths], 1).ravel()
    lengths = np.stack([lengths, level_lengths + 1], 1).ravel()
    data, ends = packed(codes, lengths), np.cumsum(lengths)
    bits = "".join(f"{c:0{n}b}" for c, n in zip(codes, lengths, strict=True))
    assert data.tobytes() == int(bits + "0" * (-len(bits) % 8), 2).to_bytes(len(data), "big")
    reader = Reader(data, np.append(0, ends[1:-1:2]))
    gaps, found = reader.read(len(numbers))
    assert np.array_equal(gaps, numbers)
    assert np.array_equal(found, -levels)
    assert np.array_equal(reader.positions, ends[1::2])


@pytest.mark.ranks(2, 4)
def test_qsgd_draws_are_reproducible_and_differ_by_bucket_rail_rank_and_step():
    shape = ((64, 64),)
    value = [torch.full(shape[0], 0.3, dtype=torch.float64)]

    def rounded(comm, codec):
        buckets = [Gradients(codec, comm, shape) for _ in range(2)]
        return [bucket.reduce(value)[0] for _ in range(2) for bucket in buckets]

    for ranks_per_node in (1, 2) if find_world().size == 4 else (1,):
        with nodes(ranks_per_node) as comm:
            draws = rounded(comm, QSGD(1, 64))
            again = rounded(comm, QSGD(1, 64))
            assert all(map(torch.equal, draws, again))
            for number, one in enumerate(draws):
                assert not any(torch.equal(one, other) for other in draws[:number])
                assert one.unique().numel() > 2  # nodes round independently: some of them up
                assert not torch.equal(*one.chunk(2))  # slices of two rails


# PowerSGD


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("decay", "first"), [(0.8, 1.248), (0.5, 2.58)])
def test_power_sgd_with_warm_start_finds_the_best_product(decay, first):
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    values = decay ** torch.arange(40.0, dtype=torch.float64)
    matrix = left @ values.diag() @ right.T
    best = float(values[2:].norm())
    with nodes(1) as comm:
        errors = {}
        for warm in (True, False):
            codec = PowerSGD(2, warm_start=warm, error_feedback=False)
            gradients = Gradients(codec, comm, [(40, 40)])
            errors[warm] = [
                float((gradients.reduce([matrix / comm.size])[0] - matrix).norm()) / best
                for _ in range(20)
            ]
    assert errors[True][0] > 1.0
    assert errors[True][0] < 2 * first
    assert errors[True][-1] <= 1.001
    assert min(errors[False][1:]) > 1.02


@pytest.mark.ranks(2, 3, 4)
def test_power_sgd_of_nodes_is_that_of_their_mean_alone():
    """PowerSGD is linear: K nodes with an error each equal one node with the mean."""
    with nodes(1) as comm:
        apart = Gradients(PowerSGD(2), comm, SHAPES)
        alone = Gradients(PowerSGD(2), comm, SHAPES)
        for step in range(30):
            got = apart.reduce(drawn(comm.rank, step, SHAPES), 1 / comm.size)
            mean = [
                each / comm.size
                for each in of_all(comm, lambda rank, step=step: drawn(rank, step, SHAPES))
            ]
            expected = alone.reduce(mean, 1 / comm.size)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2, 3)
def test_power_sgd_leaves_vectors_alone_and_takes_zero_columns():
    shapes = ((24, 32), (32,), (4, 2))
    with nodes(1) as comm:
        gradients = Gradients(PowerSGD(2), comm, shapes)
        values = drawn(comm.rank, 0, shapes)
        values[0][:, 5] = 0.0
        got = gradients.reduce(values)
        whole = Gradients(PowerSGD(1000), comm, shapes).reduce(values)
        assert got[0].isfinite().all()
        for number in (1, 2):  # a vector, and a matrix that would not become smaller
            assert torch.equal(got[number], whole[number])
        zeros = Gradients(PowerSGD(2), comm, shapes)
        for _ in range(3):
            assert not any(t.any() for t in zeros.reduce([torch.zeros(s) for s in shapes]))
        assert zeros.reduce(values)[0].abs().sum() > 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "codec", [PowerSGD(24, min_gain=0.0), TopK(1.0)], ids=["full rank", "density one"]
)
def test_a_codec_that_omits_no_values_returns_the_sum(codec):
    with nodes(1) as comm:
        gradients = Gradients(codec, comm, SHAPES)
        for step in range(3):
            got = gradients.reduce(drawn(comm.rank, step, SHAPES))
            exact = of_all(comm, lambda rank, step=step: drawn(rank, step, SHAPES))
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


# Sparse


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("masks", [False, True])
def test_dgc_at_density_one_is_momentum_sgd_unless_it_masks(masks):
    """With masks the momentum of sent values is lost: plain SGD. Vectors keep their momentum."""
    shapes = ((24, 32), (7,))
    with nodes(1) as comm:
        codec = DeepGradientCompression(1.0, 0.9, masks_momentum=masks)
        gradients = Gradients(codec, comm, shapes)
        momenta = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for step in range(10):
            got = gradients.reduce(drawn(comm.rank, step, shapes), 1 / comm.size)
            mean = of_all(comm, lambda rank, step=step: drawn(rank, step, shapes))
            for number, momentum in enumerate(momenta):
                forgets = masks and number == 0
                momentum.mul_(0.0 if forgets else 0.9).add_(mean[number] / comm.size)
            torch.testing.assert_close(got, momenta, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_dgc_without_masks_loses_nothing():
    """The sum of sent and stored values is the sum of all momenta."""
    with nodes(1) as comm:
        codec = DeepGradientCompression(0.05, 0.9, masks_momentum=False)
        gradients = Gradients(codec, comm, SHAPES)
        momentum = torch.zeros(SHAPES[0], dtype=torch.float64)
        sums, sent = torch.zeros_like(momentum), torch.zeros_like(momentum)
        for step in range(20):
            sent += gradients.reduce(drawn(comm.rank, step, SHAPES))[0]
            exact = of_all(comm, lambda rank, step=step: drawn(rank, step, SHAPES))[0]
            sums += momentum.mul_(0.9).add_(exact)
        waiting = [codec.state_dict()["0"]["memory"]["sum"]]
        everywhere = sum(comm.all_gather(waiting[0])).view(SHAPES[0])
        torch.testing.assert_close(sent + everywhere, sums, rtol=1e-12, atol=1e-12)


def test_dgc_warms_up_through_its_densities():
    codec = DeepGradientCompression(0.001, warmup=(0.25, 0.0625), warmup_steps=10)
    at = [codec.density_at(step) for step in (0, 9, 10, 19, 20, 1000)]
    assert at == [0.25, 0.25, 0.0625, 0.0625, 0.001, 0.001]


@pytest.mark.parametrize("number", [1, 50, 2000, 99999, 100000])
def test_the_largest_are_found_among_many(number):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(100000, generator=generator) ** 3
    found = largest(values, number)
    expected = values.abs().sort(descending=True).indices[:number].sort().values
    assert torch.equal(found, expected)
    assert len(largest(torch.ones(100000), number)) == number


# One bit


@pytest.mark.ranks(2, 3, 4)
def test_nodes_vote_on_signs_and_a_tie_is_plus_one():
    with nodes(1) as comm:
        gradients = Gradients(SignSGD(), comm, [(1, 10)])
        votes = [torch.tensor([[1.0, -1.0, 0.0, -2.0, 3.0, -0.5, 0.5, 9.0, -9.0, 0.0]])] * 2
        values = votes[0].double() * (1.0 if comm.rank % 2 == 0 else -1.0)
        got = gradients.reduce([values])[0]
        of_ranks = [votes[0].double() * (1.0 if r % 2 == 0 else -1.0) for r in range(comm.size)]
        total = sum(torch.where(each >= 0, 1.0, -1.0) for each in of_ranks)
        assert torch.equal(got, torch.where(total >= 0, 1.0, -1.0).double())


@pytest.mark.ranks(2)
def test_one_bit_represents_the_means_of_its_row():
    with nodes(1) as comm:
        gradients = Gradients(OneBit(), comm, [(3, 8)])
        row = torch.tensor([1.0, 2.0, 3.0, -4.0, -6.0, 0.0, 0.0, 2.0], dtype=torch.float64)
        got = gradients.reduce([torch.stack([row, -row, 0 * row])])[0] / comm.size
        high, low = 8 / 6, -5.0
        expected = torch.where(row >= 0, high, low)
        torch.testing.assert_close(got[0], expected.double())
        # In the second row, zeros count as at least zero.
        second = torch.where(-row >= 0, 10 / 4, -2.0)
        torch.testing.assert_close(got[1], second.double())
        assert not got[2].any()


@pytest.mark.ranks(2)
def test_feedback_ends_where_signs_alone_do_not():
    """A gradient is 4 with probability 1/4, else -1: the optimum in [-1, 1] is -1."""
    ends = {}
    with nodes(1) as comm:
        for codec in (SignSGD(), OneBit()):
            gradients = Gradients(codec, comm, [(1, 1)])
            generator, x = torch.Generator().manual_seed(5), 0.0
            for _ in range(400):
                gradient = 4.0 if float(torch.rand(1, generator=generator)) < 0.25 else -1.0
                value = torch.full((1, 1), gradient, dtype=torch.float64)
                x -= 0.01 * float(gradients.reduce([value], 1 / comm.size)[0])
                x = min(max(x, -1.0), 1.0)
            ends[type(codec)] = x
    assert ends[SignSGD] > 0.9
    assert ends[OneBit] < -0.8


@pytest.mark.parametrize("size", [1e3, 1.0, 1e-5, 1e-7, 1e-9, 1e-12])
def test_int8_is_as_exact_for_small_gradients_as_for_large_ones(size):
    values = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    values[2] = 0.0
    values[3] *= 1e-6  # next to larger ones
    form, share = Int8Blocks(100), None
    packet = form.pack(share, slice(0, 500), values.view(-1) * size)
    got = torch.empty(500)
    form.unpack(share, slice(0, 500), packet, got)
    spread = values.max(1).values - values.min(1).values
    error = (got.view(5, 100) / size - values).abs().max(1).values
    assert (error <= spread / 255 * 0.6 + 1e-12).all()
