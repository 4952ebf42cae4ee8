"""Check any order of calls of a loader against a plain model."""

import functools
import gc
import json
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.loader import Loader
from hpctrain.data.order.window import WindowShape
from tests.data.memory import InMemory, numbers
from tests.harness.pace import scaled

N = 60
ORDERS = {
    "global": {"order": "global"},
    "window": {"window": WindowShape(block=4, window=2, lanes=3)},
    "sequential": {"order": "sequential"},
}
SIZES, BATCHES = st.integers(1, 3), st.integers(1, 25)


@functools.cache
def line_of(order: str, seed: int, epoch: int) -> list[int]:
    """Return the samples of an epoch in their order, one at a time."""
    loader = Loader(InMemory(N), global_batch=1, seed=seed, **ORDERS[order])
    loader.set_epoch(epoch)
    return [number for (number,) in numbers(loader)]


class LoaderMachine(RuleBasedStateMachine):
    """Drive the loaders of all ranks, and a model of their position (epoch, consumed)."""

    @initialize(order=st.sampled_from(sorted(ORDERS)), seed=st.integers(0, 2))
    def begin(self, order, seed):
        self.order, self.seed, self.epoch, self.consumed = order, seed, 0, 0
        self.dataset, self.saved, self.old = InMemory(N), None, None
        self.make(1, 7)

    def make(self, size, batch):
        self.size, self.batch, self.passes = size, batch, None
        self.loaders = [
            Loader(
                self.dataset,
                rank=rank,
                size=size,
                global_batch=batch,
                seed=self.seed,
                **ORDERS[self.order],
            )
            for rank in range(size)
        ]

    @rule(count=st.integers(1, 4))
    def step(self, count):
        """Take steps on all ranks, in the current pass or a new one."""
        if self.passes is None:
            self.passes = [iter(loader) for loader in self.loaders]
        for _ in range(count):
            batches = [next(one, None) for one in self.passes]
            if self.consumed == N:
                assert batches == [None] * self.size
                self.epoch, self.consumed, self.passes = self.epoch + 1, 0, None
                return
            stop = min(self.consumed + self.batch, N)
            found = sorted(n for batch in batches for n in batch.number.tolist())
            line = line_of(self.order, self.seed, self.epoch)
            assert found == sorted(line[self.consumed : stop])
            self.consumed = stop

    @rule()
    def leave(self):
        """Leave the pass early: the next pass starts with the first batch not delivered."""
        self.old, self.old_consumed, self.passes = self.passes, self.consumed, None

    @precondition(lambda self: self.old)
    @rule()
    def use_a_pass_that_has_ended(self):
        """Assert that a pass that was left has ended, if a new pass has begun."""
        if self.passes is not None:
            self.assert_ended(self.old[0], self.old_consumed)
        self.old = None

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        for loader in self.loaders:
            loader.set_epoch(epoch)
        self.end_passes()
        self.epoch, self.consumed = epoch, 0

    def end_passes(self):
        """End passes whose loader was moved."""
        for one in self.passes or ():
            self.assert_ended(one, self.consumed)
        self.old = self.passes = None

    def assert_ended(self, batches, consumed):
        """Assert that an ended pass gives no more batches, and raises unless it was complete."""
        if consumed == N:
            assert next(batches, None) is None
        else:
            with pytest.raises(DataError, match="an iterator of a loader must not be used"):
                next(batches)

    @rule()
    def save(self):
        state = json.dumps(self.loaders[-1].state_dict())
        self.saved = state, (self.epoch, self.consumed)

    @precondition(lambda self: self.saved)
    @rule(size=SIZES, batch=BATCHES, is_new=st.booleans())
    def load(self, size, batch, is_new):
        """Load a state, possibly into new loaders with other numbers of ranks and batch sizes."""
        if is_new:
            self.old = None
            self.make(size, batch)
        for loader in self.loaders:
            loader.load_state_dict(json.loads(self.saved[0]))
        self.end_passes()
        self.epoch, self.consumed = self.saved[1]

    @precondition(lambda self: self.consumed < N)
    @rule()
    def meet_damage(self):
        """Read a damaged sample: an error at its step, which is repeated afterwards."""
        bad = line_of(self.order, self.seed, self.epoch)[self.consumed]
        self.dataset.damaged.append((bad, bad + 1))
        errors = []
        for loader in self.loaders:
            try:
                next(iter(loader))
            except CorruptError as error:
                errors.append(error.start)
        self.dataset.damaged.clear()
        assert errors == [bad]
        for loader in self.loaders:  # without comm the ranks do not fail together
            loader.load_state_dict(loader.state_dict() | {"consumed": self.consumed})
        self.old = self.passes = None

    @invariant()
    def position_is_that_of_the_model(self):
        for loader in self.loaders:
            state = loader.state_dict()
            assert (state["epoch"], state["consumed"]) == (self.epoch, self.consumed)


LoaderMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestLoader = LoaderMachine.TestCase


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_left_early_gives_no_sample_twice(dataset_of, workers):
    whole = numbers(Loader(dataset_of(40), global_batch=7, order="global"))
    found, before = [], {*threading.enumerate()}
    with Loader(dataset_of(40), global_batch=7, order="global", workers=workers) as loader:
        while loader.epoch == 0:
            for batch in loader:
                found.append(batch.number.tolist())
                if len(found) % 2:
                    break
            begun = {*threading.enumerate()} - before
            assert not any(thread.name.startswith("hpctrain-loader") for thread in begun)
    assert found == whole


def test_a_pass_that_is_collected_does_not_wait_for_a_thread_that_starts():
    """Up to Python 3.12 a starting or ending thread holds the lock in which it may collect."""
    lock = getattr(threading, "_shutdown_locks_lock", threading.Lock())
    batches = iter(Loader(InMemory(N), global_batch=7))
    next(batches)
    cycle = [batches]
    cycle.append(cycle)
    del batches, cycle

    def collect():
        with lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(scaled(5.0))
    hangs = thread.is_alive()
    if hangs:
        lock.release()  # other tests start threads
    assert not hangs


@pytest.mark.parametrize(
    "move",
    [
        lambda loader: loader.set_epoch(0),
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: next(iter(loader)),
    ],
    ids=["set_epoch", "load_state_dict", "another pass"],
)
def test_a_pass_ends_when_its_loader_changes_position(move):
    loader = Loader(InMemory(N), global_batch=7)
    batches = iter(loader)
    next(batches)
    move(loader)
    with pytest.raises(DataError, match="an iterator of a loader must not be used"):
        next(batches)


def test_a_pass_that_has_delivered_its_last_batch_does_not_move_a_loader_with_another_position():
    loader = Loader(InMemory(N), global_batch=N)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(7)
    assert next(batches, None) is None
    assert (loader.epoch, loader.consumed) == (7, 0)
