"""Samples are read as they were written, or an error names the shard."""

import fcntl
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.data.layout import MANIFEST, Manifest
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from hpctrain.errors import DataError
from tests.data.conftest import numbered


def read_by_hdf5_only(directory):
    """Take the offsets out of the manifest, as for files that cannot be mapped."""
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


def read_by_mapping(directory):
    """Leave the data set as it is written."""


@pytest.fixture(params=[read_by_mapping, read_by_hdf5_only])
def way(request):
    """Give each way to read a data set: a function that makes it the way of that one."""
    return request.param


@pytest.fixture
def stored(directory, way):
    """Give the data set once for each way to read it."""
    way(directory)
    return directory


def take_all(directory, verify="first"):
    return ShardedDataset(directory, verify=verify).take(np.arange(100))


def is_whole(read):
    whole = numbered(100)
    return all(np.array_equal(read[name], whole[name]) for name in whole)


@given(data=st.data(), n=st.sampled_from([1, 5, 97]))
def test_any_samples_in_any_order_are_those_of_the_arrays(dataset_of, data, n):
    indices = data.draw(st.lists(st.integers(0, n - 1)))
    read, whole = dataset_of(n).take(indices), numbered(n)
    for name, array in whole.items():
        assert np.array_equal(read[name].numpy(), array[np.array(indices, int)])


def test_both_ways_to_read_give_the_same(stored):
    dataset, whole = ShardedDataset(stored), numbered(100)
    for indices in ([99, 0, 50, 50, 3], [7], [], range(100), torch.arange(40)):
        read = dataset.take(indices)
        for name, array in whole.items():
            assert np.array_equal(read[name].numpy(), array[np.array(list(indices), int)])


def test_what_was_taken_can_be_changed(stored):
    dataset = ShardedDataset(stored)
    dataset.take([1])["number"].zero_()
    assert dataset.take([1])["number"].tolist() == [1]


def test_length_and_fields_are_those_of_the_manifest(directory):
    dataset = ShardedDataset(directory)
    assert len(dataset) == 100
    assert dataset.fields["image"].shape == (3, 2)


@pytest.mark.parametrize("indices", [[100], [-1], [0, 5, 1000]])
def test_an_index_out_of_range_is_told(directory, indices):
    with pytest.raises(DataError, match=r"indices are in \[0, 100\)"):
        ShardedDataset(directory).take(indices)


@contextmanager
def flipped(path, byte, bit):
    """Flip one bit of a file, in place, for a while."""
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))
        file.flush()
        yield
        file.seek(byte)
        file.write(bytes([value]))


def test_every_flipped_bit_of_the_data_is_found(directory, way):
    manifest = Manifest.read(directory)
    way(directory)
    dice = random.Random(0)
    places = [
        (shard, place.offset + byte)
        for shard in manifest.shards
        for name, place in shard.places.items()
        for byte in range(shard.num_samples * manifest.fields[name].sample_bytes)
    ]
    for shard, byte in dice.sample(places, 150):
        with flipped(directory / shard.file, byte, dice.randrange(8)):
            for verify in ("first", "always"):
                with pytest.raises(
                    DataError, match=rf"{shard.file} is damaged: block \d+ of field"
                ):
                    take_all(directory, verify)
    assert is_whole(take_all(directory))


def test_a_flipped_bit_anywhere_is_found_or_harmless(stored):
    dice = random.Random(1)
    for _ in range(300):
        shard = dice.choice(Manifest.read(stored).shards)
        byte, bit = dice.randrange(shard.num_bytes), dice.randrange(8)
        # Any other error than the one that is meant for users fails the test.
        with flipped(stored / shard.file, byte, bit), suppress(DataError):
            assert is_whole(take_all(stored))


def test_a_damaged_block_is_named_with_its_samples(directory):
    shard = Manifest.read(directory).shards[1]
    with flipped(directory / shard.file, shard.places["number"].offset + 8 * 30, 0):
        dataset = ShardedDataset(directory)
        dataset.take(np.arange(0, 68))
        with pytest.raises(DataError, match=r"block 4 of field number \(samples 68 to 74 of"):
            dataset.take([74])


def test_verify_says_when_a_block_is_checked(directory):
    shard = Manifest.read(directory).shards[0]
    first, always = (ShardedDataset(directory, verify=verify) for verify in ("first", "always"))
    for dataset in (first, always):
        dataset.take([0])
    with flipped(directory / shard.file, shard.places["number"].offset, 0):
        assert first.take([0])["number"].tolist() == [1]
        with pytest.raises(DataError, match="damaged"):
            always.take([0])
        assert ShardedDataset(directory, verify="off").take([0])["number"].tolist() == [1]
    with pytest.raises(DataError, match="first, always or off, got 'never'"):
        ShardedDataset(directory, verify="never")


