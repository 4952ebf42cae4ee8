"""Arrays of numpy are packed as they are."""

import zipfile

import numpy as np
import pytest

from hpctrain.core.errors import DataError

X = np.random.default_rng(0).random((30, 4, 3), dtype=np.float32)
Y = np.arange(30) % 7


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_each_array_of_an_npz_is_a_field(tmp_path, packed, save):
    save(tmp_path / "a.npz", x=X, y=Y, big=Y.astype(">i2"), fortran=np.asfortranarray(X))
    done, found = packed(tmp_path / "a.npz")
    assert done.manifest.fields["big"].dtype == "<i2"
    assert np.array_equal(found["x"], X)
    assert np.array_equal(found["fortran"], X)
    assert np.array_equal(found["y"], Y)
    assert np.array_equal(found["big"], Y)


def test_fields_choose_arrays_and_name_them(tmp_path, packed):
    np.savez(tmp_path / "a.npz", x=X, y=Y, meta=np.array("text"), short=Y[:3])
    _, found = packed(tmp_path / "a.npz", fields={"label": "y"})
    assert list(found) == ["label"]
    with pytest.raises(DataError, match="no 'z'"):
        packed(tmp_path / "a.npz", fields={"label": "z"})


def test_an_npy_is_one_field_and_files_beside_it_are_others(tmp_path, packed):
    np.save(tmp_path / "images.npy", X)
    np.save(tmp_path / "labels.npy", Y)
    _, found = packed(tmp_path / "images.npy")
    assert list(found) == ["x"]
    assert np.array_equal(found["x"], X)
    _, found = packed(tmp_path / "images.npy", fields={"a": "images.npy", "b": "labels.npy"})
    assert np.array_equal(found["a"], X)
    assert np.array_equal(found["b"], Y)


def test_several_files_are_one_after_another(tmp_path, packed):
    for index in range(3):
        np.savez(tmp_path / f"part-{index}.npz", x=X[index::3], y=Y[index::3])
    _, found = packed(f"{tmp_path}/part-*.npz", shuffle=3)
    order = [int(np.flatnonzero((x == X).all((1, 2)))[0]) for x in found["x"]]
    assert sorted(order) == list(range(30))
    assert order != sorted(order)
    assert np.array_equal(found["y"], Y[order])
    _, found = packed(f"{tmp_path}/part-*.npz")
    assert np.array_equal(found["y"], np.concatenate([Y[0::3], Y[1::3], Y[2::3]]))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X, "y": Y[:7]}, "same number of samples"),
        ({"x": X, "y": 3}, "counts samples"),
        ({"x": np.array(["a", "b"])}, "convert it first"),
        ({"x": np.array([None, 1])}, "cannot be read as an array of numbers"),
        ({}, "no array"),
        ({"x": X[:0]}, "at least one sample"),
    ],
)
def test_what_cannot_be_packed_is_told(tmp_path, packed, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=words):
        packed(tmp_path / "a.npz")


def test_files_that_differ_or_are_damaged_are_told(tmp_path, packed):
    np.savez(tmp_path / "1.npz", x=X)
    np.savez(tmp_path / "2.npz", x=Y)
    with pytest.raises(DataError, match="same fields"):
        packed(f"{tmp_path}/*.npz")
    np.savez_compressed(tmp_path / "2.npz", x=X)
    whole = (tmp_path / "2.npz").read_bytes()
    (tmp_path / "2.npz").write_bytes(whole[:200] + bytes(50) + whole[250:])
    with pytest.raises(DataError, match=r"x of .*2.npz cannot be read"):
        packed(tmp_path / "2.npz")
    (tmp_path / "2.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"2.npz cannot be read"):
        packed(tmp_path / "2.npz")


def test_other_files_in_an_archive_are_no_arrays(tmp_path, packed):
    np.savez(tmp_path / "a.npz", x=X)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("readme.txt", "about x")
    _, found = packed(tmp_path / "a.npz")
    assert list(found) == ["x"]
