"""Check that a file is replaced completely, or the old file is kept."""

import errno
import zlib

import pytest

from hpctrain.core.atomic import PART, crc32_of, make_folder, publishing, refusal


def test_a_published_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "file"
    for text in ("old", "new"):
        with publishing(path) as part:
            part.write_text(text)
            assert part.name == "file" + PART
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == text
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failure_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way():
        with publishing(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert path.read_text() == "old"
    assert [path] == list(tmp_path.iterdir())


def test_a_published_file_is_on_disk(disk):
    for text in ("old", "new"):
        with publishing(disk.root / "file") as part:
            part.write_text(text)
        assert not disk.lost()


def test_a_folder_that_was_made_is_on_disk_with_its_parents(disk):
    for name in ("a/b/c", "a/b/d", "a/b/d"):
        make_folder(disk.root / name)
        assert not disk.lost()


def test_crc_of_a_file_is_that_of_its_bytes(tmp_path):
    data = bytes(range(256)) * 40_000
    (tmp_path / "file").write_bytes(data)
    assert crc32_of(tmp_path / "file") == zlib.crc32(data)


@pytest.mark.parametrize(
    ("number", "output"),
    [
        (errno.ENOSPC, "No space left on device; free space there, or go elsewhere"),
        (errno.EDQUOT, "quota exceeded; delete files there, or request a larger quota"),
        (errno.EACCES, "Permission denied; get the permission to write there, or go elsewhere"),
        (errno.EROFS, "Read-only file system; go elsewhere"),
        (errno.EIO, "Input/output error; go elsewhere"),
    ],
)
def test_a_refusal_has_the_remedy_of_its_reason(number, output):
    error = OSError(number, "")
    assert output in refusal(error, "go elsewhere")
    wrapped = RuntimeError("file write failed: a long story")
    wrapped.__context__ = error
    assert output in refusal(wrapped, "go elsewhere")
    assert refusal(RuntimeError("no luck\nmore"), "go elsewhere") == "no luck; go elsewhere"
