"""What is copied while files are still being read is what would have been taken afterwards."""

import re
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.core.errors import CorruptError
from hpctrain.core.units import MIB
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io import open_files
from hpctrain.data.io.mapped import PAGE_BYTES, Space
from hpctrain.data.io.overlapped_copy import EarlyCopies, PartedArray
from hpctrain.data.loader import Loader
from hpctrain.data.loading import read_depth
from hpctrain.data.order.window_shape import WindowShape
from hpctrain.data.ragged import Ragged
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.subset import Subset
from hpctrain.data.writer import write_arrays
from tests.data.conftest import numbered
from tests.data.mixed_set import flip

ORDERS = [{"order": "global"}, {"window": WindowShape(block=7, window=2, lanes=2)}]
EVERY = np.arange(100)


@pytest.fixture(autouse=True)
def on_disk(monkeypatch):
    """Let no file seem to lie in the page cache when it is opened; read few steps together."""
    monkeypatch.setattr("hpctrain.data.io.shardfile.in_memory", lambda *_: False)
    monkeypatch.setattr(read_depth, "_PART_BYTES_OF_THREAD", 2 * 8 * 32)


@pytest.fixture
def taken(monkeypatch):
    """Count parts of which something was copied early, and how often samples are taken late."""
    count = {"early": 0, "late": 0}
    early, late = EarlyCopies.take, ShardedDataset.take

    def take_early(self, number, fill):
        columns = early(self, number, fill)
        count["early"] += columns is not None
        return columns

    def take_late(self, indices):
        count["late"] += 1
        return late(self, indices)

    monkeypatch.setattr(EarlyCopies, "take", take_early)
    monkeypatch.setattr(ShardedDataset, "take", take_late)
    return count


def contents(batches):
    """Return all values of some batches, in their order."""
    return [{name: values.tolist() for name, values in batch.fields.items()} for batch in batches]


def read_late(directory):
    """Open a data set whose samples are never copied early, as its blocks are checked again."""
    return ShardedDataset(directory, verify="always")


@pytest.mark.parametrize("brings", [True, False], ids=["brought", "not to be brought"])
@pytest.mark.parametrize("order", ORDERS, ids=["global", "window"])
def test_every_rank_gets_the_batches_that_it_would_take(
    directory, order, brings, monkeypatch, taken
):
    if not brings:
        monkeypatch.setattr(Space, "bring", lambda *_: False)
    for (rank, size), batch, tail, consumed in product(
        [(0, 1), (0, 2), (1, 2), (2, 3)], [3, 8, 100], ["short", "drop"], [0, 37]
    ):
        if tail == "drop" and batch == 100 and consumed:
            continue  # leaves no step
        loaders = [
            Loader(dataset, global_batch=batch, rank=rank, size=size, tail=tail, **order)
            for dataset in (read_late(directory), ShardedDataset(directory))
        ]
        for loader in loaders:
            loader.load_state_dict(loader.state_dict() | {"consumed": consumed})
        want = contents(loaders[0])
        taken.update(early=0, late=0)
        assert contents(loaders[1]) == want
        assert taken["early"]
        if size == 1 or order == ORDERS[0]:  # else a rank needs a few blocks of others
            assert not taken["late"]


@pytest.mark.parametrize("order", ORDERS, ids=["global", "window"])
def test_what_comes_twice_is_taken_late_once(directory, order, taken):
    late, early = (
        Loader(dataset, global_batch=33, tail="wrap", **order)
        for dataset in (read_late(directory), ShardedDataset(directory))
    )
    want = contents(late)
    taken["late"] = 0
    assert contents(early) == want
    assert taken == {"early": 4, "late": 1}


@pytest.mark.parametrize(
    "chosen", [range(0, 100, 2), EVERY[::-1], [5, 80, 5, 41, *range(10, 60)]], ids=str
)
def test_samples_of_a_subset_keep_their_numbers(directory, chosen, taken):
    late, early = (
        Loader(Subset(dataset, chosen), global_batch=8, order="global")
        for dataset in (read_late(directory), ShardedDataset(directory))
    )
    want = contents(late)
    taken["late"] = 0
    assert contents(early) == want
    assert taken["early"]
    assert taken["late"] == len(chosen) - len(set(chosen))


def test_a_transform_gets_what_was_copied(directory, taken):
    def negative(fields):
        return {"number": -fields["number"]}

    loader = Loader(ShardedDataset(directory), global_batch=8, transform=negative)
    numbers = torch.cat([batch["number"] for batch in loader])
    assert sorted((-numbers).tolist()) == EVERY.tolist()
    assert taken == {"early": 13, "late": 0}


def test_damage_is_told_or_left_out_as_ever(directory):
    dataset = ShardedDataset(directory)
    shard = dataset.manifest.shards[0]
    flip(directory / shard.file, shard.places["image"].offset + 15 * 24)
    with pytest.raises(CorruptError, match="samples 14 to 20"):
        list(Loader(dataset, global_batch=8))
    loader = Loader(ShardedDataset(directory), global_batch=8, on_corrupt="skip")
    found = [number for batch in loader for number in batch["number"].tolist()]
    assert sorted(found) == [*range(14), *range(21, 100)]
    assert loader.num_skipped == 7


def test_a_shard_that_lies_in_memory_is_taken_late(directory, monkeypatch, taken):
    opened = []
    monkeypatch.setattr(
        "hpctrain.data.io.shardfile.in_memory",
        lambda *_: opened.append(None) or len(opened) == 2,
    )
    want = contents(Loader(read_late(directory), global_batch=8))
    opened.clear()
    dataset = ShardedDataset(directory)
    assert contents(Loader(dataset, global_batch=8)) == want
    assert taken["early"]


