"""Check that ``verify`` finds every fault of a data set, and describes it exactly."""

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

import h5py
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import MANIFEST, merged_ranges
from hpctrain.data.tools import verify as verify_module
from hpctrain.data.tools.verify import verify
from tests.data.mixed_set import IN_MEMORY, files_of, flip, shard, write_mixed


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "set"
    write_mixed(directory)
    return directory


@pytest.fixture
def damaged(original, tmp_path):
    """Return a copy of the data set, to be damaged."""
    shutil.copytree(original, tmp_path / "set")
    return tmp_path / "set"


def only_fault(directory):
    (fault,) = verify(directory).faults
    return fault


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_whole_data_set_is_whole_and_verify_changes_nothing(tmp_path, compression):
    manifest = write_mixed(tmp_path, compression=compression)
    before = files_of(tmp_path)
    report = verify(tmp_path)
    assert report.is_whole
    assert (report.num_samples, report.num_shards, report.num_lost) == (100, 3, 0)
    assert report.uuid == manifest.uuid
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(("compression", "num_flips"), [(None, 300), ("zstd", 60)])
def test_each_of_many_flipped_bits_is_found(compression, num_flips):
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        directory = Path(folder)
        write_mixed(directory, 12, compression=compression, samples_per_shard=8)
        files = sorted(directory.iterdir())
        assert len(files) == 3
        for _ in range(num_flips):
            path = rng.choice(files)
            where = rng.randrange(path.stat().st_size), rng.randrange(8)
            flip(path, *where)
            report = verify(directory, threads=1)
            assert [fault.file for fault in report.faults[:1]] == [path.name], where
            flip(path, *where)
        assert verify(directory).is_whole


def test_a_flipped_bit_of_a_sample_is_found_in_its_block_and_nowhere_else(damaged):
    path, found = shard(damaged)
    for name, row_bytes in (("image", 24), ("number", 8), ("label", 1)):
        for row in (0, 6, 7, 39):
            position = found.places[name].offset + row * row_bytes + row_bytes - 1
            flip(path, position)
            fault = only_fault(damaged)
            block = row // 7
            assert (fault.file, fault.shard, fault.field) == (path.name, 1, name)
            assert fault.blocks == (block,)
            assert fault.samples == ((40 + 7 * block, min(40 + 7 * block + 7, 80)),)
            flip(path, position)


def cut_off(path, found):
    """Leave 20 samples of the last field."""
    last = max(found.places, key=lambda name: found.places[name].offset)
    row_bytes = {"image": 24, "number": 8, "label": 1}[last]
    with path.open("r+b") as file:
        file.truncate(found.places[last].offset + 20 * row_bytes)


def grow(path, _):
    with path.open("ab") as file:
        file.write(b"more")


def flip_text(path, found):
    with h5py.File(path) as file:
        row = int(file["index/text"][24])
    flip(path, found.places["text"].offset + 4 * row)


def make_folder(path, _):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words", "lost"),
    [
        (flip_text, "is damaged: block 3 of field text has changed", (61, 68)),
        (
            lambda path, found: flip(path, found.places["image"].crc_offset),
            "has damaged checksums of field image; its samples are intact",
            (),
        ),
        (lambda path, _: flip(path, 0), "metadata of HDF5 are damaged", ()),
        (
            lambda path, found: flip(path, found.places["boxes"].index_offset + 8),
            "has a damaged index of field boxes",
            (40, 80),
        ),
        (grow, "has grown: it has ", ()),
        (lambda path, _: path.unlink(), "cannot be opened: No such file or directory", (40, 80)),
        (make_folder, "Is a directory", (40, 80)),
    ],
)
def test_damage_is_reported_with_the_lost_samples(damaged, damage, words, lost):
    damage(*shard(damaged))
    report = verify(damaged)
    assert report.lost == ((lost,) if lost else ())
    assert any(words in fault.what for fault in report.faults), report.faults
    assert {fault.shard for fault in report.faults} == {1}


