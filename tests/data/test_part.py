"""Only bytes that lie in the file as they are get an offset."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data.format.part import raw_offset


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        yield file


VALUES = np.arange(1000, dtype="<f4")


def make_plain(file):
    return file.create_dataset("x", data=VALUES)


def make_chunked(file):
    return file.create_dataset("x", data=VALUES, chunks=(100,))


def make_compressed(file):
    return file.create_dataset("x", data=VALUES, compression="gzip")


def make_big_endian(file):
    return file.create_dataset("x", data=VALUES, dtype=">f4")


def make_unwritten(file):
    return file.create_dataset("x", 1000, "<f4")


def make_external(file):
    return file.create_dataset("x", data=VALUES, external=[(file.filename + ".raw", 0, 4000)])


def make_virtual(file):
    layout = h5py.VirtualLayout(1000, "<f4")
    layout[:] = h5py.VirtualSource(make_plain(file))
    return file.create_virtual_dataset("virtual", layout)


def make_compact(file):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
    return file["x"]


def test_plain_values_have_an_offset(file):
    dataset = make_plain(file)
    offset = raw_offset(dataset, 10**6)
    file.flush()
    assert Path(file.filename).read_bytes()[offset : offset + 4000] == VALUES.tobytes()


def test_values_beyond_the_end_of_the_file_have_none(file):
    dataset = make_plain(file)
    end = dataset.id.get_offset() + 4000
    assert raw_offset(dataset, end) is not None
    assert raw_offset(dataset, end - 1) is None


@pytest.mark.parametrize(
    "make",
    [
        make_chunked,
        make_compressed,
        make_big_endian,
        make_unwritten,
        make_external,
        make_virtual,
        make_compact,
    ],
)
def test_other_values_have_none(file, make):
    assert raw_offset(make(file), 10**6) is None
