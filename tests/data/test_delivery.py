"""Check that a fault on one rank raises on all ranks, at the same step."""

import itertools
import logging

import pytest

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.loader import Loader
from hpctrain.data.order.window import WindowShape
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from tests.data.conftest import numbered
from tests.data.memory import InMemory
from tests.data.mixed_set import flip, shard

NUM_SAMPLES, BLOCK = 120, 6


@pytest.fixture
def comm(world):
    return MpiCommunicator(world)


@pytest.fixture
def damaged(tmp_path, world):
    """Return a data set on all ranks with damaged samples 42 to 47: one byte is wrong."""
    folder = world.bcast(tmp_path) / "set"
    if world.rank == 0:
        write_arrays(folder, numbered(NUM_SAMPLES), samples_per_shard=60, block_size=BLOCK)
        dataset = ShardedDataset(folder)
        path, entry = shard(folder, 0)
        flip(path, entry.places["image"].offset + 44 * dataset.fields["image"].sample_bytes)
    world.barrier()
    return ShardedDataset(folder)


ORDERS = [
    {"order": "global"},
    {"order": "sequential"},
    {"window": WindowShape(block=6, window=2, lanes=4)},
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_damage_on_one_rank_is_the_same_error_on_all(world, comm, damaged, order):
    loader, steps = Loader(damaged, global_batch=10, comm=comm, **order), []
    with pytest.raises(CorruptError, match="42 to 47") as error:
        steps.extend(loader)
    assert (error.value.start, error.value.stop) == (42, 48)
    assert len(set(world.allgather((str(error.value), len(steps))))) == 1
    assert loader.consumed == len(steps) * 10
    # The step is repeated, and fails again, on all ranks.
    with pytest.raises(CorruptError):
        next(iter(loader))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_all_ranks_skip_the_same_damaged_samples(world, comm, damaged, order, caplog):
    loader = Loader(damaged, global_batch=10, comm=comm, on_corrupt="skip", **order)
    whole = Loader(InMemory(NUM_SAMPLES), global_batch=10, **order)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            mine = [(batch.num_samples, batch.number.tolist()) for batch in loader]
        assert all(count == len(found) for count, found in mine)
        steps = zip(*world.allgather([found for _, found in mine]), strict=True)
        good = [sorted(set(b.number.tolist()) - set(range(42, 48))) for b in whole]
        assert [sorted(itertools.chain(*step)) for step in steps] == good
    assert loader.num_skipped == 6
    state = loader.state_dict()
    assert state["skipped"] == [[42, 48]]
    assert len(set(world.allgather(str(state)))) == 1
    alone = Loader(damaged, global_batch=7)
    alone.load_state_dict(state)
    assert sum(batch.num_samples for batch in alone) == NUM_SAMPLES - 6
    assert len([r for r in caplog.records if "are skipped" in r.message]) == (world.rank == 0)


@pytest.mark.ranks(2, 3, 4)
def test_different_damage_on_every_rank_is_skipped_by_all(world, comm):
    """As with one copy of the data per node: every rank finds other damage."""
    mine = (10 * world.rank, 10 * world.rank + 3)
    dataset = InMemory(NUM_SAMPLES, damaged=[mine])
    loader = Loader(dataset, global_batch=24, comm=comm, on_corrupt="skip")
    for _ in range(3):
        found = [number for batch in loader for number in batch.number.tolist()]
    every = sorted(itertools.chain(*world.allgather(found)))
    skipped = {n for start, stop in loader.state_dict()["skipped"] for n in range(start, stop)}
    assert len(set(world.allgather(loader.num_skipped))) == 1
    assert every == sorted(set(range(NUM_SAMPLES)) - skipped)
    assert all(n % 10 < 3 for n in skipped)


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)
        self.held = lambda: second


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [KeyError, UnpicklableError])
def test_an_error_of_a_transform_on_one_rank_is_raised_by_all(world, comm, kind):
    def fail_on_sample_50(fields):
        if 50 in fields["number"]:
            raise kind("sample", 50)
        return fields

    loader = Loader(
        InMemory(NUM_SAMPLES),
        global_batch=10,
        comm=comm,
        order="sequential",
        transform=fail_on_sample_50,
        on_corrupt="skip",
    )
    steps = []
    # Rank 0 has the sample. Errors that cannot be pickled are sent as text.
    with pytest.raises(kind if kind is KeyError or world.rank == 0 else DataError) as error:
        steps.extend(loader)
    assert len(steps) == 5
    assert "50" in str(error.value)
    if world.rank:
        [note] = error.value.__notes__
        assert note.startswith("(raised on rank 0)\ntests/data/test_delivery.py:"), note
        assert "in fail_on_sample_50: raise kind" in note


def refuse(*_, **__):
    raise OSError("no more processes")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("what", "kinds"),
    [({"workers": 1}, DataError), ({"transform": dict}, OSError)],
    ids=["workers", "threads"],
)
def test_rank_that_cannot_start_reading_raises_on_all_ranks(
    world, comm, damaged, what, kinds, monkeypatch
):
    loader = Loader(damaged, global_batch=10, comm=comm, order="sequential", **what)
    loader.consumed = 50  # after the damaged samples
    if world.rank == 1:
        monkeypatch.setattr("subprocess.Popen", refuse)
        monkeypatch.setattr("hpctrain.data.reading.ThreadPoolExecutor.submit", refuse)
    with loader, pytest.raises(kinds, match="no more processes"):
        list(loader)
    assert loader.consumed == 50
    # Without steps left, nothing can fail.
    loader.consumed = NUM_SAMPLES
    assert list(loader) == []


class OwnError(CorruptError):
    """An error that cannot be recreated from its arguments."""

    def __init__(self, start):
        super().__init__(f"sample {start}", start, start + 1)


@pytest.mark.ranks(1, 2, 3)
def test_damage_of_any_class_is_skipped_by_all_ranks(world, comm):
    class Broken(InMemory):
        def take(self, indices):
            if 7 in indices:
                raise OwnError(7)
            return super().take(indices)

    loader = Loader(Broken(NUM_SAMPLES), global_batch=24, comm=comm, on_corrupt="skip")
    found = [number for batch in loader for number in batch.number.tolist()]
    every = sorted(itertools.chain(*world.allgather(found)))
    assert every == [number for number in range(NUM_SAMPLES) if number != 7]


@pytest.mark.ranks(2, 3)
def test_a_rank_that_cannot_ask_for_samples_ahead_reads_them_all_the_same(world, comm):
    dataset = InMemory(NUM_SAMPLES, sample_bytes=2e6)
    if world.rank == 1:
        dataset.will_need = refuse
    found = [n for b in Loader(dataset, global_batch=10, comm=comm) for n in b.number.tolist()]
    assert sorted(itertools.chain(*world.allgather(found))) == list(range(NUM_SAMPLES))


@pytest.mark.ranks(2, 3)
def test_different_data_on_ranks_raise(world, comm):
    loader = Loader(InMemory(100 + (world.rank == 1)), global_batch=10, comm=comm)
    with pytest.raises(DataError, match=r"rank 1: .*memory of 101"):
        next(iter(loader))


@pytest.mark.ranks(1)
def test_damage_outside_of_the_requested_samples_ends_the_pass():
    class Wrong(InMemory):
        def take(self, _):
            raise CorruptError("elsewhere", 500, 500)

    loader = Loader(Wrong(20), global_batch=5, on_corrupt="skip")
    with pytest.raises(CorruptError, match="elsewhere"):
        next(iter(loader))
