"""Check mixtures, which keep the proportions of their sources, and subsets."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.loader import Loader
from hpctrain.data.mixture import PERIOD, Mixture
from hpctrain.data.samples import Ragged
from hpctrain.data.subset import Subset
from tests.data.memory import InMemory, numbers

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=5)


def sets(count, size=40):
    return [InMemory(size + number) for number in range(count)]


@settings(max_examples=8)
@given(weights=WEIGHTS, start=st.integers(0, 10**15), length=st.integers(1, 3000))
def test_every_range_of_a_mixture_has_the_sources_in_their_proportions(weights, start, length):
    mixture = Mixture(zip(sets(len(weights)), weights, strict=True))
    numbers, draws = mixture.locate(np.arange(start, start + length))
    counts = np.bincount(numbers, minlength=len(weights))
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - shares * length).max() < 2 + length / PERIOD
    for number in range(len(weights)):
        mine = draws[numbers == number]
        assert np.array_equal(mine, np.arange(mine[0], mine[0] + len(mine)) if len(mine) else [])


@settings(max_examples=8)
@given(weights=WEIGHTS)
def test_from_the_start_every_source_is_within_one_sample_of_its_share(weights):
    mixture = Mixture(zip(sets(len(weights)), weights, strict=True))
    numbers, _ = mixture.locate(np.arange(2 * PERIOD))
    for number, weight in enumerate(weights):
        given_s = np.cumsum(numbers == number)
        share = given_s[-1] / len(numbers)
        assert share == pytest.approx(weight / sum(weights), abs=1 / PERIOD)
        assert np.abs(given_s - share * np.arange(1, 2 * PERIOD + 1)).max() < 1


@settings(max_examples=25)
@given(size=st.integers(1, 4), batch=st.integers(1, 50))
def test_every_source_is_read_in_whole_epochs(size, batch):
    a, b = InMemory(30), InMemory(90)
    mixture = Mixture({a: 1, b: 1}, length=180)
    for rank in range(size):
        for _ in Loader(mixture, global_batch=batch, rank=rank, size=size):
            pass
    for source, times in ((a, 3), (b, 1)):
        seen = Counter(np.concatenate(source.taken).tolist())
        assert seen == dict.fromkeys(range(len(source)), times)


def test_an_epoch_of_a_mixture_continues_the_previous_one_and_a_mixture_resumes():
    def loader(length):
        mixture = Mixture(zip(sets(3), (1, 2, 3), strict=True), length, seed=4)
        return Loader(mixture, global_batch=20)

    long, short, stopped = numbers(loader(120)), loader(60), loader(120)
    assert numbers(short) + numbers(short) == long
    batches = iter(stopped)
    found = [next(batches).number.tolist() for _ in range(4)]
    other = loader(120)
    other.load_state_dict(stopped.state_dict())
    assert found + numbers(other) == long


def test_samples_keep_their_values_and_needed_ones_are_announced_to_their_source():
    mixture = Mixture(zip(sets(3), (1, 2, 3), strict=True))
    mixture.will_need(np.arange(10))
    mixture.take(np.arange(10))
    for source in mixture.sources:
        assert np.array_equal(*source.asked, *source.taken)
    batch = mixture.take(np.array([5, 3, 900, 4, 4]))
    assert isinstance(batch["tokens"], Ragged)
    for index, number in enumerate(batch["number"].tolist()):
        assert batch["tokens"][index].tolist() == [number] * (number % 3)
    assert len(mixture.take(np.array([], np.int64))["number"]) == 0


def test_damage_in_one_source_is_skipped():
    a, b = InMemory(30, damaged=[(3, 5)]), InMemory(50)
    loader = Loader(Mixture({a: 30, b: 50}), global_batch=7, on_corrupt="skip")
    steps = numbers(loader)
    assert len(list(itertools.chain(*steps))) == 78
    assert loader.num_skipped == 2
    with pytest.raises(CorruptError) as error:
        Mixture({a: 1}).take(np.arange(30))
    assert error.value.stop == error.value.start + 1


def test_order_of_a_mixture_is_fixed():
    mixture = Mixture({InMemory(30): 3, InMemory(50): 1}, seed=4)
    assert mixture.take(np.arange(10**9, 10**9 + 12))["number"].tolist() == GOLDEN
    uuids = {
        mixture.uuid,
        Mixture({InMemory(30): 3, InMemory(50): 1}).uuid,
        Mixture({InMemory(30): 2, InMemory(50): 1}, seed=4).uuid,
        Mixture({InMemory(30): 3, InMemory(50): 1}, 7, seed=4).uuid,
    }
    assert len(uuids) == 4


GOLDEN = [1, 23, 15, 47, 4, 13, 19, 2, 16, 12, 5, 26]


def other_fields():
    other = InMemory(30)
    other.fields = {"number": Field.of((2,), "i8")}
    return other


@pytest.mark.parametrize(
    ("weights", "length", "words"),
    [
        ({}, None, "positive weights"),
        ({InMemory(3): 0}, None, "positive weights"),
        ({InMemory(3): -1, InMemory(4): 2}, None, "positive weights"),
        ({InMemory(3): float("nan")}, None, "positive weights"),
        ({InMemory(3): 1, InMemory(4): 1e-9}, None, "must be at least 1/"),
        ({InMemory(3): 1}, 0, "at least 1 sample"),
        ({InMemory(3): 1, InMemory(0): 1}, None, "must not be empty"),
        ({InMemory(3): 1, other_fields(): 1}, None, "same fields"),
    ],
)
def test_invalid_mixtures_raise(weights, length, words):
    with pytest.raises(DataError, match=words):
        Mixture(weights, length)


def test_a_mixture_has_no_other_order():
    with pytest.raises(DataError, match="in its own order"):
        Loader(Mixture({InMemory(3): 1}), global_batch=1, order="global")


N = 60
CHOICES = st.one_of(
    st.builds(range, st.integers(0, 20), st.integers(21, N), st.integers(1, 7)),
    st.lists(st.integers(0, N - 1), min_size=1, max_size=30, unique=True),
    st.just(range(N - 1, 3, -2)),
)


@settings(max_examples=25)
@given(chosen=CHOICES, batch=st.integers(1, 20))
def test_a_pass_gives_the_chosen_samples(chosen, batch):
    loader = Loader(Subset(InMemory(N), chosen), global_batch=batch)
    assert sorted(itertools.chain(*numbers(loader))) == sorted(chosen)
    in_order = Loader(Subset(InMemory(N), chosen), global_batch=batch, order="sequential")
    assert list(itertools.chain(*numbers(in_order))) == list(chosen)


@settings(max_examples=25)
@given(chosen=CHOICES, damaged=st.tuples(st.integers(0, N - 1), st.integers(1, 30)))
def test_damage_is_reported_in_the_numbers_of_the_subset(chosen, damaged):
    start, stop = damaged[0], damaged[0] + damaged[1]
    subset = Subset(InMemory(N, damaged=[(start, stop)]), chosen)
    loader = Loader(subset, global_batch=8, on_corrupt="skip", size=1)
    good = [number for number in chosen if not start <= number < stop]
    assert sorted(itertools.chain(*numbers(loader))) == sorted(good)
    assert loader.num_skipped == len(chosen) - len(good)


def test_damaged_neighbours_are_reported_and_needed_samples_are_announced():
    dataset = InMemory(N, damaged=[(10, 21)])
    with pytest.raises(CorruptError) as error:
        Subset(dataset, range(0, N, 2)).take([7, 3])
    assert (error.value.start, error.value.stop) == (5, 11)
    Subset(dataset, range(10, 20)).will_need([1, 2])
    assert [some.tolist() for some in dataset.asked] == [[11, 12]]


def test_subsets_differ_in_their_uuid():
    sets = [
        Subset(InMemory(N), range(10)),
        Subset(InMemory(N), range(1, 11)),
        Subset(InMemory(N), range(0, 20, 2)),
        Subset(InMemory(N), [1, 2, 3]),
        Subset(InMemory(N), [1, 3, 2]),
        Subset(InMemory(N + 1), [1, 3, 2]),
    ]
    assert len({each.uuid for each in sets}) == len(sets)
    assert Subset(InMemory(N), [1, 2]).uuid == Subset(InMemory(N), [1, 2]).uuid


def test_a_range_of_many_takes_no_memory():
    subset = Subset(InMemory(2**50), range(1, 2**50, 2))
    assert len(subset) == 2**49
    assert subset.take([2**48])["number"].tolist() == [2**49 + 1]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        *((wrong, "subset") for wrong in ([], range(0), [60], [-1], [[1, 2]], range(50, 70))),
        (np.arange(10) % 2 == 0, "flatnonzero"),
        (torch.ones(10) > 0, "flatnonzero"),
        ([0.5, 2.0], "flatnonzero"),
    ],
    ids=str,
)
def test_samples_that_cannot_be_chosen_are_reported(chosen, words):
    with pytest.raises(DataError, match=words):
        Subset(InMemory(N), chosen)


@pytest.mark.parametrize("wrong", [[10], [-1]])
def test_index_out_of_range_raises(wrong):
    with pytest.raises(DataError, match=r"\[0, 10\)"):
        Subset(InMemory(N), range(10)).take(wrong)
