"""Check that blocks are verified when they are read ahead, with errors at the damaged samples."""

import os
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.core.errors import CorruptError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.io.open_files import read_ahead
from hpctrain.data.io.shardfile import OpenShard
from hpctrain.data.loader import Loader
from hpctrain.data.order.window import WindowShape
from hpctrain.data.reader import ShardedDataset
from tests.data.conftest import numbered
from tests.data.mixed_set import flip


class Held(Executor):
    """Run work only when the test requests it."""

    def __init__(self):
        self.work = []

    def submit(self, function, *args):
        future = Future()
        self.work.append((future, function, args))
        return future

    def go(self):
        for future, function, args in self.work:
            future.set_result(function(*args))


@pytest.fixture(params=["map", "read"])
def shard(request, directory):
    """Return the first shard, open, with 40 samples in blocks of 7."""
    return OpenShard(directory, Manifest.read(directory), 0, io=request.param)


@pytest.mark.parametrize("at_once", [1, 10**9])
def test_blocks_of_any_size_are_brought_ahead(shard, monkeypatch, at_once):
    monkeypatch.setattr("hpctrain.data.io.open_files._PIECE_BYTES", at_once)
    with ThreadPoolExecutor(2) as threads:
        read_ahead(threads, shard.file, np.array([39, 3, 20]), check=True, stays=True)
    assert np.flatnonzero(shard.file.checked).tolist() == [0, 2, 5]


def test_damage_found_by_reading_ahead_is_reported_when_the_samples_are_taken(directory):
    entry = Manifest.read(directory).shards[0]
    flip(directory / entry.file, entry.places["number"].offset + 15 * 8)
    shard = OpenShard(directory, Manifest.read(directory), 0)
    with ThreadPoolExecutor(2) as threads:
        read_ahead(threads, shard.file, np.arange(40), check=True, stays=True)
    assert np.flatnonzero(~shard.file.checked).tolist() == [2]
    with pytest.raises(CorruptError, match="samples 14 to 20"):
        shard.check_blocks(np.arange(40), again=False)
    with pytest.raises(CorruptError, match="samples 14 to 20"):
        list(Loader(ShardedDataset(directory), global_batch=8))


def test_without_checks_samples_are_requested_without_a_wait(shard):
    held = Held()
    read_ahead(held, shard.file, np.array([39, 3, 20]), check=False, stays=True)
    held.go()
    assert not shard.file.checked.any()


@pytest.mark.parametrize("io", ["auto", "map", "read"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize(
    "order", [{"order": "global"}, {"window": WindowShape(block=7, window=2, lanes=2)}]
)
def test_epochs_from_a_disk_have_every_sample(directory, io, verify, order):
    dataset, image = ShardedDataset(directory, io=io, verify=verify), numbered(100)["image"]
    assert not dataset.in_memory
    loader = Loader(dataset, global_batch=8, **order)
    for _ in range(2):
        found = []
        for batch in loader:
            assert np.array_equal(batch["image"], image[batch["number"]])
            found += batch["number"].tolist()
        assert sorted(found) == [*range(100)]
    # There is enough memory, so all checked blocks are kept.
    assert dataset.in_memory == (io != "read" and verify != "off")


def test_a_set_without_room_in_memory_is_read(directory, monkeypatch):
    monkeypatch.setattr("hpctrain.data.io.open_files.available_bytes", lambda: 1000)
    dataset = ShardedDataset(directory)
    list(Loader(dataset, global_batch=8))
    assert not dataset.in_memory


def test_failed_mapping_falls_back_to_reading(directory):
    shard = OpenShard(directory, Manifest.read(directory), 0, io="map")
    entry = Manifest.read(directory).shards[0]
    # Access beyond the end of a mapped file fails, as on a failing disk.
    os.truncate(directory / entry.file, entry.places["number"].offset)
    assert shard.file.wrong_blocks(np.arange(6)) == [0, 1, 2, 3, 4, 5]
