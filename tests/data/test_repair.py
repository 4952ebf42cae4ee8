"""Check that a repaired data set has every shard that the copy still has."""

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.core.atomic import PART
from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import MANIFEST
from hpctrain.data.tools.repair import repair
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import ShardWriter
from tests.data.mixed_set import files_of, flip, shard, write_mixed
from tests.full_disk import largest_file


@pytest.fixture(scope="module", params=[None, "zstd"])
def copy(request, tmp_path_factory):
    """Return a complete data set."""
    directory = tmp_path_factory.mktemp("copy") / "set"
    write_mixed(directory, compression=request.param)
    (directory / "classes.txt").write_text("cat\ndog\nemu\n")
    return directory


@pytest.fixture
def damaged(copy, tmp_path):
    """Return a copy that lacks a shard, and has a wrong bit in a block and in metadata."""
    return damage(shutil.copytree(copy, tmp_path / "set"))


def damage(directory):
    shard(directory, 0)[0].unlink()
    path, found = shard(directory, 1)
    flip(path, found.places["number"].offset + 8 * 7)
    path, _ = shard(directory, 2)
    flip(path, path.read_bytes().index(b", HDF5 "))
    return directory


@pytest.mark.parametrize("lost", ["classes.txt", MANIFEST, f"manifest of the copy, {MANIFEST}"])
def test_damaged_shards_are_restored_from_the_copy(copy, damaged, tmp_path, lost):
    other = shutil.copytree(copy, tmp_path / "other")
    # Without a manifest in the copy, its shards are identified by their checksums.
    ((other if " " in lost else damaged) / lost.rpartition(" ")[2]).unlink()
    outcome = repair(damaged, other)
    assert outcome.report.is_whole
    assert files_of(damaged) == files_of(copy)
    assert {deed.split()[0] for deed in outcome.deeds} == {"copied"}
    assert len(outcome.deeds) == 3 + (lost == MANIFEST)


def test_a_shard_that_is_damaged_in_the_copy_too_is_not_repaired(copy, damaged, tmp_path):
    other = shutil.copytree(copy, tmp_path / "other")
    flip(shard(other, 1)[0], 5000)
    shard(other, 2)[0].unlink()
    outcome = repair(damaged, other)
    assert outcome.report.bad_shards == (1, 2)
    assert verify(damaged).lost == outcome.report.lost == ((47, 54),)
    assert any("is damaged in the copy too" in deed for deed in outcome.deeds)
    assert any("No such file" in deed for deed in outcome.deeds)


def test_damage_that_cannot_be_repaired_is_reported_and_kept(copy, damaged, tmp_path):
    write_mixed(tmp_path / "other")
    before = files_of(damaged)
    for source, words in (
        (tmp_path / "other", r"a copy of the same data set, but .* pass another copy"),
        (damaged, r"must be another copy, but .* itself"),
        (tmp_path / "nowhere", r"cannot see the data set .*: No such file"),
    ):
        with pytest.raises(DataError, match=words):
            repair(damaged, source)
    with largest_file(5000), pytest.raises(DataError, match=r"cannot write .*: File too large"):
        repair(damaged, copy)
    assert files_of(damaged) == before
    (damaged / MANIFEST).unlink()
    for source in (None, tmp_path / "other"):
        with pytest.raises(DataError, match=f"a data set must have a {MANIFEST}"):
            repair(damaged, source)


def test_leftovers_are_removed_and_other_files_are_kept(copy, tmp_path):
    directory = shutil.copytree(copy, tmp_path / "set")
    names = ["train-0123abcd-00000-of-00001.h5", "train-0123abcd-r00001-00003.h5.part"]
    names += [f"{MANIFEST}.part", "train-r00000.journal"]
    before = files_of(directory)
    for name in [*names, "notes.txt"]:
        (directory / name).touch()
    assert verify(directory).leftovers == tuple(sorted(names))
    outcome = repair(directory)
    assert outcome.report.is_whole
    assert outcome.deeds == tuple(f"removed {name}" for name in sorted(names))
    assert files_of(directory) == before | {"notes.txt": b""}


def test_nothing_is_taken_from_a_writer(damaged):
    manifest = json.loads((damaged / MANIFEST).read_text())
    fields = {"x": ((), "i8")}
    with ShardWriter(damaged, fields, samples_per_shard=2, resume_key="x") as writer:
        writer.append({"x": range(5)})
        with pytest.raises(DataError, match="one writer at a time"):
            repair(damaged)
        assert list(damaged.glob(f"*{PART}"))
        assert json.loads((damaged / MANIFEST).read_text()) == manifest
    assert verify(damaged).is_whole


@pytest.mark.ranks(3)
def test_ranks_repair_together(world, comm, tmp_path_factory):
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory / "copy")
        damage(shutil.copytree(directory / "copy", directory / "set"))
    world.Barrier()
    outcome = repair(directory / "set", directory / "copy", comm)
    assert world.allgather(outcome) == [outcome] * world.size
    assert outcome.report.is_whole
    assert files_of(directory / "set") == files_of(directory / "copy")
    with pytest.raises(DataError):
        repair(directory / "none", None, comm)
