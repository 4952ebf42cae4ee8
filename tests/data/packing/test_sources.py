"""Check that sources of every kind give the same samples in the same order."""

import csv
import io
import re
from functools import partial

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch

from hpctrain.core.errors import DataError
from hpctrain.data.packing import pack as pack_module
from tests.data.packing.makers import arrow, hdf5, npy, npz, parquet, samples_tar, write

N = 60
X = np.random.default_rng(0).random((N, 3), dtype=np.float32)
Y = np.arange(N)
TEXTS = ["é" * index for index in range(N)]

CODE = """
import numpy as np
X = np.random.default_rng(0).random((60, 3), dtype=np.float32)

def rows():
    for i in range(60):
        yield {"x": X[i], "y": i, "t": "é" * i}

class Items:
    def __len__(self): return 60
    def __getitem__(self, i): return X[i], i, "é" * i

LIST = [{"x": x, "y": i, "t": "é" * i} for i, x in enumerate(X)]
"""
IN_TUPLES = {"fields": {"x": "0", "y": "1", "t": "2"}}


def chunked(values, **options):
    return lambda file, name: file.create_dataset(name, data=values, chunks=True, **options)


def narrow(file, name):
    """Store 12 of every 16 bits, so that the bytes in the file differ from numpy's dtype."""
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    at = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((N,)))
    at.write(h5py.h5s.ALL, h5py.h5s.ALL, Y.astype("i2"))


def rows_of_bytes(file, name):
    rows = file.create_dataset(name, N, h5py.vlen_dtype(np.uint8))
    for index, text in enumerate(TEXTS):
        rows[index] = np.frombuffer(text.encode(), np.uint8)


def table(first=0, last=N, between=","):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=between)
    writer.writerow(["a", "b", "c", "y", "t"])
    for index in range(first, last):
        writer.writerow([*map(str, X[index]), index, TEXTS[index]])
    return out.getvalue()


def columns(first, last, make=parquet):
    some = slice(first, last)
    rows = pa.array(list(X[some]), pa.list_(pa.float32(), 3))
    return make(x=rows, y=Y[some], t=TEXTS[some])


def archive(first, last, mode="w"):
    def files(index):
        text = TEXTS[index].encode()
        return {"x.npy": npy(X[index]), "cls": str(index).encode(), "bin": text}

    return samples_tar({f"{index:04}": files(index) for index in range(first, last)}, mode)


IN_TARS = {"fields": {"x": "x.npy", "y": ".cls", "t": "bin"}}
IN_TABLES = {"fields": {"x": "a,b,c:f4", "y": "y", "t": "t"}}
PARTS = [slice(0, 25), slice(25, 26), slice(26, N)]

