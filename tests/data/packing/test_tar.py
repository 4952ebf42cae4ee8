"""Archives of webdataset: a sample is what differs in its ending alone."""

import bz2
import gzip
import json
import lzma
import tarfile
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import MANIFEST
from hpctrain.data.packing.pack import pack
from tests.data.packing.test_folder import claiming


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
    with pytest.raises(DataError, match=r"0.tar:.*folder/odd lacks cls"):
        packed(tmp_path / "0.tar")
    _, found = packed(tmp_path / "0.tar", fields={"x": "png"})
    assert len(found["x"]) == 2
    write(tmp_path / "0.tar", {"a": sample(0), "odd": {**sample(1), "cls": b"dog"}})
    with pytest.raises(
        DataError, match=r"odd.cls cannot be read as a number.*:bytes behind an ending"
    ):
        packed(tmp_path / "0.tar")


def test_archives_that_cannot_be_read_are_told(tmp_path, packed):
    path = write(tmp_path / "0.tar", {f"{index:04}": sample(index) for index in range(99)})
    whole = path.read_bytes()
    packed(path)
    # Inside a content, inside a header, behind a header, and between two samples.
    for size in (40_000, 40_960 + 100, 512, 1024 * 7 * 10, len(whole) - 10_240):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"0.tar cannot be read as an archive"):
            packed(path)
    write(path, {})
    with pytest.raises(DataError, match="has none"):
        packed(path)


@pytest.mark.parametrize("number", [1, 90])
def test_an_ending_that_the_first_sample_lacks_is_told(tmp_path, packed, number):
    samples = {f"{index:04}": {"txt": b"1"} for index in range(99)}
    samples[f"{number:04}"]["cls"] = b"3"
    path = write(tmp_path / "0.tar", samples)
    with pytest.raises(DataError, match=rf"{number:04} has cls besides"):
        packed(path)
    assert len(packed(path, fields={"text": "txt"})[1]["text"]) == 99


PACKINGS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_archive_agrees_with_its_checksum_to_its_last_byte(tmp_path, packed, packing):
    # Stored, so that a flip stays in the content and nothing but a checksum can tell it.
    options = {"gz": {"compresslevel": 0}}.get(packing, {})
    plain = write(tmp_path / "0.tar", {f"{i:04}": {"bin": b"%04d" % i} for i in range(3)})
    whole = PACKINGS[packing](plain.read_bytes(), **options)
    path = tmp_path / f"0.tar.{packing}"
    path.write_bytes(whole + bytes(512))
    assert len(packed(path)[1]["bin"]) == 3
    flipped = bytearray(whole)
    at = whole.find(b"0001", 600) if packing == "gz" else len(whole) // 2
    flipped[at] ^= 1
    for damaged in (bytes(flipped), whole[:-1], whole[:-5], whole + b"more", whole + whole):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"0.tar.{packing} (cannot be read as an|has one)"):
            packed(path)
        with pytest.raises(DataError):
            pack(path, tmp_path / "fresh")
    assert not (tmp_path / "fresh" / MANIFEST).exists()


@pytest.mark.parametrize("between", [0, 512, 10_240])
def test_samples_behind_the_end_of_an_archive_are_told(tmp_path, packed, between):
    whole = write(tmp_path / "0.tar", {"a": {"cls": b"1"}, "b": {"cls": b"2"}}).read_bytes()
    path = tmp_path / "0.tar"
    path.write_bytes(whole + bytes(between))
    assert packed(path)[1]["cls"] == [1, 2]
    path.write_bytes(whole + bytes(between) + whole)
    with pytest.raises(DataError, match=rf"more from byte {len(whole) + between} on.*-zeros -xf"):
        packed(path)
    path.write_bytes(whole[:1024] + bytes(512) + whole[1024:])
    with pytest.raises(DataError, match=r"before byte 1536 and more from byte 1536 on"):
        packed(path)


def test_two_files_of_one_ending_never_become_one(tmp_path, packed):
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for content in (b"1", b"2"):
            member = tarfile.TarInfo("same.cls")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    with pytest.raises(DataError, match=r"0.tar:/same has two .cls; give each sample a name"):
        packed(tmp_path / "0.tar")


def test_a_sample_that_comes_again_later_is_told(tmp_path, packed):
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for name in ("a.cls", "a.txt", "b.cls", "b.txt", "a.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, BytesIO(b"1"))
    with pytest.raises(DataError, match=r"a .txt of .*0.tar:/a comes after those of others; wr"):
        packed(tmp_path / "0.tar", fields={"x": "txt"})
    assert packed(tmp_path / "0.tar", fields={"y": "cls"})[1]["y"] == [1, 1]


def test_whole_numbers_never_become_floats(tmp_path, packed):
    write(tmp_path / "0.tar", {"a": {"id": b"1"}, "b": {"id": b"%d" % (2**64 - 1)}})
    with pytest.raises(DataError, match=r"those of field id of .*0.tar are of 64 bits .*as bytes"):
        packed(tmp_path / "0.tar")
    _, found = packed(tmp_path / "0.tar", fields={"id": "id:bytes"})
    assert bytes(found["id"][1]) == b"18446744073709551615"


def sparse(path, claimed):
    """Write an archive of some KB with a file that claims to be large: holes take no room."""
    info = tarfile.TarInfo("a.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:512] = bytes(126)
    header[386:410] = b"%011o\0%011o\0" % (claimed, 0)
    header[483:495] = b"%011o\0" % claimed
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    path.write_bytes(bytes(header) + bytes(10240 - 512))


def test_files_that_claim_to_be_large_meet_a_limit(tmp_path, packed):
    sparse(tmp_path / "0.tar", 1000)
    _, found = packed(tmp_path / "0.tar")
    assert bytes(found["bin"][0]) == bytes(1000)
    sparse(tmp_path / "0.tar", 6 * 10**9)
    with pytest.raises(DataError, match=r"at most 1.0 GiB together, .*a claims 5.6 GiB"):
        packed(tmp_path / "0.tar")


def test_notes_on_a_file_that_claim_to_be_large_meet_a_limit(tmp_path, packed):
    with tarfile.open(tmp_path / "0.tar.gz", "w:gz") as archive:
        note = tarfile.TarInfo("././@LongLink")
        note.type, note.size = tarfile.GNUTYPE_LONGNAME, 2**26
        archive.addfile(note, BytesIO(bytes(2**26)))
    assert (tmp_path / "0.tar.gz").stat().st_size < 2**20
    with pytest.raises(DataError, match=r"a header claims 64.0 MiB"):
        packed(tmp_path / "0.tar.gz")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_an_archive_are_told(tmp_path, packed, kind):
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for index in range(3):
            member = tarfile.TarInfo(f"{index}.txt")
            if index == 2:
                member.type, member.linkname = kind, "0.txt"
            else:
                member.size = 1
            archive.addfile(member, BytesIO(b"5"))
    with pytest.raises(DataError, match=r"2.txt of .*0.tar is a link to 0.txt; .*--hard-deref"):
        packed(tmp_path / "0.tar")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_claims_to_be_large_is_kept_as_it_is_when_asked(tmp_path, packed):
    image = claiming(13000)
    write(tmp_path / "0.tar", {"a": {"png": image}})
    with pytest.raises(
        DataError, match=r"at most 89478485 pixels, .*a.png has more \(13000x13000"
    ):
        packed(tmp_path / "0.tar")
    _, found = packed(tmp_path / "0.tar", encoded=True)
    assert bytes(found["png"][0]) == image
