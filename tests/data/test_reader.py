"""Check that any method, thread and process reads the samples that were written."""

import fcntl
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.dataset_manifest import MANIFEST, Manifest
from hpctrain.data.io import values
from hpctrain.data.io.values import ChunkCache
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from tests.data.conftest import numbered
from tests.data.mixed_set import mixed, write_mixed


def read_by_hdf5_only(directory):
    """Remove the offsets from the manifest, as for files that cannot be mapped."""
    manifest = Manifest.read(directory)
    shards = tuple(
        replace(
            shard,
            places={
                name: replace(place, offset=None, crc_offset=None)
                for name, place in shard.places.items()
            },
        )
        for shard in manifest.shards
    )
    replace(manifest, shards=shards).write(directory)
    return "auto"


@pytest.fixture(
    params=["map", "read", "auto", read_by_hdf5_only, "map bit by bit", "read bit by bit"]
)
def way(request, monkeypatch):
    """Parametrize over methods of reading: a function of the directory that returns ``io``."""
    if callable(request.param):
        return request.param
    io, _, in_bits = request.param.partition(" ")
    if in_bits:
        real = os.preadv

        def read_little(descriptor, buffers, *where):
            return real(descriptor, [next(b for b in buffers if len(b))[:50]], *where)

        monkeypatch.setattr(os, "preadv", read_little)
    return lambda _: io


@pytest.fixture
def reading(directory, way):
    """Provide the data set once for each method, as a function that opens it."""
    io = way(directory)
    return lambda **options: ShardedDataset(directory, io=io, **options)


