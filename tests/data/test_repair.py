"""A repaired data set is whole, and holds every sample that could still be had."""

import random
import shutil
from pathlib import Path

import h5py
import pytest

import hpctrain
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import MANIFEST, Manifest
from hpctrain.data.tools.repair import RepairPlan, kept, repair
from hpctrain.data.tools.verify import verify
from hpctrain.runtime.world import current
from tests.data.mixed_set import files_of, flip, numbers_in, samples_in, shard, write_mixed
from tests.full_disk import largest_file


@pytest.fixture
def comm():
    hpctrain.init(ranks_per_node=2)
    yield current().comm
    hpctrain.shutdown()


@pytest.fixture(scope="module", params=[None, "zstd"])
def copy(request, tmp_path_factory):
    """Give a whole data set."""
    directory = tmp_path_factory.mktemp("copy") / "set"
    write_mixed(directory, compression=request.param)
    (directory / "classes.txt").write_text("cat\ndog\nemu\n")
    return directory


@pytest.fixture
def damaged(copy, tmp_path):
    """Give a copy of it, to be damaged."""
    shutil.copytree(copy, tmp_path / "set")
    return tmp_path / "set"


def damage(directory):
    """Lose a shard, a block of another one, and a bit of the metadata of the third."""
    shard(directory, 0)[0].unlink()
    path, found = shard(directory, 1)
    flip(path, found.places["number"].offset + 8 * 7)
    path, _ = shard(directory, 2)
    flip(path, path.read_bytes().index(b", HDF5 "))


def test_what_is_damaged_comes_from_the_copy(copy, damaged):
    damage(damaged)
    (damaged / "classes.txt").unlink()
    outcome = repair(damaged, RepairPlan(source=copy))
    assert outcome.report.is_whole
    assert files_of(damaged) == files_of(copy)
    assert [deed.split()[0] for deed in outcome.deeds] == ["took"] * 3


def test_a_dry_run_tells_the_same_and_changes_nothing(copy, damaged):
    damage(damaged)
    (damaged / "train-0123abcd-00000-of-00001.h5").touch()
    before = files_of(damaged)
    for plan in ({"source": copy}, {"drop": True}):
        told = repair(damaged, RepairPlan(**plan, dry_run=True))
        assert files_of(damaged) == before
        again = shutil.copytree(damaged, damaged.with_name("again"))
        done = repair(again, RepairPlan(**plan))
        assert told.deeds == done.deeds
        assert told.report.num_samples == done.report.num_samples
        shutil.rmtree(again)


def test_a_shard_that_is_damaged_in_the_copy_too_is_left(copy, damaged, tmp_path):
    damage(damaged)
    other = shutil.copytree(copy, tmp_path / "other")
    flip(shard(other, 1)[0], 5000)
    shard(other, 2)[0].unlink()
    outcome = repair(damaged, RepairPlan(source=other))
    assert outcome.report.bad_shards == (1, 2)
    assert verify(damaged).lost == outcome.report.lost == ((47, 54),)
    assert any("is damaged there too" in deed for deed in outcome.deeds)
    assert any("No such file" in deed for deed in outcome.deeds)


def test_shards_of_a_copy_without_a_manifest_prove_themselves(copy, damaged, tmp_path):
    damage(damaged)
    other = shutil.copytree(copy, tmp_path / "other")
    (other / MANIFEST).unlink()
    assert repair(damaged, RepairPlan(source=other)).report.is_whole


def test_a_copy_that_is_none_is_refused(damaged, tmp_path):
    damage(damaged)
    write_mixed(tmp_path / "other")
    before = files_of(damaged)
    with pytest.raises(DataError, match=r"a copy of the same data set, but .* give another copy"):
        repair(damaged, RepairPlan(source=tmp_path / "other"))
    with pytest.raises(DataError, match=r"is another copy, but .* itself"):
        repair(damaged, RepairPlan(source=damaged))
    with pytest.raises(DataError, match=r"cannot see the data set .*: No such file"):
        repair(damaged, RepairPlan(source=tmp_path / "nowhere"))
    assert files_of(damaged) == before


def test_a_full_disk_leaves_the_damaged_shard_as_it_was(copy, damaged):
    path, found = shard(damaged)
    flip(path, found.places["number"].offset)
    before = files_of(damaged)
    with largest_file(5000), pytest.raises(DataError, match=r"cannot repair .*: File too large"):
        repair(damaged, RepairPlan(source=copy))
    assert files_of(damaged) == before


def test_a_lost_manifest_is_made_anew_as_it_was(copy, damaged):
    (damaged / MANIFEST).write_text("{")
    outcome = repair(damaged, RepairPlan(rebuild_manifest=True))
    assert outcome.report.is_whole
    assert files_of(damaged) == files_of(copy)


def test_a_lost_manifest_comes_from_the_copy(copy, damaged):
    damage(damaged)
    (damaged / MANIFEST).unlink()
    assert repair(damaged, RepairPlan(source=copy)).report.is_whole
    assert files_of(damaged) == files_of(copy)