def test_the_first_blocks_of_a_truncated_shard_are_intact(directory):
    cut_off(*shard(directory))
    report = verify(directory)
    assert report.faults[0].what.startswith("was cut off: it has ")
    assert report.lost == ((54, 80),)


def test_a_shard_of_another_data_set_is_a_fault(damaged, tmp_path):
    other = write_mixed(tmp_path / "other", 101)
    shutil.copy(tmp_path / "other" / other.shards[1].file, shard(damaged)[0])
    assert not verify(damaged).is_whole
    assert {fault.shard for fault in verify(damaged).faults} == {1}


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff\xfe", b'{"format": 1}'])
def test_a_lost_or_damaged_manifest_is_a_fault(damaged, content):
    (damaged / MANIFEST).unlink()
    if content is not None:
        (damaged / MANIFEST).write_bytes(content)
    assert only_fault(damaged).file == MANIFEST
    assert "restore the manifest from another copy" in verify(damaged).lines()[-1]


def test_verify_rejects_a_path_that_is_not_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a data set must be a directory, but .* is a file"):
        verify(tmp_path / "file")
    for name in ("none", "file/none"):
        with pytest.raises(
            DataError, match=r"cannot see the data set .*; check the path and the mount"
        ):
            verify(tmp_path / name)


def test_a_read_error_of_the_disk_is_a_fault(damaged, monkeypatch):
    path, found = shard(damaged)
    bad = found.places["number"].offset + 8 * 7
    preadv = os.preadv

    def broken(descriptor, buffers, offset):
        if offset <= bad < offset + len(buffers[0]) and os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    inode = path.stat().st_ino
    monkeypatch.setattr(os, "preadv", broken)
    assert only_fault(damaged).what == "is damaged: block 1 of field number cannot be read"
    assert verify(damaged).lost == ((47, 54),)


def test_progress_ends_at_all_bytes_also_of_a_missing_shard(damaged):
    shard(damaged)[0].unlink()
    totals, steps = [], []

    def start(total):
        totals.append(total)
        return steps.append

    report = verify(damaged, start=start)
    assert totals == [report.num_bytes]
    assert sum(steps) == report.num_bytes


@pytest.mark.parametrize("piece_bytes", [1, 100, 1000])
def test_the_pieces_and_the_threads_that_read_them_play_no_role(damaged, monkeypatch, piece_bytes):
    path, found = shard(damaged)
    flip(path, found.places["image"].offset + 7 * 24)
    expected = verify(damaged, threads=1)
    assert expected.lost == ((47, 54),)
    monkeypatch.setattr(verify_module, "PIECE_BYTES", piece_bytes)
    for threads in (1, 3):
        assert verify(damaged, threads=threads) == expected


def test_ranges_are_merged():
    assert merged_ranges([(5, 7), (0, 2), (2, 3), (6, 9), (20, 21)]) == ((0, 3), (5, 9), (20, 21))


@pytest.mark.ranks(2, 3, 4)
def test_all_ranks_get_the_report_of_one(world, comm, tmp_path_factory):
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory)
        path, found = shard(directory, 2)
        flip(path, found.places["number"].offset)
        shard(directory, 0)[0].unlink()
    world.Barrier()
    report = verify(directory, comm)
    assert report.lost == ((0, 40), (80, 87))
    assert world.allgather(report) == [verify(directory)] * world.size
    world.Barrier()
    if world.rank == 0:
        (directory / MANIFEST).write_text("{")
    world.Barrier()
    assert world.allgather(verify(directory, comm)) == [verify(directory)] * world.size
    with pytest.raises(DataError, match="cannot see"):
        verify(directory / "none", comm)


def test_the_remedy_for_an_unfinished_set_is_to_run_the_command_again(tmp_path):
    (tmp_path / "train-r00000.journal").touch()
    lines = "\n".join(verify(tmp_path).lines())
    assert "run the same command again, which continues" in lines
    assert "removes them" not in lines
