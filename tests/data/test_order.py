"""An order is a bijection, the same everywhere and for ever."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.order.feistel import Feistel, splitmix64_
from hpctrain.data.order.order import SMALL, FisherYates, Sequential, Shuffled, global_order

words = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 3000), seed=words, epoch=words)
@pytest.mark.parametrize("kind", [Shuffled, FisherYates])
def test_every_sample_has_one_position(kind, n, seed, epoch):
    order, positions = kind(n, seed, epoch), np.arange(n)
    samples = order.samples_at(positions)
    assert np.array_equal(np.sort(samples), positions)
    assert np.array_equal(order.positions_of(samples), positions)


@pytest.mark.parametrize("n", [1, 2, SMALL, SMALL + 1, 2**17, 1_281_167])
def test_order_is_a_bijection_of_real_sizes(n):
    samples = global_order(n, seed=1, epoch=2).samples_at(np.arange(n))
    assert np.array_equal(np.sort(samples), np.arange(n))


@given(n=st.integers(SMALL + 1, 2**62 - 1), seed=words, data=st.data())
def test_inverse_leads_back_at_any_size(n, seed, data):
    order = global_order(n, seed, epoch=0)
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1)))
    samples = order.samples_at(positions)
    assert samples.min() >= 0
    assert samples.max() < n
    assert np.array_equal(order.positions_of(samples), positions)


def test_a_position_is_computed_without_the_others():
    order, positions = global_order(10**6, 3, 4), np.arange(10**6)
    samples = order.samples_at(positions)
    for some in ([0], [999_999, 5, 5], [], [[1, 2], [3, 4]]):
        index = np.array(some, np.int64)
        assert np.array_equal(order.samples_at(index), samples[index])


def test_seed_and_epoch_and_nothing_else_change_the_order():
    def first(seed, epoch, n=10**6):
        return global_order(n, seed, epoch).samples_at(np.arange(100)).tolist()

    assert first(1, 2) == first(1, 2)
    assert len({tuple(first(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (8, [4, 0, 6, 3, 2, 7, 5, 1]),
        (100_000, [74293, 77381, 93680, 82537, 4909, 57545, 51874, 52393]),
    ],
)
def test_order_of_a_release_is_kept_for_ever(n, expected):
    # A checkpoint says where in the order a run stopped: another order would repeat samples.
    assert global_order(n, seed=1, epoch=2).samples_at(np.arange(8)).tolist() == expected


def test_all_permutations_of_few_samples_are_equally_likely():
    trials = 6000
    counts = Counter(
        tuple(FisherYates(3, seed, 0).samples_at(np.arange(3))) for seed in range(trials)
    )
    chi2 = sum((count - trials / 6) ** 2 / (trials / 6) for count in counts.values())
    assert len(counts) == 6
    assert chi2 < 20.5  # 0.1 % of fair draws exceed this with 5 degrees of freedom


@pytest.mark.parametrize("size", [6, 20, 100, 512])
def test_where_the_first_two_of_few_go_is_equally_likely_for_all_pairs(size):
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
    assert np.array_equal(Feistel(size, key).backward(mapped, limits, tweaks), values)


def test_class_sorted_samples_are_mixed_as_by_a_drawn_permutation():
    n, num_classes, batch = 1_281_167, 1000, 256
    samples = global_order(n, seed=0, epoch=0).samples_at(np.arange(200 * batch))
    labels = samples * num_classes // n
    distinct = np.mean([len(np.unique(some)) for some in labels.reshape(-1, batch)])
    assert abs(distinct - 226) < 2


def test_sequential_order_is_the_identity():
    positions = np.arange(5)
    assert np.array_equal(Sequential().samples_at(positions), positions)


@pytest.mark.parametrize(
    ("n", "seed", "epoch"), [(0, 0, 0), (2**62, 0, 0), (5, -1, 0), (5, 2**64, 0), (5, 0, -1)]
)
def test_arguments_out_of_range_are_told(n, seed, epoch):
    with pytest.raises(DataError, match=f"got n={n}, seed={seed}, epoch={epoch}"):
        global_order(n, seed, epoch)
