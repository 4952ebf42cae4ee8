"""Check datasets of HDF5 files: only values in the file itself, not in files that it links to."""

import pickle

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.packing.arrays import open_hdf5
from hpctrain.data.packing.source import WantedFields
from tests.data.packing.makers import hdf5, write

X = np.random.default_rng(0).integers(0, 255, (40, 5, 2), dtype=np.uint8)
Y = np.arange(40.0)


def test_any_rows_are_taken_also_in_another_process(tmp_path):
    write(tmp_path, {"a.h5": hdf5(x=X, even=Y % 2 == 0)})
    rows = np.array([0, 5, 6, 30, 39])
    source = open_hdf5([str(tmp_path / "a.h5")], WantedFields())
    for one in (source, pickle.loads(pickle.dumps(source))):
        found = one.take(rows)
        assert np.array_equal(found["x"], X[rows])
        assert np.array_equal(found["even"], rows % 2 == 0)


def test_values_in_other_files_are_reported(tmp_path, packed):
    X.tofile(tmp_path / "x.bin")
    write(tmp_path, {"b.h5": hdf5(x=X)})
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


def test_skipped_links_are_noted(tmp_path, packed):
    for part in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / part, "w") as file:
            file["in/x"] = Y.astype("f4")
            if part == "b.h5":
                file["soft"] = h5py.SoftLink("/in/x")
                file["gone"] = h5py.SoftLink("/nowhere")
                file["far"] = h5py.ExternalLink("o.h5", "/z")
                file["same"] = file["in/x"]
                file["in/up"] = file["/"]
    assert not packed(tmp_path / "a.h5")[0].notes
    done, found = packed(f"{tmp_path}/?.h5")
    assert np.array_equal(found["x"], [*Y.astype("f4")] * 2)
    (note,) = done.notes
    assert note.startswith(f"links in {tmp_path / 'b.h5'} are skipped")
    assert set(note.partition("it: ")[2].split(", ")) == {"soft", "gone", "far", "same", "in/up"}
