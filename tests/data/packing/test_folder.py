"""Check folders of images and arrays: samples sorted by name, classes numbered by name."""

import os
import socket

import numpy as np
import pytest
from PIL import Image

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import CLASSES, read_classes
from hpctrain.data.tools.info import info
from hpctrain.data.tools.rewriting import Shape, reshard
from tests.data.packing.makers import picture


def bind(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for index, name in enumerate(["dog/b.png", "dog/a.png", "cat/deep/c.png", "cat/d.PNG"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(index, 6, 4).save(root / name, "png")
    return root


ORDER = ["cat/d.PNG", "cat/deep/c.png", "dog/a.png", "dog/b.png"]


def test_images_of_one_size_are_pixels_and_folders_are_classes(photos, packed, tmp_path):
    done, found = packed(photos)
    assert done.manifest.classes == ("cat", "dog")
    assert (tmp_path / "packed" / CLASSES).read_text() == "cat\ndog\n"
    assert np.array_equal(found["label"], [0, 0, 1, 1])
    for image, name in zip(found["image"], ORDER, strict=True):
        assert np.array_equal(image, np.asarray(Image.open(photos / name)))
    fields = done.manifest.fields
    assert (fields["image"].shape, fields["image"].dtype) == ((6, 4, 3), "|u1")
    assert (fields["label"].shape, fields["label"].dtype) == ((), "<i8")


def test_images_of_different_sizes_stay_encoded_unless_they_are_resized(photos, packed):
    picture(9, 8, 8).convert("L").save(photos / "dog/z.png")
    done, found = packed(photos)
    assert "--resize HxW" in done.notes[0]
    names = [*ORDER, "dog/z.png"]
    assert [bytes(data) for data in found["image"]] == [(photos / n).read_bytes() for n in names]
    done, found = packed(photos, resize=(3, 5))
    assert done.manifest.fields["image"].shape == (3, 5, 3)
    small = Image.open(photos / "dog/z.png").convert("RGB").resize((5, 3), Image.BILINEAR)
    assert np.array_equal(found["image"][4], np.asarray(small))


def test_images_stay_encoded_on_request(photos, packed):
    done, found = packed(photos, encoded=True, fields={"x": "image"})
    assert done.notes == ()
    assert [bytes(data) for data in found["x"]] == [(photos / n).read_bytes() for n in ORDER]


def test_arrays_by_class(tmp_path, packed):
    root = tmp_path / "spectra"
    for name in "ab":
        (root / name).mkdir(parents=True)
        for index in range(3):
            np.save(root / name / f"{index}.npy", np.full((2, 3), index, "f4"))
    (root / "readme.md").write_text("of another kind")
    done, found = packed(root, fields={"x": "array", "y": "label"})
    assert "1 file below" in done.notes[0]
    assert [int(x[0, 0]) for x in found["x"]] == [0, 1, 2, 0, 1, 2]
    assert np.array_equal(found["y"], [0, 0, 0, 1, 1, 1])
    np.save(root / "b/2.npy", np.zeros((5, 3), "f4"))
    _, found = packed(root)
    assert [len(x) for x in found["array"]] == [2, 2, 2, 2, 2, 5]


def test_a_set_without_classes_removes_the_names_of_the_one_before(photos, packed, tmp_path):
    packed(photos)
    done, found = packed(photos / "dog")
    assert done.manifest.classes == ()
    assert list(found) == ["image"]
    assert not (tmp_path / "packed" / CLASSES).exists()


def test_a_class_has_a_name_that_is_a_line_of_text(photos, packed, tmp_path):
    (photos / "dog").rename(photos / "dog\u2028\x0b")
    packed(photos)
    assert read_classes(tmp_path / "packed") == ("cat", "dog\u2028\x0b")
    for name in (b"cat\xff", b"two\nlines"):
        odd = (photos / "cat").rename(photos / os.fsdecode(name))
        with pytest.raises(DataError, match=r"one line of UTF-8.*; rename it"):
            packed(photos)
        odd.rename(photos / "cat")


def test_a_class_without_images_never_shifts_the_numbers_of_others(photos, packed):
    (photos / "cow").mkdir()
    with pytest.raises(DataError, match=r"none below .*/cow; restore the files or remove"):
        packed(photos)
    (photos / "cow").rename(photos / ".cow")
    assert packed(photos)[0].manifest.classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["cow", "cow.v2", "dog/more", "dog/z.png"])
def test_broken_link_to_a_folder_raises(photos, packed, name):
    (photos / name).symlink_to("/nowhere/cow")
    with pytest.raises(DataError, match=rf"{name} leads to /nowhere/cow, which is missing; "):
        packed(photos)


def test_files_that_are_no_images_are_counted(photos, packed):
    (photos / "dog/a.json").touch()
    assert "1 file below" in packed(photos)[0].notes[0]
    assert "photos is no image and not packed" in packed(photos)[0].notes[0]
    (photos / "dog/b.json").touch()
    assert "2 files below" in packed(photos)[0].notes[0]


@pytest.mark.parametrize("name", ["photos/dog/a.png", "photos/dog/a", "t.csv", "t.tar", "t.h5"])
@pytest.mark.parametrize("make", [os.mkfifo, bind])
def test_pipe_or_socket_raises_before_it_is_opened(photos, packed, monkeypatch, name, make):
    monkeypatch.chdir(photos.parent)
    (photos.parent / name).unlink(missing_ok=True)
    make(name)
    with pytest.raises(DataError, match=rf"{name} is a folder, a pipe, a socket or a device"):
        packed(photos.parent / name.partition("/")[0])


def test_pattern_that_matches_a_broken_link_raises(tmp_path, packed):
    np.save(tmp_path / "0.npy", np.arange(3))
    (tmp_path / "1.npy").symlink_to(tmp_path / "gone.npy")
    with pytest.raises(DataError, match=r"1.npy leads to .*gone.npy, which is missing"):
        packed(f"{tmp_path}/*.npy")


def test_classes_that_are_names_of_splits_are_noted(photos, packed):
    (photos / "dog").rename(photos / "train")
    assert not packed(photos)[0].notes
    (photos / "cat").rename(photos / "Val")
    (note,) = packed(photos)[0].notes
    assert "named like splits: Val, train; if they are splits, pack each folder separately" in note


def test_the_names_of_classes_are_those_of_the_manifest(photos, packed, tmp_path):
    packed(photos)
    (tmp_path / "packed" / CLASSES).write_text("dog\ncat\n")  # of another packing
    assert info(tmp_path / "packed")["classes"] == ("cat", "dog")
    reshard(tmp_path / "packed", tmp_path / "again", Shape(samples_per_shard=1))
    assert info(tmp_path / "again")["classes"] == ("cat", "dog")
