"""Datasets of HDF5 files, of any layout, are packed as they are."""

import pickle

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.packing.hdf5 import open_hdf5
from hpctrain.data.packing.source import WantedFields

X = np.random.default_rng(0).integers(0, 255, (40, 5, 2), dtype=np.uint8)
Y = np.arange(40.0)


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = X
        file.create_dataset("more/chunked", data=Y, chunks=(7,), compression="gzip")
        file.create_dataset("more/big", data=Y, dtype=">f8")
        file["short"] = Y[:3]
        file["even"] = Y % 2 == 0
        # 12 bits of each 16: the bytes in the file are not those of numpy's type.
        narrow = h5py.h5t.STD_I16LE.copy()
        narrow.set_precision(12)
        narrow.set_offset(4)
        space = h5py.h5s.create_simple((40,))
        at = h5py.h5d.create(file.id, b"narrow", narrow, space)
        at.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(40, dtype="i2"))
        texts = file.create_dataset("texts", 40, h5py.string_dtype())
        texts[:] = ["é" * index for index in range(40)]
        rows = file.create_dataset("rows", 40, h5py.vlen_dtype(np.int16))
        for index in range(40):
            rows[index] = np.arange(index)
    return tmp_path / "a.h5"


FIELDS = {"x": "/images", "y": "more/chunked", "b": "/more/big", "t": "/texts", "r": "rows"}


def test_any_rows_are_taken(file):
    rows = np.array([0, 5, 6, 30, 39])
    fields = {**FIELDS, "narrow": "narrow", "even": "even"}
    source = open_hdf5([str(file)], WantedFields(fields=fields))
    for one in (source, pickle.loads(pickle.dumps(source))):
        found = one.take(rows)
        assert np.array_equal(found["x"], X[rows])
        assert np.array_equal(found["y"], Y[rows])
        assert np.array_equal(found["b"], Y[rows])
        assert np.array_equal(found["narrow"], Y[rows])
        assert np.array_equal(found["even"], rows % 2 == 0)
        assert [row.tolist() for row in found["r"]] == [list(range(index)) for index in rows]
        assert [len(bytes(text).decode()) for text in found["t"]] == list(rows)


@pytest.mark.parametrize("shuffle", [None, 1])
def test_datasets_of_each_layout_are_read_in_any_order(file, packed, shuffle):
    done, found = packed(file, fields=FIELDS, shuffle=shuffle)
    order = np.array(found["y"], int)
    assert sorted(order) == list(range(40))
    assert (list(order) == list(range(40))) == (shuffle is None)
    assert np.array_equal(found["x"], X[order])
    assert np.array_equal(found["b"], Y[order])
    assert [bytes(text).decode() for text in found["t"]] == ["é" * index for index in order]
    assert [row.tolist() for row in found["r"]] == [list(range(index)) for index in order]
    assert done.manifest.fields["r"].dtype == "<i2"


def test_all_datasets_are_packed_by_the_last_part_of_their_path(tmp_path, packed):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["a/x"], file["b/y"] = X, Y
    _, found = packed(tmp_path / "b.h5")
    assert np.array_equal(found["x"], X)
    assert np.array_equal(found["y"], Y)


def test_what_cannot_be_packed_is_told(file, packed, tmp_path):
    with pytest.raises(DataError, match=r"same number of samples.*'short': 3"):
        packed(file)
    with pytest.raises(DataError, match="no 'labels'"):
        packed(file, fields={"y": "/labels"})
    with h5py.File(tmp_path / "b.h5", "w") as other:
        other["x"], other["z"] = 3, np.zeros(5, complex)
    with pytest.raises(DataError, match="counts samples"):
        packed(tmp_path / "b.h5", fields={"x": "x"})
    with pytest.raises(DataError, match="convert it first"):
        packed(tmp_path / "b.h5", fields={"z": "z"})
    with h5py.File(tmp_path / "b.h5", "w") as other:
        other.create_dataset("t", (5, 2), h5py.string_dtype())
    with pytest.raises(DataError, match=r"one dimension, .*:/t has \(5, 2\)"):
        packed(tmp_path / "b.h5")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"a.h5 cannot be read as an HDF5 file"):
        packed(file, fields=FIELDS)


def test_values_in_other_files_are_told(tmp_path, packed):
    X.tofile(tmp_path / "x.bin")
    with h5py.File(tmp_path / "b.h5", "w") as other:
        other["x"] = X
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource(tmp_path / "b.h5", "x", X.shape)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"] = X
        where = [(str(tmp_path / "x.bin"), 0, X.nbytes)]
        file.create_dataset("outside", X.shape, X.dtype, external=where)
        file.create_virtual_dataset("virtual", layout)
    for name, words in [("outside", "external storage"), ("virtual", "a virtual dataset")]:
        with pytest.raises(DataError, match=f"/{name} is {words}; copy them into the file"):
            packed(tmp_path / "c.h5", fields={"x": name})
    _, found = packed(tmp_path / "c.h5", fields={"x": "x"})
    assert np.array_equal(found["x"], X)


LINKS = {
    "soft": ("soft -> /in/x", lambda _: h5py.SoftLink("/in/x")),
    "gone": ("gone -> /nowhere", lambda _: h5py.SoftLink("/nowhere")),
    "far": ("far -> o.h5:/z", lambda _: h5py.ExternalLink("o.h5", "/z")),
    "same": ("same, another name of in/x", lambda file: file["in/x"]),
    "other": ("other, another name of in", lambda file: file["in"]),
    "in/up": ("in/up, another name of /", lambda file: file["/"]),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_that_are_left_out_are_noted(tmp_path, packed, name):
    words, make = LINKS[name]
    for part in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / part, "w") as file:
            file["in/x"] = Y
            if part == "b.h5":
                file[name] = make(file)
    assert not packed(tmp_path / "a.h5")[0].notes
    done, found = packed(f"{tmp_path}/?.h5")
    assert np.array_equal(found["x"], [*Y, *Y])
    (note,) = done.notes
    assert note.startswith(f"links of {tmp_path / 'b.h5'} are left out")
    assert note.endswith(words)