def test_a_batch_belongs_to_its_consumer(directory):
    dataset = ShardedDataset(directory)
    first, second = (Loader(dataset, global_batch=8) for _ in range(2))
    for batch in first:
        batch["image"][:] = 0
        batch["number"][:] = 0
    image = numbered(100)["image"]
    for batch in second:
        assert np.array_equal(batch["image"], image[batch["number"].numpy()])


def test_passes_at_the_same_time_and_left_early_disturb_none(directory, taken):
    dataset = ShardedDataset(directory)
    late = read_late(directory)
    want = [contents(Loader(late, global_batch=8, seed=seed)) for seed in range(3)]
    left, one, other = (iter(Loader(dataset, global_batch=8, seed=seed)) for seed in range(3))
    assert contents(islice(left, 2)) == want[0][:2]
    del left
    both = [contents(pair) for pair in zip(one, other, strict=True)]
    assert both == [list(pair) for pair in zip(*want[1:], strict=True)]
    assert taken["early"]


def test_after_it_the_data_set_is_known_to_lie_in_memory(directory, taken):
    dataset = ShardedDataset(directory)
    loader = Loader(dataset, global_batch=8)
    first = sorted(number for batch in loader for number in batch["number"].tolist())
    assert not taken["late"]
    assert dataset.in_memory
    assert not dataset.best_read_whole
    taken["early"] = 0
    assert sorted(number for batch in loader for number in batch["number"].tolist()) == first
    assert not taken["early"]


def parts_of_all():
    """Give the parts of an epoch in order."""
    return np.split(EVERY, 4)


@pytest.mark.parametrize("verify", ["always", "off"])
def test_nothing_is_copied_early_that_must_be_checked_otherwise(directory, verify):
    assert ShardedDataset(directory, verify=verify).will_need(EVERY, parts_of_all) is None


def test_nothing_is_copied_early_without_room_for_it_twice(directory, monkeypatch):
    num_bytes = ShardedDataset(directory).manifest.num_bytes
    for times, copies in ((2.9, False), (3.1, True)):
        monkeypatch.setattr(open_files, "available_bytes", lambda times=times: times * num_bytes)
        dataset = ShardedDataset(directory)
        assert dataset.best_read_whole
        assert (dataset.will_need(EVERY, parts_of_all) is not None) == copies


def test_ragged_samples_are_taken_as_ever(tmp_path):
    rows = {"tokens": Ragged(torch.arange(6), torch.tensor([0, 1, 3, 6])), "number": np.arange(3)}
    write_arrays(tmp_path / "set", rows, samples_per_shard=2)
    dataset = ShardedDataset(tmp_path / "set")
    assert dataset.best_read_whole
    assert dataset.will_need(range(3), lambda: [np.arange(3)]) is None


def test_a_part_is_given_once_and_its_gaps_are_filled(directory):
    dataset = ShardedDataset(directory)
    shard = dataset.manifest.shards[0]
    flip(directory / shard.file, shard.places["image"].offset + 15 * 24)
    early = dataset.will_need(EVERY, parts_of_all)
    asked = []

    def late(gaps):
        asked.extend(gaps)
        return {"number": -gaps, "image": np.zeros((len(gaps), 3, 2))}

    assert early.take(3, late)["number"].tolist() == [*range(75, 100)]
    assert not asked
    first = early.take(0, late)
    assert asked == [*range(14, 21)]
    assert first["number"].tolist() == [*range(14), *range(-14, -21, -1), *range(21, 25)]
    assert first["image"].sum(dim=(1, 2)).count_nonzero() == 25 - 7
    assert early.take(3, late) is None


def rss_bytes():
    """Return how much memory of its own this process has."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def test_the_memory_of_a_part_goes_with_its_last_view():
    count, row = 64, MIB // 4 + 24  # parts do not end with pages
    array = PartedArray((count, row), np.dtype(np.uint8))
    array.values[:] = np.arange(count)[:, None]
    parts = [array.part(start, start + 4) for start in range(0, count, 4)]
    before = rss_bytes()
    kept = [parts[3][1:2], torch.from_numpy(parts[7])]
    del parts
    given_back = before - rss_bytes()
    assert given_back > 0.7 * array.values.nbytes
    assert given_back < array.values.nbytes
    assert (kept[0] == 13).all()
    assert (kept[1] == torch.arange(28, 32)[:, None]).all()
    # What is lost is whole pages, and no byte of other parts.
    assert not array.values[0, : row // PAGE_BYTES * PAGE_BYTES].any()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("order", ORDERS, ids=["global", "window"])
@pytest.mark.parametrize("damaged", [range(0), range(14, 21)], ids=["whole", "damaged"])
def test_ranks_together_get_every_sample_once(comm, folder, order, damaged, taken):
    if comm.rank == 0:
        write_arrays(folder, numbered(100), samples_per_shard=40, block_size=7)
        shard = Manifest.read(folder).shards[0]
        if damaged:
            flip(folder / shard.file, shard.places["image"].offset + damaged.start * 24)
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    loader = Loader(dataset, global_batch=8, comm=comm, on_corrupt="skip", **order)
    image = numbered(100)["image"]
    found = []
    for batch in loader:
        assert np.array_equal(batch["image"], image[batch["number"].numpy()])
        found += batch["number"].tolist()
    assert taken["early"] or damaged
    assert loader.num_skipped == len(damaged)
    every = sorted(number for of_rank in comm.allgather_object(found) for number in of_rank)
    assert every == sorted(set(range(100)) - set(damaged))
