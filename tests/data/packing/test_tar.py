"""Check archives of webdataset: files of a sample differ only in their extension."""

import gzip
import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from hpctrain.core.errors import DataError
from tests.data.packing.makers import claiming, npy, png, samples_tar, sparse, tar, write


def sample(index, size=4):
    return {
        "png": png(index, size, size),
        "cls": str(index % 3).encode(),
        "txt": f"caption {index}".encode(),
        "score.txt": b"0.5",
        "box.json": json.dumps([index, index + 1]).encode(),
        "meta.json": json.dumps({"a": index}).encode(),
        "x.npy": npy(np.full((2, 2), index, "f4")),
    }


def test_each_ending_is_a_field_of_its_own_form(tmp_path, packed):
    write(tmp_path, {"0.tar": samples_tar({f"{index:04}": sample(index) for index in range(70)})})
    done, found = packed(tmp_path / "0.tar")
    images = [np.asarray(Image.open(BytesIO(png(index)))) for index in range(70)]
    assert np.array_equal(found["png"], images)
    assert np.array_equal(found["cls"], np.arange(70) % 3)
    assert [bytes(text).decode() for text in found["txt"]] == [f"caption {i}" for i in range(70)]
    assert np.array_equal(found["score_txt"], np.full(70, 0.5))
    assert np.array_equal(found["box_json"], [[i, i + 1] for i in range(70)])
    assert json.loads(bytes(found["meta_json"][7])) == {"a": 7}
    assert np.array_equal(found["x_npy"], [np.full((2, 2), i) for i in range(70)])
    assert done.manifest.fields["cls"].dtype == "<i8"


def test_images_of_different_sizes_stay_encoded(tmp_path, packed):
    write(
        tmp_path,
        {"0.tar": samples_tar({f"{index}": sample(index, 4 + index) for index in (0, 2)})},
    )
    done, found = packed(tmp_path / "0.tar", fields={"x": "png"})
    assert "have different sizes, from 4x4 to 6x6" in done.notes[0]
    for options in ({"fields": {"x": "png:bytes"}}, {"fields": {"x": "png"}, "encoded": True}):
        done, kept = packed(tmp_path / "0.tar", **options)
        assert done.notes == ()
        assert (
            list(map(bytes, found["x"])) == list(map(bytes, kept["x"])) == [png(0), png(2, 6, 6)]
        )
    done, found = packed(tmp_path / "0.tar", fields={"x": "png"}, resize=(3, 2))
    assert done.manifest.fields["x"].shape == (3, 2, 3)


def test_a_packed_archive_agrees_with_its_checksum_to_its_last_byte(tmp_path, packed):
    # Stored, so that a flip stays in the content and only a checksum can detect it.
    samples = {f"{i:04}": {"bin": b"%04d" % i} for i in range(3)}
    whole = gzip.compress(samples_tar(samples), compresslevel=0)
    path = tmp_path / "0.tar.gz"
    path.write_bytes(whole + bytes(512))
    assert len(packed(path)[1]["bin"]) == 3
    flipped = bytearray(whole)
    flipped[whole.find(b"0001", 600)] ^= 1
    for damaged in (bytes(flipped), whole[:-1], whole[:-5], whole + b"more", whole + whole):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"0.tar.gz (cannot be read as an|other data follow)"):
            packed(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "config", "wanted"),
    [
        (tar(("a.cls", b"1"), ("b.cls", b"2")) + bytes(512), {}, [1, 2]),
        (sparse(1000), {}, [bytes(1000)]),
        (tar(("a.id", b"1"), ("b.id", b"22")), {"fields": {"id": "id:bytes"}}, [b"1", b"22"]),
        (tar(("a.png", claiming(13_000))), {"encoded": True}, [claiming(13_000)]),
        (
            tar(("a.cls", b"1"), ("a.txt", b"1"), ("b.cls", b"1"), ("a.txt", b"1")),
            {"fields": {"y": "cls"}},
            [1, 1],
        ),
        (
            samples_tar({"a": {"cls": b"1"}, "b": {"cls": b"2", "txt": b""}}),
            {"fields": {"y": "cls"}},
            [1, 2],
        ),
    ],
    ids=["zeros", "sparse", "bytes", "encoded", "others apart", "others lacking"],
)
def test_intact_and_unrequested_files_are_not_rejected(tmp_path, packed, content, config, wanted):
    write(tmp_path, {"0.tar": content})
    (values,) = packed(tmp_path / "0.tar", **config)[1].values()
    assert [bytes(v) if v.ndim else int(v) for v in values] == wanted
