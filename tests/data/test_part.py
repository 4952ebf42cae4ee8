"""Only bytes that lie in the file as they are get an offset."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data.format.part import raw_offset

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
