"""Check that written files are plain HDF5, and that failures leave the old data set or none."""

import json
from contextlib import suppress

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.conftest import numbered
from tests.data.mixed_set import names_in, numbers_in
from tests.full_disk import largest_file

FIELDS = {"image": ((3, 2), "f4"), "number": ((), "i8")}


def test_plain_h5py_reads_a_shard_and_its_description(directory):
    manifest = Manifest.read(directory)
    assert [shard.num_samples for shard in manifest.shards] == [40, 40, 20]
    for index, shard in enumerate(manifest.shards):
        with h5py.File(directory / shard.file) as file:
            first = 40 * index
            assert file["data/number"][:].tolist() == list(range(first, first + shard.num_samples))
            assert file["crc/image"].shape == (manifest.num_blocks(shard),)
            attributes = dict(file.attrs)
        assert json.loads(attributes.pop("fields"))["image"]["shape"] == [3, 2]
        assert attributes.pop("created_by").startswith("hpctrain ")
        assert attributes == {
            "format": "hpctrain-h5",
            "version": 1,
            "dataset_uuid": manifest.uuid,
            "split": "train",
            "shard": index,
            "n": shard.num_samples,
            "first_index": first,
            "block_size": 7,
            "complete": 1,
        }


def test_a_shard_has_the_superblock_of_hdf5_1_10(directory):
    with h5py.File(directory / Manifest.read(directory).shards[0].file) as file:
        assert file.libver[0] == "earliest"
    for shard in Manifest.read(directory).shards:
        assert (directory / shard.file).read_bytes()[8] <= 3


@pytest.mark.parametrize(
    "array",
    [
        np.array([True, False]),
        np.array([1, 2], "u2"),
        np.array([1, 2], ">i8"),
        np.array([0.5, 1.5], "f2"),
        np.zeros((2, 0)),
        np.zeros((2, 3, 0, 4), "f4"),
        np.arange(12.0).reshape(6, 2)[::3],
    ],
    ids=str,
)
def test_every_dtype_and_layout_of_an_array_is_kept(tmp_path, array):
    write_arrays(tmp_path, {"x": array}, samples_per_shard=3)
    read = ShardedDataset(tmp_path).take([1, 0])["x"].numpy()
    assert read.dtype == array.dtype.newbyteorder("<")
    assert np.array_equal(read, array[::-1])


def test_a_reader_of_the_old_data_set_does_not_see_the_new_one(directory):
    reader = ShardedDataset(directory)
    reader.take([0])
    write_arrays(directory, numbered(5), samples_per_shard=2)
    assert reader.take([39])["number"].tolist() == [39]
    with pytest.raises(DataError, match="cannot read shard"):
        reader.take([99])


@pytest.mark.parametrize("num_bytes", [0, 1000, 8192, 100_000, 900_000])
def test_a_full_disk_is_reported_and_keeps_the_old_data_set(directory, num_bytes):
    old = names_in(directory)
    with (
        largest_file(num_bytes),
        pytest.raises(
            DataError,
            match=r"cannot write a data set to .*: File too large; raise the limit",
        ),
    ):
        write_arrays(directory, numbered(50_000), samples_per_shard=30_000)
    assert names_in(directory) == old
    assert numbers_in(directory) == list(range(100))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({"image": np.zeros((2, 3, 2), "f4")}, r"have the fields \['image', 'number'\]"),
        ({"image": np.zeros((2, 2, 3), "f4"), "number": [1, 2]}, r"got \(2, 2, 3\)"),
        ({"image": np.zeros((2, 3, 2), "f8"), "number": [1, 2]}, "for all values of float64"),
        ({"image": np.zeros((2, 3, 2), "f4"), "number": [1]}, "same number of samples"),
        ({"image": np.zeros((2, 3, 2), "f4"), "number": 1}, r"got \(\)"),
    ],
)
def test_samples_that_do_not_fit_are_reported(tmp_path, samples, words):
    with (
        pytest.raises(DataError, match=words),
        ShardWriter(tmp_path, FIELDS, samples_per_shard=3) as writer,
    ):
        writer.append(samples)


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_cannot_be_used_after_its_block(tmp_path, fails):
    writer = ShardWriter(tmp_path, FIELDS, samples_per_shard=3)
    samples = {"image": np.zeros((2, 3, 2), "f4"), "number": [1, 2]}
    with suppress(ZeroDivisionError), writer:
        writer.append(samples)
        assert 1 // (not fails)
    before = sorted(tmp_path.iterdir())
    for again in (lambda: writer.append(samples), writer.__enter__):
        with pytest.raises(DataError, match=r"a ShardWriter must be open .* create a new one"):
            again()
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_holds_one_split(directory):
    with pytest.raises(DataError, match="holds 'train'; write 'test' to another directory"):
        write_arrays(directory, numbered(5), samples_per_shard=5, split="test")


def test_invalid_arguments_are_reported(tmp_path):
    with pytest.raises(DataError, match="samples_per_shard must be at least 1, got 0"):
        write_arrays(tmp_path, numbered(5), samples_per_shard=0)
    with pytest.raises(DataError, match="is a scalar"):
        write_arrays(tmp_path, {"x": 5}, samples_per_shard=1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="another directory"):
        write_arrays(tmp_path / "file", numbered(5), samples_per_shard=5)
