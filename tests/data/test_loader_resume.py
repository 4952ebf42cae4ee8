"""Check that training resumes from a state with any number of ranks."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.core.formats import stamp
from hpctrain.data.loader import Loader
from hpctrain.data.order.window import WindowShape
from tests.data.memory import InMemory, numbers

ORDERS = st.sampled_from(
    [
        {"order": "global"},
        {"order": "sequential"},
        {"window": WindowShape(block=4, window=2, lanes=3)},
        {"order": "auto"},
    ]
)
PHASES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=4
)


def run(dataset, state, *, size, num_steps=None, **kwargs):
    """Run all ranks for some steps; return the global batches and the common state."""
    ranks = []
    for rank in range(size):
        loader = Loader(dataset, rank=rank, size=size, **kwargs)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        ranks.append((loader, itertools.islice(loader, num_steps)))
    steps = [
        sorted(number for b in step for number in b.number.tolist())
        for step in zip(*(batches for _, batches in ranks), strict=True)
    ]
    states = [loader.state_dict() for loader, _ in ranks]
    assert all(other == states[0] for other in states)
    return steps, states[0]


@settings(max_examples=30)
@given(n=st.integers(1, 120), phases=PHASES, order=ORDERS, epoch=st.integers(0, 2))
def test_every_sample_is_delivered_once_after_any_interruptions(n, phases, order, epoch):
    dataset, seen = InMemory(n), []
    loader = Loader(dataset, global_batch=phases[0][1], **order)
    loader.set_epoch(epoch)
    # Only this one sets its order: the state gives it to all others.
    state = loader.state_dict()
    for size, batch, num_steps in phases:
        steps, state = run(dataset, state, size=size, global_batch=batch, num_steps=num_steps)
        seen += itertools.chain(*steps)
        if state["epoch"] > epoch:
            break
        assert state["consumed"] == len(seen)
    else:
        steps, state = run(dataset, state, size=2, global_batch=7)
        seen += itertools.chain(*steps)
    assert sorted(seen) == list(range(n))
    assert (state["epoch"], state["consumed"]) == (epoch + 1, 0)


@settings(max_examples=30)
@given(
    n=st.integers(1, 120),
    batch=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    num_steps=st.integers(0, 10),
    order=ORDERS,
)
def test_global_batches_are_those_of_a_run_without_interruption(n, batch, sizes, num_steps, order):
    dataset, kwargs = InMemory(n), {"global_batch": batch, **order}
    whole, _ = run(dataset, None, size=1, **kwargs)
    found, state = run(dataset, None, size=sizes[0], num_steps=num_steps, **kwargs)
    if state["epoch"] == 0:
        found += run(dataset, state, size=sizes[1], **kwargs)[0]
    assert found == whole


def test_a_state_restores_seed_epoch_and_order_and_repeats_prefetched_samples():
    loader = Loader(InMemory(60), global_batch=7, seed=5, order="global", prefetch=5)
    loader.set_epoch(3)
    batches = iter(loader)
    assert loader.consumed == 0
    next(batches)
    assert loader.state_dict()["consumed"] == 7
    other = Loader(InMemory(60), global_batch=7, seed=1, order="sequential")
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == [b.number.tolist() for b in batches]
    assert numbers(other) == numbers(loader)


def test_a_loop_that_was_left_resumes_with_the_next_batch():
    whole = numbers(Loader(InMemory(60), global_batch=7))
    loader, found, states = Loader(InMemory(60), global_batch=7), [], []
    while loader.epoch == 0:
        for batch in loader:
            found.append(batch.number.tolist())
            states.append(loader.state_dict())
            break
    assert found == whole
    # The state after the last batch is the end of the epoch.
    assert (states[-1]["epoch"], states[-1]["consumed"]) == (0, 60)
    loader.load_state_dict(states[-1])
    assert numbers(loader) == []
    assert (loader.epoch, loader.consumed) == (1, 0)


def test_a_state_is_the_same_in_every_release():
    loader = Loader(InMemory(60, uuid="u"), global_batch=7, seed=2, order="window")
    next(iter(loader))
    assert loader.state_dict() == {
        "version": 1,
        "reader": "1.0",
        "uuid": "u",
        "seed": 2,
        "epoch": 0,
        "consumed": 7,
        "order": "window",
        "block": 4,
        "window": 1171,
        "lanes": 7,
        "skipped": [],
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stamp(2, "1.7"), "at most 1, got 2; install hpctrain 1.7 or later"),
        ({"uuid": "other"}, "the same data set"),
        ({"consumed": 61}, "at most 60 consumed samples"),
        ({"epoch": -1}, "epoch -1"),
        ({"order": "random"}, "no order 'random'"),
        ({"order": "window"}, "must be a result of state_dict"),
        ({"seed": None}, "must be a result of state_dict"),
        ({"skipped": [3]}, "must be a result of state_dict"),
    ],
)
def test_incompatible_state_raises_and_changes_nothing(change, words):
    loader = Loader(InMemory(60), global_batch=7, order="global")
    before = loader.state_dict()
    with pytest.raises(DataError, match=words):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@pytest.mark.parametrize("record", [{}, {"version": 1}])
def test_invalid_state_raises(record):
    with pytest.raises(DataError, match="KeyError"):
        Loader(InMemory(5), global_batch=1).load_state_dict(record)