def test_without_leave_a_lost_manifest_stays_lost(damaged):
    (damaged / MANIFEST).unlink()
    with pytest.raises(DataError, match="--rebuild-manifest"):
        repair(damaged, RepairPlan(drop=True))


def test_a_new_manifest_does_not_bless_a_damaged_block(damaged):
    path, found = shard(damaged)
    flip(path, found.places["number"].offset + 8 * 7)
    (damaged / MANIFEST).unlink()
    outcome = repair(damaged, RepairPlan(rebuild_manifest=True))
    assert outcome.report.lost == verify(damaged).lost == ((47, 54),)


def test_a_manifest_needs_all_shards_of_one_data_set(damaged, copy, tmp_path):
    (damaged / MANIFEST).unlink()
    names = sorted(path.name for path in damaged.glob("*.h5"))
    (damaged / names[1]).unlink()
    with pytest.raises(DataError, match=r"has 2 of 3 shards of \w+; take"):
        repair(damaged, RepairPlan(rebuild_manifest=True))
    (damaged / names[1]).write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=rf"has 2 of 3 .*; {names[1]} cannot be used"):
        repair(damaged, RepairPlan(rebuild_manifest=True))
    shutil.copy(copy / names[1], damaged)
    write_mixed(tmp_path / "other")
    for path in (tmp_path / "other").glob("*.h5"):
        shutil.copy(path, damaged)
    with pytest.raises(DataError, match=r"has 3 of 3 shards of \w+; 3 of 3"):
        repair(damaged, RepairPlan(rebuild_manifest=True))


def test_a_shard_that_was_not_finished_makes_no_manifest(damaged):
    with h5py.File(shard(damaged)[0], "r+") as file:
        file.attrs["complete"] = 0
    (damaged / MANIFEST).unlink()
    with pytest.raises(DataError, match="it was not finished"):
        repair(damaged, RepairPlan(rebuild_manifest=True))


def test_what_is_lost_is_dropped_and_all_else_kept_in_order(copy, damaged):
    damage(damaged)
    whole = samples_in(copy)
    outcome = repair(damaged, RepairPlan(drop=True))
    assert verify(damaged).is_whole
    assert samples_in(damaged) == whole[40:47] + whole[54:]
    assert outcome.report.num_samples == 53
    assert outcome.deeds == ("wrote 53 samples anew, 47 lost ones are dropped",)
    assert (damaged / "classes.txt").exists()


def test_of_random_damage_just_the_lost_blocks_are_dropped(copy, tmp_path):
    rng = random.Random(0)
    whole = samples_in(copy)
    for attempt in range(5):
        directory = shutil.copytree(copy, tmp_path / str(attempt))
        for _ in range(4):
            path, found = shard(directory, rng.randrange(3))
            flip(path, rng.randrange(found.num_bytes), rng.randrange(8))
        lost = {number for start, stop in verify(directory).lost for number in range(start, stop)}
        repair(directory, RepairPlan(drop=True))
        assert samples_in(directory) == [s for s in whole if s["number"] not in lost]


def test_where_nothing_is_left_nothing_is_dropped(damaged):
    for index in range(3):
        shard(damaged, index)[0].unlink()
    with pytest.raises(DataError, match=r"no sample of .* can be had, so nothing is changed"):
        repair(damaged, RepairPlan(drop=True))
    assert Manifest.read(damaged).num_samples == 100


def test_leftovers_go_and_other_files_stay(damaged):
    names = ["train-0123abcd-00000-of-00001.h5", "train-0123abcd-r00001-00003.h5.part"]
    names += [f"{MANIFEST}.part", "train-r00000.journal"]
    before = files_of(damaged)
    for name in [*names, "notes.txt"]:
        (damaged / name).touch()
    outcome = repair(damaged, RepairPlan())
    assert outcome.report.is_whole
    assert outcome.deeds == tuple(f"removed {name}" for name in sorted(names))
    assert files_of(damaged) == before | {"notes.txt": b""}


def test_what_is_kept_is_what_is_not_lost():
    lost = ((2, 4), (6, 7), (9, 10))
    assert list(kept(lost, 0, 10)) == [(0, 2), (4, 6), (7, 9)]
    assert list(kept(lost, 3, 8)) == [(4, 6), (7, 8)]
    assert list(kept(lost, 2, 4)) == []


@pytest.mark.ranks(3)
def test_ranks_repair_together(world, comm, tmp_path_factory):
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory / "copy")
        for name in ("set", "second"):
            damage(shutil.copytree(directory / "copy", directory / name))
    world.Barrier()
    first = repair(directory / "set", RepairPlan(source=directory / "copy"), comm)
    second = repair(directory / "second", RepairPlan(drop=True), comm)
    assert world.allgather((first, second)) == [(first, second)] * world.size
    assert first.report.is_whole
    assert files_of(directory / "set") == files_of(directory / "copy")
    assert numbers_in(directory / "second") == [*range(40, 47), *range(54, 100)]
    assert verify(directory / "second").is_whole
    with pytest.raises(DataError):
        repair(directory / "none", RepairPlan(), comm)