@pytest.mark.parametrize("num_bytes", [0, 100, 12_000, -1])
def test_a_truncated_shard_is_named_when_the_set_is_opened(directory, num_bytes):
    shard = Manifest.read(directory).shards[1]
    os.truncate(directory / shard.file, num_bytes % shard.num_bytes)
    with pytest.raises(DataError, match=rf"{shard.file} has {shard.num_bytes} bytes .*truncated"):
        ShardedDataset(directory)


def test_a_shard_truncated_later_is_named_when_it_is_read(directory):
    dataset = ShardedDataset(directory)
    shard = dataset.manifest.shards[1]
    os.truncate(directory / shard.file, 5000)
    assert dataset.take([0, 99])["number"].tolist() == [0, 99]
    with pytest.raises(DataError, match=rf"{shard.file} has {shard.num_bytes} bytes"):
        dataset.take([40])


def test_a_missing_shard_is_named_when_the_set_is_opened(directory):
    shard = Manifest.read(directory).shards[2]
    (directory / shard.file).unlink()
    with pytest.raises(DataError, match=rf"cannot read shard .*{shard.file}: No such file"):
        ShardedDataset(directory)


def test_a_shard_of_another_data_set_is_found(stored, tmp_path):
    other = {name: array[::-1] for name, array in numbered(100).items()}
    theirs = write_arrays(tmp_path / "other", other, samples_per_shard=40, block_size=7).shards[0]
    mine = Manifest.read(stored).shards[0]
    assert theirs.num_bytes == mine.num_bytes
    (tmp_path / "other" / theirs.file).rename(stored / mine.file)
    with pytest.raises(DataError, match=f"{mine.file} is not the file that its manifest"):
        ShardedDataset(stored).take([0])


def test_a_filtered_shard_is_read_through_hdf5(directory):
    read_by_hdf5_only(directory)
    manifest = Manifest.read(directory)
    path = directory / manifest.shards[0].file
    with h5py.File(path, "r+") as file:
        for name in manifest.fields:
            values = file[f"data/{name}"][:]
            del file[f"data/{name}"]
            file.create_dataset(f"data/{name}", data=values, compression="gzip", chunks=True)
    first = replace(manifest.shards[0], num_bytes=path.stat().st_size)
    replace(manifest, shards=(first, *manifest.shards[1:])).write(directory)
    assert is_whole(take_all(directory))


def test_a_lock_of_another_program_does_not_matter(stored):
    with (stored / Manifest.read(stored).shards[0].file).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_whole(take_all(stored))


def test_a_pickled_data_set_opens_its_own_files(stored):
    dataset = ShardedDataset(stored)
    dataset.take([0])
    text = pickle.dumps(dataset)
    assert len(text) < 10_000
    assert is_whole(pickle.loads(text).take(np.arange(100)))


def test_a_child_after_a_fork_opens_its_own_files(stored):
    dataset = ShardedDataset(stored)
    dataset.take([0])
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if is_whole(dataset.take(np.arange(100))) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_whole(dataset.take(np.arange(100)))


def test_many_threads_read_one_data_set(stored):
    dataset = ShardedDataset(stored)
    with ThreadPoolExecutor(4) as pool:
        reads = pool.map(dataset.take, [np.roll(np.arange(100), k) for k in range(40)])
        for k, read in enumerate(reads):
            assert read["number"].tolist() == np.roll(np.arange(100), k).tolist()


@pytest.fixture
def shared(world, directory):
    """Give the directory of rank 0 to all ranks."""
    return world.bcast(directory)


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_open_the_same_data_set(world, shared):
    dataset = ShardedDataset.open(shared, MpiCommunicator(world))
    assert is_whole(dataset.take(np.arange(100)))
    assert len(set(world.allgather(dataset.manifest.uuid))) == 1


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_missing_manifest_is_told_on_every_rank(world, shared):
    world.Barrier()
    if world.rank == 0:
        (shared / MANIFEST).unlink()
    with pytest.raises(DataError, match="there is none in"):
        ShardedDataset.open(shared, MpiCommunicator(world))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_truncated_shard_is_told_on_every_rank(world, shared, index):
    shard = Manifest.read(shared).shards[index]
    world.Barrier()
    if world.rank == 0:
        os.truncate(shared / shard.file, 100)
    world.Barrier()
    with pytest.raises(DataError, match=rf"{shard.file} has {shard.num_bytes} bytes"):
        ShardedDataset.open(shared, MpiCommunicator(world))


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_does_not_see_the_files_is_named_on_every_rank(world, shared):
    last = world.size - 1
    mine = shared.with_name("not-mounted") if world.rank == last else shared
    with pytest.raises(DataError, match=rf"rank {last}: cannot read shard .*not-mounted"):
        ShardedDataset.open(mine, MpiCommunicator(world))