def is_whole(read):
    whole = numbered(100)
    return all(np.array_equal(read[name], whole[name]) for name in whole)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return sets of all kinds of fields by compression and samples per shard, written once."""

    @cache
    def write(compression, samples_per_shard):
        directory = tmp_path_factory.mktemp("mixed") / "set"
        write_mixed(directory, compression=compression, samples_per_shard=samples_per_shard)
        return directory

    return write


@pytest.mark.parametrize("samples_per_shard", [100, 40, 3])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_all_read_methods_return_the_same_samples(
    tmp_path, written, way, compression, samples_per_shard
):
    directory, whole = tmp_path / "set", mixed(100)
    shutil.copytree(written(compression, samples_per_shard), directory)
    dataset = ShardedDataset(directory, io=way(directory))
    dice = np.random.default_rng(0)
    for indices in (
        *dice.integers(0, 100, (5, 30)),
        *([99, 0, 50, 50, 3], [7], [41, 40, 43], [], range(100), torch.arange(40)),
        dice.permutation(100),
    ):
        read, order = dataset.take(indices), np.array(list(indices), int)
        for name in ("image", "number", "label"):
            assert np.array_equal(read[name].numpy(), whole[name][order])
        for name in ("text", "boxes"):
            assert len(read[name]) == len(order)
            for sample, index in zip(read[name], order, strict=True):
                assert np.array_equal(sample.numpy(), whole[name][index])


def test_a_batch_belongs_to_its_caller(tmp_path):
    whole = {"x": np.arange(40_000).reshape(40, 1000)}
    write_arrays(tmp_path, whole, samples_per_shard=40)
    dataset = ShardedDataset(tmp_path)
    kept = [dataset.take(range(k, 40))["x"] for k in range(12)]
    views = [dataset.take(range(k, 40))["x"][3:5].T for k in range(12)]
    for k in range(12):
        assert np.array_equal(kept[k], whole["x"][k:])
        assert np.array_equal(views[k], whole["x"][k + 3 : k + 5].T)


@pytest.mark.parametrize("row_bytes", [16, values._LARGE_ROW_BYTES])
def test_rows_of_any_size_are_gathered_from_several_mapped_shards(tmp_path, row_bytes):
    whole = np.random.default_rng(0).integers(0, 99, (40, row_bytes // 8))
    write_arrays(tmp_path, {"x": whole}, samples_per_shard=9)
    dataset = ShardedDataset(tmp_path, io="map")
    for wanted in (np.random.default_rng(1).permutation(40), [39, 0, 20, 20, 1]):
        assert np.array_equal(dataset.take(wanted)["x"].numpy(), whole[wanted])


def test_end_of_a_file_raises(directory):
    with (
        (directory / MANIFEST).open("rb") as file,
        pytest.raises(OSError, match="ends before its"),
    ):
        values.read_at(file.fileno(), 0, 10**6)


def test_a_chunk_is_decoded_once_while_it_fits():
    cache, decoded = ChunkCache(max_bytes=800), []

    def get(home):
        def decode():
            decoded.append(home)
            return np.full(50, home)

        return cache.get((0, home), decode)[0]

    assert [get(home) for home in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert decoded == [1, 2, 3, 2]


def test_a_data_set_describes_itself(tmp_path):
    manifest = write_mixed(tmp_path)
    dataset = ShardedDataset(tmp_path)
    assert len(dataset) == 100
    assert dataset.fields["image"].shape == (3, 2)
    assert dataset.uuid == manifest.uuid
    assert dataset.block_size == 7
    # image 24, number 8, label 1, text on average 2 * 4, boxes nearly 1 * 16
    assert dataset.sample_bytes == pytest.approx(24 + 8 + 1 + 8 + 15.84)


@pytest.mark.parametrize("indices", [[100], [-1], [0, 5, 1000], [-(2**62)]])
def test_index_out_of_range_raises(directory, indices):
    dataset = ShardedDataset(directory)
    for read in (dataset.take, dataset.will_need):
        with pytest.raises(DataError, match=r"indices must be in \[0, 100\)"):
            read(indices)


def test_invalid_arguments_are_reported(directory):
    with pytest.raises(DataError, match="first, always, off, got 'never'"):
        ShardedDataset(directory, verify="never")
    with pytest.raises(DataError, match="map, read, auto, got 'mmap'"):
        ShardedDataset(directory, io="mmap")


def test_reading_ahead_changes_no_result_and_does_not_fail(tmp_path):
    manifest = write_mixed(tmp_path, compression="zstd")
    dataset = ShardedDataset(tmp_path, io="read")
    for indices in (range(100), [99, 0, 41], []):
        dataset.will_need(indices)
    (tmp_path / manifest.shards[1].file).unlink()
    other = ShardedDataset(tmp_path, manifest=manifest)
    other.will_need(range(100))
    assert dataset.take([99, 0, 5])["number"].tolist() == [99, 0, 5]
    assert other.take([99, 0, 5])["number"].tolist() == [99, 0, 5]
    with pytest.raises(CorruptError, match="No such file"):
        other.take([40])


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def open_files(directory):
    """Return the open files below a directory, without files of other tests."""
    links = (os.path.realpath(f"/proc/self/fd/{name}") for name in descriptors())
    return sorted(link for link in links if Path(link).is_relative_to(directory.resolve()))


def test_a_data_set_that_is_dropped_closes_its_files(directory):
    dataset = ShardedDataset(directory, io="map")
    dataset.take(range(100))
    shards = sorted(str(directory.resolve() / shard.file) for shard in dataset.manifest.shards)
    assert open_files(directory) == shards
    del dataset
    assert open_files(directory) == []


def test_more_shards_than_descriptors_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 40))
    write_arrays(tmp_path, numbered(100), samples_per_shard=3)
    before = len(descriptors())
    dataset = ShardedDataset(tmp_path)
    for _ in range(2):
        assert is_whole(dataset.take(np.arange(100)))
    assert len(descriptors()) <= before + 10


def test_a_lock_of_another_program_does_not_matter(directory, reading):
    with (directory / Manifest.read(directory).shards[0].file).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_whole(reading().take(np.arange(100)))


def test_a_pickled_data_set_opens_its_own_files(reading):
    dataset = reading()
    dataset.take(np.arange(100))
    text = pickle.dumps(dataset)
    assert len(text) < 10_000
    assert is_whole(pickle.loads(text).take(np.arange(100)))


def test_a_child_after_a_fork_opens_its_own_files(reading):
    dataset = reading()
    dataset.take([0, 50, 99])
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if is_whole(dataset.take(np.arange(100))) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_whole(dataset.take(np.arange(100)))


def test_many_threads_read_one_data_set(reading):
    dataset = reading()
    together = threading.Barrier(4)

    def read(k):
        if k < 4:
            together.wait()  # the first thread to read opens the shards
        dataset.will_need([k])
        return dataset.take(np.roll(np.arange(100), k))

    with ThreadPoolExecutor(4) as pool:
        for k, batch in enumerate(pool.map(read, range(40))):
            assert batch["number"].tolist() == np.roll(np.arange(100), k).tolist()


@pytest.fixture
def shared(world, directory):
    """Return the directory of rank 0 on all ranks."""
    return world.bcast(directory)


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_open_the_same_data_set(world, shared):
    dataset = ShardedDataset.open(shared, MpiCommunicator(world))
    assert is_whole(dataset.take(np.arange(100)))
    assert len(set(world.allgather(dataset.manifest.uuid))) == 1


@pytest.mark.ranks(1, 2, 3, 4)
def test_data_unreadable_on_one_rank_raise_on_every_rank(world, shared):
    comm, last = MpiCommunicator(world), world.size - 1
    mine = shared.with_name("not-mounted") if last and world.rank == last else shared
    if last:
        with pytest.raises(DataError, match=rf"rank {last}: cannot read shard .*not-mounted"):
            ShardedDataset.open(mine, comm)
    shard = Manifest.read(shared).shards[1]
    world.Barrier()
    if world.rank == 0:
        os.truncate(shared / shard.file, 100)
    world.Barrier()
    with pytest.raises(
        DataError, match=rf"{shard.file}: the file must have {shard.num_bytes} bytes"
    ):
        ShardedDataset.open(shared, comm)
    world.Barrier()
    if world.rank == 0:
        (shared / MANIFEST).unlink()
    with pytest.raises(DataError, match="has none"):
        ShardedDataset.open(shared, comm)
