"""``ElasticSampler`` delivers each index of an epoch, on any number of ranks."""

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
    """Make this process rank ``rank`` of ``size``."""
    monkeypatch.setattr(world, "rank", lambda: rank)
    monkeypatch.setattr(world, "size", lambda: size)


@given(
    num_samples=st.integers(0, 60),
    seed=st.none() | st.integers(0, 5),
    stretches=st.lists(st.tuples(SIZES, st.integers(0, 4)), max_size=4),
    last=SIZES,
)
def test_an_epoch_over_changing_numbers_of_ranks_delivers_every_index_once(
    num_samples, seed, stretches, last
):
    """In each stretch every rank takes some indices; then the next size restores the state."""
    order, num_done, delivered = epoch_order(num_samples, seed), 0, []
    for size, wanted in stretches:
        left = left_of(order, num_done)
        each = min(wanted, len(left) // size)  # whole rounds, so that the epoch does not end
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
def test_indices_recorded_by_index_are_not_delivered_again(num_samples, seed, sizes):
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
    assert delivered - set(order[:after]) <= set(left)  # the last round repeats indices
    assert delivered >= set(left) == set(range(num_samples)) - done


@given(num_samples=st.integers(1, 60), size=SIZES, seed=st.integers(0, 5), each=st.integers(0, 9))
def test_an_interrupted_epoch_on_the_same_number_of_ranks_has_the_same_order(
    num_samples, size, seed, each
):
    order = epoch_order(num_samples, seed)
    each = min(each, num_samples // size)
    left = left_of(order, each * size)
    for rank in range(size):
        assert part_of(order, rank, size, order)[each:] == part_of(left, rank, size, order)


@pytest.mark.parametrize(("before", "after"), [(1, 8), (3, 2), (4, 4), (8, 1)])
def test_a_restored_sampler_continues_from_its_state(monkeypatch, before, after):
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
        assert len(sampler) == len(mine)  # recording has no effect before the next reset
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


def test_each_epoch_has_its_own_order_and_starts_unprocessed(monkeypatch):
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


def test_an_epoch_cannot_mix_recorded_batches_and_indices(monkeypatch):
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
def test_sync_merges_the_recorded_indices_of_all_ranks(hvd):
    sampler = ElasticSampler(range(24), seed=1)
    state = TorchState(sampler=sampler)
    mine = list(sampler)
    sampler.record_indices(mine[: 1 + hvd.rank()])
    state.commit()
    sampler.record_indices(mine[6:7])  # not committed
    state.restore()
    state.sync()
    order = epoch_order(24, 1)
    parts = [part_of(order, rank, hvd.size(), order) for rank in range(hvd.size())]
    done = {index for rank, part in enumerate(parts) for index in part[: 1 + rank]}
    assert sampler.processed_indices == done
    assert set(sampler.remaining_indices) == set(range(24)) - done
    assert state.sampler is sampler
