"""Check the file of a shard: offsets of its values, its crc32, and errors of the disk."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.core.atomic import crc32_of
from hpctrain.data.format import part
from hpctrain.data.format.hdf5_values import raw_offset
from hpctrain.data.format.part import PartFile, number
from hpctrain.data.writer import write_arrays
from tests.full_disk import largest_file

VALUES = np.arange(1000, dtype="<f4")


def virtual(file):
    layout = h5py.VirtualLayout(1000, "<f4")
    layout[:] = h5py.VirtualSource(file.create_dataset("y", data=VALUES))
    file.create_virtual_dataset("x", layout)


def compact(file):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)


OTHERS = {
    "chunked": lambda file: file.create_dataset("x", data=VALUES, chunks=(100,)),
    "compressed": lambda file: file.create_dataset("x", data=VALUES, compression="gzip"),
    "big-endian": lambda file: file.create_dataset("x", data=VALUES, dtype=">f4"),
    "unwritten": lambda file: file.create_dataset("x", 1000, "<f4"),
    "external": lambda file: file.create_dataset(
        "x", data=VALUES, external=[(file.filename + ".raw", 0, 4000)]
    ),
    "virtual": virtual,
    "compact": compact,
}


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        yield file


def test_plain_values_have_an_offset_and_none_beyond_the_end_of_the_file(file):
    dataset = file.create_dataset("x", data=VALUES)
    offset = raw_offset(dataset, 10**6)
    file.flush()
    assert Path(file.filename).read_bytes()[offset : offset + 4000] == VALUES.tobytes()
    assert raw_offset(dataset, offset + 4000) is not None
    assert raw_offset(dataset, offset + 3999) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_have_none(file, name):
    OTHERS[name](file)
    assert raw_offset(file["x"], 10**6) is None


@pytest.mark.parametrize("num_fields", [1, 300])
@pytest.mark.parametrize("combined", [True, False])
def test_a_shard_that_learns_its_place_has_the_crc32_of_its_bytes(
    tmp_path, monkeypatch, num_fields, combined
):
    if not combined:  # as without ISA-L
        monkeypatch.setattr(part, "crc32_combine", None)
    arrays = {f"field_with_a_long_name_{index}": np.arange(500) for index in range(num_fields)}
    (shard,) = write_arrays(tmp_path, arrays, samples_per_shard=500).shards
    path = tmp_path / shard.file
    before = path.read_bytes()
    for index, first_index in ((7, 10**12), (0, 0)):
        shard = number(path, shard, index=index, first_index=first_index)
        assert (shard.crc32, shard.num_bytes) == (crc32_of(path), path.stat().st_size)
        with h5py.File(path) as file:
            assert (file.attrs["shard"], file.attrs["first_index"]) == (index, first_index)
    assert path.read_bytes() == before


@pytest.mark.parametrize("num_bytes", [0, 100, 3000, 50_000])
def test_a_full_disk_that_hdf5_does_not_report_is_found_by_the_next_check(tmp_path, num_bytes):
    path = tmp_path / "full.h5"
    with largest_file(num_bytes):
        storage = PartFile(path, "w+b")
        with h5py.File(storage, "w") as full:
            full["x"] = np.arange(30_000)
            full["y"] = [1]
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                storage.check()
        storage.close()
    assert path.stat().st_size <= num_bytes


def test_signal_during_a_write_is_raised_by_check(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    storage = PartFile(tmp_path / "cut.h5", "w+b")
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", interrupt)
        with h5py.File(storage, "w") as cut:
            cut["x"] = np.arange(30_000)
    with pytest.raises(KeyboardInterrupt):
        storage.check()
    storage.close()
