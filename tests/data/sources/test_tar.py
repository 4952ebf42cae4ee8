"""Archives of webdataset: a sample is what differs in its ending alone."""

import json
import tarfile
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from hpctrain.errors import DataError


def png(seed, size=4):
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def npy(array):
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()


def sample(index, size=4):
    return {
        "png": png(index, size),
        "cls": str(index % 3).encode(),
        "txt": f"caption {index}".encode(),
        "score.txt": b"0.5",
        "box.json": json.dumps([index, index + 1]).encode(),
        "meta.json": json.dumps({"a": index}).encode(),
        "x.npy": npy(np.full((2, 2), index, "f4")),
    }


def write(path, samples, mode="w"):
    with tarfile.open(path, mode) as archive:
        for key, files in samples.items():
            for ending, content in files.items():
                info = tarfile.TarInfo(f"./folder/{key}.{ending}")
                info.size = len(content)
                archive.addfile(info, BytesIO(content))
    return path


def test_each_ending_is_a_field_of_its_own_form(tmp_path, packed):
    write(tmp_path / "0.tar", {f"{index:04}": sample(index) for index in range(70)})
    write(tmp_path / "1.tar.gz", {f"{index:04}": sample(index) for index in range(70, 90)}, "w:gz")
    done, found = packed(tmp_path)
    images = [np.asarray(Image.open(BytesIO(png(index)))) for index in range(90)]
    assert np.array_equal(found["png"], images)
    assert np.array_equal(found["cls"], np.arange(90) % 3)
    assert [bytes(text).decode() for text in found["txt"]] == [f"caption {i}" for i in range(90)]
    assert np.array_equal(found["score_txt"], np.full(90, 0.5))
    assert np.array_equal(found["box_json"], [[i, i + 1] for i in range(90)])
    assert json.loads(bytes(found["meta_json"][7])) == {"a": 7}
    assert np.array_equal(found["x_npy"], [np.full((2, 2), i) for i in range(90)])
    assert done.manifest.fields["cls"].dtype == "<i8"


def test_fields_choose_endings_and_may_keep_bytes(tmp_path, packed):
    write(tmp_path / "0.tar", {f"{index:04}": sample(index) for index in range(5)})
    _, found = packed(tmp_path / "0.tar", fields={"x": "png:bytes", "y": ".cls"})
    assert [bytes(data) for data in found["x"]] == [png(index) for index in range(5)]
    assert np.array_equal(found["y"], [0, 1, 2, 0, 1])
    done, found = packed(tmp_path / "0.tar", encoded=True, fields={"x": "png"})
    assert bytes(found["x"][2]) == png(2)
    assert done.notes == ()


def test_images_of_different_sizes_stay_encoded_unless_they_are_resized(tmp_path, packed):
    write(tmp_path / "0.tar", {f"{index}": sample(index, 4 + index) for index in range(3)})
    done, found = packed(tmp_path / "0.tar", fields={"x": "png"})
    assert "differ in size, from 4x4 to 6x6" in done.notes[0]
    assert bytes(found["x"][2]) == png(2, 6)
    done, found = packed(tmp_path / "0.tar", fields={"x": "png"}, resize=(3, 2))
    assert done.manifest.fields["x"].shape == (3, 2, 3)


def test_samples_that_are_not_alike_are_named(tmp_path, packed):
    odd = sample(1)
    del odd["cls"]
    write(tmp_path / "0.tar", {"a": sample(0), "odd": odd})
    with pytest.raises(DataError, match=r"0.tar:folder/odd has no .cls|odd has no .cls"):
        packed(tmp_path / "0.tar")
    _, found = packed(tmp_path / "0.tar", fields={"x": "png"})
    assert len(found["x"]) == 2
    write(tmp_path / "0.tar", {"a": sample(0), "odd": {**sample(1), "cls": b"dog"}})
    with pytest.raises(DataError, match=r"odd.cls must be a number.*NAME=cls:bytes"):
        packed(tmp_path / "0.tar")


def test_archives_that_cannot_be_read_are_told(tmp_path, packed):
    path = write(tmp_path / "0.tar", {f"{index:04}": sample(index) for index in range(99)})
    whole = path.read_bytes()
    packed(path)
    # Inside a content, inside a header, and between two samples.
    for size in (40_000, 40_960 + 100, 1024 * 7 * 10, len(whole) - 10_240):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"0.tar cannot be read as an archive"):
            packed(path)
    write(path, {})
    with pytest.raises(DataError, match="has none"):
        packed(path)


def test_two_files_of_one_ending_never_become_one(tmp_path, packed):
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for content in (b"1", b"2"):
            member = tarfile.TarInfo("same.cls")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    with pytest.raises(DataError, match=r"0.tar:/same has two .cls; give each sample a name"):
        packed(tmp_path / "0.tar")
