"""Check that an order is a fixed bijection, and that a window order reads whole blocks."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.core.units import KIB
from hpctrain.data.order.feistel import Feistel, splitmix64_
from hpctrain.data.order.order import SMALL, FisherYates, Shuffled, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape

words = st.integers(0, 2**64 - 1)
shapes = st.builds(
    WindowShape, block=st.integers(1, 20), window=st.integers(1, 9), lanes=st.integers(1, 40)
)
kinds = st.one_of(
    st.sampled_from([Shuffled, FisherYates]),
    shapes.map(lambda shape: partial(WindowOrder, shape=shape)),
)


def windowed(n, shape, seed=1, epoch=2):
    return WindowOrder(n, seed, epoch, shape)


@settings(max_examples=80)
@given(kind=kinds, n=st.integers(1, 3000), seed=words, epoch=words)
@example(partial(WindowOrder, shape=WindowShape(block=5, window=1, lanes=1)), 1, 0, 0)
@example(partial(WindowOrder, shape=WindowShape(block=1, window=9, lanes=40)), 39, 0, 0)
def test_every_sample_has_one_position_which_is_computed_without_the_others(kind, n, seed, epoch):
    order, positions = kind(n, seed, epoch), np.arange(n)
    samples = order.samples_at(positions)
    assert np.array_equal(np.sort(samples), positions)
    for some in ([0], [n - 1, n // 2, n // 2], [], [[0, n // 3], [n // 5, 0]]):
        index = np.array(some, np.int64)
        assert np.array_equal(order.samples_at(index), samples[index])
    if not isinstance(order, WindowOrder):
        assert np.array_equal(order.positions_of(samples), positions)


@pytest.mark.parametrize("n", [1, 2, SMALL, SMALL + 1, 2**17, 1_281_167])
def test_order_is_a_bijection_of_real_sizes(n):
    samples = global_order(n, seed=1, epoch=2).samples_at(np.arange(n))
    assert np.array_equal(np.sort(samples), np.arange(n))


@given(n=st.integers(SMALL + 1, 2**62 - 1), seed=words, shape=shapes, data=st.data())
def test_different_positions_have_different_samples(n, seed, shape, data):
    start = data.draw(st.integers(0, n - 1))
    positions = np.arange(start, min(start + 5000, n))
    shuffled = global_order(n, seed, epoch=0)
    for order in (shuffled, windowed(n, shape, seed)):
        samples = order.samples_at(positions)
        assert samples.min() >= 0
        assert samples.max() < n
        assert len(np.unique(samples)) == len(samples)
    assert np.array_equal(shuffled.positions_of(shuffled.samples_at(positions)), positions)


ORDERS = {
    "global": global_order,
    "window": partial(WindowOrder, shape=WindowShape(block=4, window=8, lanes=16)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_seed_and_epoch_and_nothing_else_change_the_order(name):
    def first(seed, epoch, n=10**6):
        return tuple(ORDERS[name](n, seed, epoch).samples_at(np.arange(100)).tolist())

    assert first(1, 2) == first(1, 2)
    assert len({first(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


GOLDEN = [
    (8, None, "4 0 6 3 2 7 5 1"),
    (100_000, None, "74293 77381 93680 82537 4909 57545 51874 52393"),
    (
        60,
        (4, 2, 3),
        """32 48 52 34 40 58 26 13 57 25 42 23 1 15 20 3 14 21 35 12 59 0 49 22 33 41 54 2 43 53
        24 51 56 27 50 55 38 28 17 7 10 18 4 30 46 6 9 45 37 8 19 5 11 44 36 31 16 39 29 47""",
    ),
    (
        10**12,
        (16, 32, 256),
        """859690830583 89841506892 242293605319 382786023057 99712687875 678739553190
        94925926504 322568101062""",
    ),
]


@pytest.mark.parametrize(("n", "shape", "expected"), GOLDEN)
def test_order_of_a_release_is_kept_for_ever(n, shape, expected):
    # A checkpoint stores a position in the order: another order would repeat samples.
    wanted = list(map(int, expected.split()))
    order = global_order(n, seed=1, epoch=2)
    if shape is not None:
        block, window, lanes = shape
        order = windowed(n, WindowShape(block=block, window=window, lanes=lanes))
    assert order.samples_at(np.arange(len(wanted))).tolist() == wanted


def test_all_permutations_of_few_samples_are_equally_likely():
    trials = 6000
    counts = Counter(
        tuple(FisherYates(3, seed, 0).samples_at(np.arange(3))) for seed in range(trials)
    )
    chi2 = sum((count - trials / 6) ** 2 / (trials / 6) for count in counts.values())
    assert len(counts) == 6
    assert chi2 < 20.5  # 0.1 % of fair draws exceed this with 5 degrees of freedom


@pytest.mark.parametrize("size", [6, 20, 100, 512])
def test_all_pairs_of_positions_of_the_first_two_samples_are_equally_likely(size):
    trials, network = 200_000 + 6 * size**2, Feistel(size, 7)
    tweaks = np.arange(trials).astype(np.uint64)
    splitmix64_(tweaks)
    first, second = (
        network.forward(np.full(trials, value, np.uint64), None, tweaks) for value in (0, 1)
    )
    counts = np.bincount((first * np.uint64(size) + second).astype(np.int64), minlength=size**2)
    counts = counts.reshape(size, size)
    assert not counts.trace()
    pairs = counts[~np.eye(size, dtype=bool)]
    expected, freedom = trials / len(pairs), len(pairs) - 1
    chi2 = ((pairs - expected) ** 2 / expected).sum()
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


@given(size=st.integers(1, 3000), key=words, tweak=words, data=st.data())
def test_a_network_is_one_to_one_below_any_limit(size, key, tweak, data):
    limit = data.draw(st.integers(max(1, size // 2), size))
    values = np.arange(limit).astype(np.uint64)
    limits, tweaks = np.full(limit, limit, np.uint64), np.full(limit, tweak, np.uint64)
    mapped = Feistel(size, key).forward(values, limits, tweaks)
    assert np.array_equal(np.sort(mapped), values)
    assert np.array_equal(Feistel(size, key).forward(mapped, limits, tweaks, is_back=True), values)


@pytest.mark.parametrize("sample_bytes", [None, 3_000, 60_000])
def test_class_sorted_samples_are_mixed_nearly_as_by_a_drawn_permutation(sample_bytes):
    n, num_classes, batch = 1_281_167, 1000, 256
    order = global_order(n, seed=0, epoch=0)
    if sample_bytes is not None:
        order = windowed(n, WindowShape.of(batch, sample_bytes, 16))
    # Also at the end of the epoch, where blocks left over by the lanes could gather.
    positions = np.concatenate([np.arange(100 * batch), np.arange(n - 100 * batch, n)])
    labels = (order.samples_at(positions) * num_classes // n).reshape(-1, batch)
    distinct = [len(np.unique(some)) for some in labels]
    for half in (distinct[:100], distinct[100:]):
        assert 223 < np.mean(half) < 229
    assert min(distinct) > 190


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("n", "seed", "epoch"), [(0, 0, 0), (2**62, 0, 0), (5, -1, 0), (5, 2**64, 0), (5, 0, -1)]
)
def test_arguments_out_of_range_are_reported(name, n, seed, epoch):
    with pytest.raises(DataError, match=f"got n={n}, seed={seed}, epoch={epoch}"):
        ORDERS[name](n, seed, epoch)


@settings(max_examples=15)
@given(n=st.integers(1, 600), epoch=words, shape=shapes)
def test_every_block_belongs_to_one_lane_in_all_epochs(n, epoch, shape):
    positions, found = np.arange(n), []
    for order in (windowed(n, shape, 7, epoch), windowed(n, shape, 7, 0)):
        blocks, lanes = order.samples_at(positions) // shape.block, order.lanes_of(positions)
        found.append([set(blocks[lanes == lane].tolist()) for lane in range(shape.lanes)])
    assert found[0] == found[1]
    assert sorted(itertools.chain(*found[0])) == list(range(-(-n // shape.block)))
    sizes = [len(own) for own in found[0]]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("global_batch", [1, 2, 31, 256, 1000, 1031, 4096, 65536])
@pytest.mark.parametrize(("sample_bytes", "block_size"), [(4, 16), (3072, 16), (99_999, 64)])
def test_the_default_shape_mixes_many_blocks_of_whole_reads(
    global_batch, sample_bytes, block_size
):
    shape = WindowShape.of(global_batch, sample_bytes, block_size)
    assert shape.lanes * shape.window >= 32 * max(global_batch, 256)
    assert shape.block % block_size == 0
    assert shape.block * sample_bytes >= 64 * KIB
    assert min(global_batch, 512) <= shape.lanes <= 1024


@pytest.mark.parametrize("wrong", ["block", "window", "lanes"])
def test_empty_shape_raises(wrong):
    with pytest.raises(DataError, match="of a window order must be at least 1"):
        WindowShape(**{"block": 1, "window": 1, "lanes": 1, wrong: 0})