# Files, the one that is the source, and options.
SOURCES = {
    "npz": ({"a.npz": npz(x=X, y=Y)}, "a.npz", {}),
    "npz, packed": ({"a.npz": npz(save=np.savez_compressed, x=X, y=Y)}, "a.npz", {}),
    "npz, of other layouts": (
        {"a.npz": npz(x=np.asfortranarray(X), y=Y.astype(">i8"))},
        "a.npz",
        {},
    ),
    "npz, several": (
        {f"{i}.npz": npz(x=X[part], y=Y[part]) for i, part in enumerate(PARTS)},
        "*.npz",
        {},
    ),
    "npy": (
        {"images.npy": npy(X), "labels.npy": npy(Y)},
        "images.npy",
        {"fields": {"x": "images.npy", "y": "labels.npy"}},
    ),
    "hdf5": ({"a.h5": hdf5(**{"in/x": X, "y": Y, "t": TEXTS})}, "a.h5", {}),
    "hdf5, of other layouts": (
        {"a.h5": hdf5(x=chunked(X, compression="gzip", dtype=">f4"), y=narrow, t=rows_of_bytes)},
        "a.h5",
        {"fields": {"x": "/x", "y": "y", "t": "t"}},
    ),
    "tar": ({"0.tar": archive(0, 30), "1.tar.gz": archive(30, N, "w:gz")}, ".", IN_TARS),
    "csv": ({"t.csv": table()}, "t.csv", IN_TABLES),
    "tsv, several": (
        {"0.tsv": table(0, 20, "\t"), "1.tsv": table(20, N, "\t")},
        "*.tsv",
        IN_TABLES,
    ),
    "parquet": ({"0.parquet": columns(0, 7), "1.pq": columns(7, N)}, ".", {}),
    "arrow": (
        {
            "0.arrow": columns(0, 7, arrow),  # a stream, as Hugging Face's datasets write it
            "1.feather": columns(7, N, partial(arrow, is_stream=False)),
            "state.json": b"{}",
        },
        ".",
        {},
    ),
    "folder": ({f"{index:02}.npy": npy(x) for index, x in enumerate(X)}, ".", {}),
    "function": ({"source_code.py": CODE}, "source_code:rows", {}),
    "class": ({"source_code.py": CODE}, "source_code:Items", IN_TUPLES),
    "list": ({"source_code.py": CODE}, "source_code:LIST", {}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_all_samples_are_packed_in_their_order_or_a_random_one(
    tmp_path, monkeypatch, packed, name
):
    files, source, config = SOURCES[name]
    write(tmp_path / "source", files)
    monkeypatch.chdir(tmp_path / "source")
    for shuffle in (None, 1):
        done, found = packed(source, shuffle=shuffle, **config)
        x = found["array" if name == "folder" else "x"]
        order = [int(np.flatnonzero((one == X).all(1))[0]) for one in x]
        assert sorted(order) == list(range(N))
        assert (order == list(range(N))) == (shuffle is None)
        assert x[0].dtype == np.float32
        assert "y" not in found or np.array_equal(found["y"], order)
        assert "t" not in found or [bytes(t).decode() for t in found["t"]] == [
            TEXTS[index] for index in order
        ]
        assert done.manifest.num_samples == N


def test_objects_of_the_program_itself(packed):
    tensors = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    _, found = packed(tensors, fields={"x": "0"})
    assert np.array_equal(found["x"], np.arange(8.0).reshape(4, 2))
    _, found = packed(lambda: ({"x": [i]} for i in range(3)))
    assert np.array_equal(found["x"], [[0], [1], [2]])
    rows = [{"x": np.zeros(3)}] * 70 + [{"x": np.zeros(5)}]
    _, found = packed(rows, ragged=("x",))
    assert [len(x) for x in found["x"]] == [3] * 70 + [5]


def test_error_of_user_code_is_raised_unchanged(packed):
    def fails():
        yield {"x": 1}
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        packed(fails)


def test_entries_that_are_not_samples_are_skipped_if_fields_are_named(tmp_path, packed):
    write(tmp_path, {"a.npz": npz(x=X, y=Y, meta=np.array("text"), short=Y[:3])})
    _, found = packed(tmp_path / "a.npz", fields={"label": "y"})
    assert list(found) == ["label"]
    write(tmp_path, {"x.npy": npy(X)})
    assert list(packed(tmp_path / "x.npy")[1]) == ["x"]


TYPED = {"fields": {"x": "x:f4", "y": "y:i2"}}
DOUBLES = {"x": X.astype("f8"), "y": Y}
DOUBLES_IN_TAR = {
    f"{i:04}": {"x.npy": npy(DOUBLES["x"][i]), "cls": str(i).encode()} for i in range(N)
}


@pytest.mark.parametrize(
    ("name", "made", "config"),
    [
        ("s.npz", npz(**DOUBLES), TYPED),
        ("s.h5", hdf5(**DOUBLES), TYPED),
        ("s.parquet", parquet(x=[*DOUBLES["x"]], y=Y), TYPED),
        ("s.tar", samples_tar(DOUBLES_IN_TAR), {"fields": {"x": "x.npy:f4", "y": "cls:i2"}}),
        (None, [{"x": x, "y": y} for x, y in zip(DOUBLES["x"], Y, strict=True)], TYPED),
        (None, list(zip(DOUBLES["x"], Y, strict=True)), {"fields": {"x": "0:f4", "y": "1:i2"}}),
    ],
    ids=["npz", "hdf5", "parquet", "tar", "dicts", "tuples"],
)
def test_a_source_of_any_kind_is_stored_in_the_type_that_a_field_asks_for_and_float64_is_noted(
    tmp_path, packed, name, made, config
):
    source = made
    if name is not None:
        source = tmp_path / name
        source.write_bytes(made)
    done, found = packed(source, **config)
    assert [field.dtype for field in done.manifest.fields.values()] == ["<f4", "<i2"]
    assert np.array_equal(np.stack(found["x"]), X)
    assert [*map(int, found["y"])] == [*Y]
    assert not any("float64" in note for note in done.notes)
    untyped = {name: what.rpartition(":")[0] for name, what in config["fields"].items()}
    done, _ = packed(source, fields=untyped)
    (note,) = [each for each in done.notes if "x: float64 is stored" in each]
    options = dict(each.split("=") for each in re.findall(r"--field (\S+)", note))
    assert options == {"x": config["fields"]["x"], "y": untyped["y"]}
    done, _ = packed(source, fields=options)  # the remedy of the message
    assert done.manifest.fields["x"].dtype == "<f4"


def test_a_number_that_a_type_cannot_hold_is_refused(tmp_path, packed):
    np.savez(tmp_path / "s.npz", x=np.array([1.0, 1e300]), y=np.array([1, 300]))
    for field, value in (("x=x:f4", "1e+300"), ("y=y:u1", "300"), ("x=x:i8", "1e+300")):
        with pytest.raises(
            DataError, match=re.escape(f"{field[-2:]} cannot represent {value} in")
        ):
            packed(tmp_path / "s.npz", fields=dict([field.split("=")]))


def test_samples_that_are_shuffled_in_memory_must_fit(tmp_path, packed, monkeypatch):
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 99)
    monkeypatch.setattr(pack_module, "SHUFFLED_BYTES", 1000)
    with pytest.raises(
        DataError, match=r"into 1000 B on every rank, but need more; leave out --shuffle"
    ):
        packed(tmp_path / "t.csv", shuffle=0)
