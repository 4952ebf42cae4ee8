"""``ElasticSampler``: each index of an epoch is delivered, whatever happens to the ranks."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError
from hpctrain.elastic import ElasticSampler, TorchState
from hpctrain.horovod.elastic.sampler import epoch_order, left_of, part_of
from hpctrain.runtime import world

SIZES = st.integers(1, 8)


def at(monkeypatch, rank, size):
    """Let this process be one rank of so many."""
    monkeypatch.setattr(world, "rank", lambda: rank)
    monkeypatch.setattr(world, "size", lambda: size)


@given(
    num_samples=st.integers(0, 60),
    seed=st.none() | st.integers(0, 5),
    stretches=st.lists(st.tuples(SIZES, st.integers(0, 4)), max_size=4),
    last=SIZES,
)
def test_an_epoch_in_stretches_of_other_sizes_delivers_every_index_once(
    num_samples, seed, stretches, last
):
    """In each stretch every rank does so many indices; then all is restored at another size."""
    order, num_done, delivered = epoch_order(num_samples, seed), 0, []
    for size, wanted in stretches:
        left = left_of(order, num_done)
        each = min(wanted, len(left) // size)  # whole rounds, no epoch's end
        for rank in range(size):
            delivered += part_of(left, rank, size, order)[:each]
        num_done += each * size
    left = left_of(order, num_done)
    parts = [part_of(left, rank, last, order) for rank in range(last)]
    assert len({len(part) for part in parts}) == 1
    assert [index for each in zip(*parts, strict=True) for index in each][: len(left)] == left
    delivered += [index for part in parts for index in part]
    repeated = -len(left) % last if left else 0
    assert set(delivered) == set(range(num_samples))
    assert len(delivered) == num_samples + repeated


@given(num_samples=st.integers(1, 60), seed=st.integers(0, 5), sizes=st.tuples(SIZES, SIZES))
@settings(deadline=None)
def test_what_was_recorded_by_index_is_not_delivered_again(num_samples, seed, sizes):
    before, after = sizes
    order = epoch_order(num_samples, seed)
    chance = random.Random(seed)
    done = {
        index
        for rank in range(before)
        for index in part_of(order, rank, before, order)
        if chance.random() < 0.5
    }
    left = left_of(order, 0, done)
    delivered = {index for rank in range(after) for index in part_of(left, rank, after, order)}
    assert delivered - set(order[:after]) <= set(left)  # the last round is filled up
    assert delivered >= set(left) == set(range(num_samples)) - done


@given(num_samples=st.integers(1, 60), size=SIZES, seed=st.integers(0, 5), each=st.integers(0, 9))
def test_on_as_many_ranks_an_interrupted_epoch_is_the_uninterrupted_one(
    num_samples, size, seed, each
):
    order = epoch_order(num_samples, seed)
    each = min(each, num_samples // size)
    left = left_of(order, each * size)
    for rank in range(size):
        assert part_of(order, rank, size, order)[each:] == part_of(left, rank, size, order)


@pytest.mark.parametrize(("before", "after"), [(1, 8), (3, 2), (4, 4), (8, 1)])
def test_a_restored_sampler_goes_on_where_the_state_says(monkeypatch, before, after):
    data, batch, num_batches = range(50), 2, 2
    delivered, states = [], []
    for rank in range(before):
        at(monkeypatch, rank, before)
        sampler = ElasticSampler(data, seed=3)
        sampler.set_epoch(1)
        mine = list(sampler)
        for number in range(num_batches):
            delivered += mine[number * batch :][:batch]
            sampler.record_batch(number, batch)
        assert len(sampler) == len(mine)  # recording changes nothing before the next reset
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        at(monkeypatch, rank, after)
        sampler = ElasticSampler(data, seed=3)
        sampler.load_state_dict(copy.deepcopy(states[0]))
        delivered += list(sampler)
        assert len(list(sampler)) == len(sampler) == sampler.num_samples
    assert set(delivered) == set(data)
    assert len(delivered) - len(data) == -(len(data) - before * batch * num_batches) % after


def test_epochs_have_orders_of_their_own_and_begin_with_nothing_done(monkeypatch):
    at(monkeypatch, 0, 1)
    sampler = ElasticSampler(range(20))
    first = list(sampler)
    sampler.record_batch(0, 5)
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert sorted(sampler) == sorted(first) == list(range(20))
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ElasticSampler(range(20), shuffle=False)) == list(range(20))
    parts = []
    for rank in range(7):  # fewer indices than ranks
        at(monkeypatch, rank, 7)
        parts += list(ElasticSampler([0, 1, 2], shuffle=False))
    assert parts == [0, 1, 2, 0, 1, 2, 0]


def test_batches_and_indices_are_not_recorded_in_one_epoch(monkeypatch):
    at(monkeypatch, 0, 1)
    sampler = ElasticSampler(range(10))
    sampler.record_indices([4, 5])
    with pytest.raises(ConfigError, match="not by both, but epoch 0 has 2 recorded indices"):
        sampler.record_batch(0, 2)
    sampler.set_epoch(1)
    sampler.record_batch(0, 2)
    with pytest.raises(ConfigError, match="but epoch 1 has 2 indices recorded by batch"):
        sampler.record_indices([4])


@pytest.mark.ranks(1, 2, 3)
def test_what_any_rank_has_recorded_is_done_after_a_sync(hvd):
    sampler = ElasticSampler(range(24), seed=1)
    state = TorchState(sampler=sampler)
    mine = list(sampler)
    sampler.record_indices(mine[: 1 + hvd.rank()])
    state.commit()
    sampler.record_indices(mine[6:7])  # never committed
    state.restore()
    state.sync()
    order = epoch_order(24, 1)
    parts = [part_of(order, rank, hvd.size(), order) for rank in range(hvd.size())]
    done = {index for rank, part in enumerate(parts) for index in part[: 1 + rank]}
    assert sampler.processed_indices == done
    assert set(sampler.remaining_indices) == set(range(24)) - done
    assert state.sampler is sampler
