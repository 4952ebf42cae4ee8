"""A subset is a data set of its own: all that a loader does with one it does with the other."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.loader import Loader
from hpctrain.data.subset import Subset
from tests.data.memory import InMemory, numbers

N = 60
CHOICES = st.one_of(
    st.builds(range, st.integers(0, 20), st.integers(21, N), st.integers(1, 7)),
    st.lists(st.integers(0, N - 1), min_size=1, max_size=30, unique=True),
    st.just(range(N - 1, 3, -2)),
)


@settings(max_examples=50)
@given(chosen=CHOICES, batch=st.integers(1, 20))
def test_a_pass_gives_the_chosen_samples(chosen, batch):
    loader = Loader(Subset(InMemory(N), chosen), global_batch=batch)
    assert sorted(itertools.chain(*numbers(loader))) == sorted(chosen)
    in_order = Loader(Subset(InMemory(N), chosen), global_batch=batch, order="sequential")
    assert list(itertools.chain(*numbers(in_order))) == list(chosen)


@settings(max_examples=50)
@given(chosen=CHOICES, damaged=st.tuples(st.integers(0, N - 1), st.integers(1, 30)))
def test_damage_is_told_in_the_numbers_of_the_subset(chosen, damaged):
    start, stop = damaged[0], damaged[0] + damaged[1]
    subset = Subset(InMemory(N, damaged=[(start, stop)]), chosen)
    loader = Loader(subset, global_batch=8, on_corrupt="skip", size=1)
    good = [number for number in chosen if not start <= number < stop]
    assert sorted(itertools.chain(*numbers(loader))) == sorted(good)
    assert loader.num_skipped == len(chosen) - len(good)


def test_neighbours_that_are_damaged_are_told_at_once_and_what_is_needed_is_told_on():
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
def test_samples_that_cannot_be_chosen_are_told(chosen, words):
    with pytest.raises(DataError, match=words):
        Subset(InMemory(N), chosen)


@pytest.mark.parametrize("wrong", [[10], [-1]])
def test_an_index_out_of_range_is_told(wrong):
    with pytest.raises(DataError, match=r"\[0, 10\)"):
        Subset(InMemory(N), range(10)).take(wrong)
