"""Check that a restart loads the newest complete checkpoint, reports damage, and prunes."""

import math
import os
import pkgutil
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import loading, saving
from hpctrain.checkpoint.checkpoint_directory import CheckpointDirectory, Kept, expendable
from hpctrain.checkpoint.format.manifest import name_of, step_of
from hpctrain.checkpoint.inspection import checkpoint_of, checkpoints_in
from hpctrain.checkpoint.manager import Manager
from hpctrain.checkpoint.saving import save
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import flip, loaded_value, managed, state, steps_in


def largest(path):
    return max(path.glob("rank-*"), key=lambda file: file.stat().st_size)


DAMAGES = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a bit of the manifest": lambda path: flip(path / "manifest.json"),
    "a bit of a tensor": lambda path: flip(largest(path), -8),
    "a file cut short": lambda path: os.truncate(largest(path), largest(path).stat().st_size - 1),
    "a file gone": lambda path: largest(path).unlink(),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_newest_checkpoint_is_reported_and_the_one_before_is_loaded(
    comm, root, how, caplog
):
    with managed(root, comm) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step)
    if comm.rank == 0:
        DAMAGES[how](root / "step-00000003")
    comm.barrier()
    with managed(root, comm) as manager:
        assert loaded_value(manager) == 2
        assert loaded_value(manager) == 2
        output = [record for record in caplog.records if "step 3 is skipped" in record.message]
        assert len(output) == (comm.rank == 0)
        assert manager.latest() == root / "step-00000002"
        manager.save(state(3), 3, wait=True)  # the next training replaces it
        assert loaded_value(manager) == 3
        assert steps_in(root) == [2, 3]


@pytest.mark.ranks(1, 2)
def test_later_checkpoints_are_set_aside_after_resuming_from_an_earlier_one(comm, root, caplog):
    with managed(root, comm, keep=3) as manager:
        for step in (10, 20, 30):
            manager.save(state(step), step)
    if comm.rank == 0:
        DAMAGES["a file gone"](root / "step-00000030")
        DAMAGES["a bit of a tensor"](root / "step-00000020")
    comm.barrier()
    with managed(root, comm, keep=3) as manager:
        assert loaded_value(manager) == 10
        manager.save(state(15), 15, wait=True)
        assert loaded_value(manager) == 15
        assert steps_in(root) == [10, 15]
        assert (root / "step-00000030.aside").is_dir()
    assert (f"{root}/step-00000030, which is damaged, is later than step 15" in caplog.text) == (
        comm.rank == 0
    )
    caplog.clear()
    with managed(root, comm) as manager:  # does not load the checkpoint of step 15
        manager.save(state(5), 5, wait=True)
    text = "step-00000015, of another job or of this run before it resumed, is later than step 5"
    assert (text in caplog.text) == (comm.rank == 0)


@pytest.mark.ranks(1, 2)
def test_run_does_not_restart_from_zero_if_all_checkpoints_are_damaged(comm, root):
    with managed(root, comm) as manager:
        manager.save(state(1), 1)
        manager.save(state(2), 2)
    if comm.rank == 0:
        DAMAGES["no manifest"](root / "step-00000001")
        DAMAGES["a file gone"](root / "step-00000002")
    comm.barrier()
    with managed(root, comm) as manager:
        with pytest.raises(CheckpointError, match=r"none of 2 checkpoints in .*step-00000001"):
            manager.load_latest()
        with pytest.raises(CheckpointError, match="none of 2"):
            manager.latest()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("when", "step"),
    [
        ("checkpoint_directory.CheckpointManifest.read", 2),
        ("loading.load", 2),
        ("loading.block_reader.read", 1),
    ],
)
def test_the_newest_is_found_while_another_job_saves(comm, root, when, step, caplog, monkeypatch):
    with managed(root, comm) as manager:
        manager.save(state(1), 1, wait=True)
    module, _, name = when.rpartition(".")
    owner = pkgutil.resolve_name(f"hpctrain.checkpoint.{module.replace('.', ':', 1)}")
    read, has_begun = getattr(owner, name), []

    def read_later(*args, **options):
        """Let another job complete a checkpoint just before this job reads."""
        if not has_begun:
            has_begun.append(True)
            if comm.rank == 0:
                with managed(root, SerialCommunicator(), keep=1) as other:
                    other.save(state(step, numel=50), step, wait=True)
            if name == "load":  # every rank calls this
                comm.barrier()
        return read(*args, **options)

    monkeypatch.setattr(owner, name, read_later)
    with managed(root, comm) as manager:
        assert loaded_value(manager) == step
    assert has_begun or comm.rank
    assert steps_in(root) == [step]
    assert not caplog.records


def test_a_checkpoint_is_found_at_any_time_while_two_jobs_save(root):
    """Two jobs save with random steps, and a third job loads."""
    alone, loads = SerialCommunicator(), 0

    def job(seed):
        draw, step = random.Random(seed), 0
        with managed(root, alone, keep=1, background=False) as manager:
            for _ in range(40):
                step += draw.choice([1, 1, 2])
                with suppress(CheckpointError):  # the other job has removed the files of this one
                    manager.save(state(step, numel=draw.randint(1, 100)), step)

    with managed(root, alone, background=False) as manager, ThreadPoolExecutor(2) as pool:
        manager.save(state(0), 0)
        jobs = [pool.submit(job, seed) for seed in (1, 2)]
        while not all(each.done() for each in jobs):
            with managed(root, alone) as reader:
                loads += loaded_value(reader) >= 0
            assert checkpoints_in(root)
            assert checkpoint_of(root, "last")
        for each in jobs:
            each.result()
    assert loads


@pytest.mark.parametrize("first", [4, 7])
def test_jobs_with_different_steps_keep_the_checkpoint_completed_last(root, first):
    with managed(root, SerialCommunicator(), keep=9) as manager:
        manager.save(state(7), 7, wait=True)
        os.utime(root / "step-00000007", (1, 1))
    save(root / "step-00000004", state(4), SerialCommunicator(), step=4)
    for step in (first, 11 - first):
        CheckpointDirectory(root).tidy(step, keep=1)
    assert steps_in(root) == [4]


def test_a_save_whose_files_another_job_removes_is_not_published(root, monkeypatch):
    alone = SerialCommunicator()
    save(root / "step-00000001", state(1), alone, step=1)

    def removal_of(make, room, directory, guard):
        remove = os.unlink

        def unlink_and_publish(path, **options):
            monkeypatch.setattr(os, "unlink", remove)
            remove(path, **options)
            with suppress(OSError):
                room.rename(directory)  # as the other job does now

        monkeypatch.setattr(os, "unlink", unlink_and_publish)
        other = CheckpointDirectory(root)
        other.tidy(1, keep=1)
        other.finish()
        return publish(make, room, directory, guard)

    publish = saving._publish
    monkeypatch.setattr(saving, "_publish", removal_of)
    with pytest.raises(CheckpointError, match="step-00000002"):
        save(root / "step-00000002", state(2), alone, step=2)
    assert CheckpointDirectory(root).newest() == (1, {})


def test_a_listing_without_checkpoints_is_repeated_if_there_are_other_names(root, monkeypatch):
    with managed(root, SerialCommunicator()) as manager:
        manager.save(state(1), 1, wait=True)
    missed = iter([["step-00000001.1.part"]])
    names = CheckpointDirectory._names
    monkeypatch.setattr(
        CheckpointDirectory, "_names", lambda self: next(missed, None) or names(self)
    )
    assert CheckpointDirectory(root).newest() == (1, {})


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("blind", ["the first", "the last"])
def test_checkpoint_invisible_to_some_ranks_is_treated_equally_by_all(
    comm, root, blind, monkeypatch
):
    with managed(root, comm) as manager:
        manager.save(state(1), 1, wait=True)
    mine = root.parent / f"seen by {comm.rank}"  # delayed visibility
    mine.mkdir()
    link, load = mine / "step-00000001", loading.load
    link.symlink_to(root / link.name)

    def load_later(*args, **options):
        if comm.rank == (0 if blind == "the first" else comm.size - 1):
            link.unlink(missing_ok=True)  # after the newest was found
        return load(*args, **options)

    monkeypatch.setattr(loading, "load", load_later)
    with managed(mine, comm) as manager:
        if blind == "the first":  # rank 0 decides whether it is damaged or removed
            assert manager.load_latest() is None
        else:
            with pytest.raises(CheckpointError, match="none of 1 checkpoints"):
                manager.load_latest()


@pytest.mark.ranks(1, 2)
def test_best_checkpoints_are_kept_after_a_restart(comm, root):
    scores = {1: 0.5, 2: 0.9, 3: float("nan"), 4: 0.8, 5: None, 6: 0.1, 7: 0.2}
    for steps in ((1, 2, 3), (4, 5, 6, 7)):
        with managed(root, comm, keep=1, keep_best=2) as manager:
            for step in steps:
                manager.save(state(step), step, score=scores[step])
    assert steps_in(root) == [2, 4, 7]


@pytest.mark.ranks(1, 2)
def test_the_score_of_a_checkpoint_is_that_of_its_last_save(comm, root):
    with managed(root, comm, keep=1, keep_best=1) as manager:
        manager.save(state(1), 1)
        manager.save(state(1), 1, score=0.9)
        manager.save(state(2), 2, score=0.1, wait=True)
        assert steps_in(root) == [1, 2]
        manager.save(state(9), 9, score=0.8)
        manager.save(state(3), 3, score=0.95)
        manager.save(state(9), 9, score=0.2, wait=True)  # step 9 was set aside in between
        assert steps_in(root) == [3, 9]


@pytest.mark.ranks(1, 2)
def test_next_save_removes_partial_checkpoints_of_dead_writers(comm, root):
    if comm.rank == 0:
        for name in ("step-00000009.part", "step-00000002.gone.part", "notes"):
            (root / name).mkdir(parents=True)
            (root / name / "x").touch()
    comm.barrier()
    with managed(root, comm) as manager:
        assert manager.latest() is None
        manager.save(state(1), 1)
    assert sorted(path.name for path in root.iterdir()) == ["notes", "step-00000001"]


@pytest.mark.ranks(1, 2)
def test_the_same_step_is_written_once(comm, root):
    with managed(root, comm) as manager:
        manager.save(state(4), 4, wait=True)
        before = (root / "step-00000004" / "manifest.json").stat().st_ino
        manager.save(state(4), 4, wait=True)
        assert (root / "step-00000004" / "manifest.json").stat().st_ino == before
    with managed(root, comm) as manager:
        assert loaded_value(manager) == 4
        manager.save(state(4), 4, wait=True)
        assert (root / "step-00000004" / "manifest.json").stat().st_ino == before


@pytest.mark.ranks(1, 2)
def test_a_loaded_checkpoint_with_a_score_is_neither_due_nor_written_again(comm, root):
    with managed(root, comm, every=10) as manager:
        manager.save(state(10), 10, score=0.5)
    before = (root / "step-00000010" / "manifest.json").stat().st_ino
    with managed(root, comm, every=10) as manager:
        assert loaded_value(manager) == 10
        assert [manager.due(step) for step in (10, 19, 20)] == [False, False, True]
        manager.save(state(10), 10, wait=True, score=0.5)
    assert (root / "step-00000010" / "manifest.json").stat().st_ino == before


@pytest.mark.ranks(1, 2)
def test_step_is_written_again_after_a_load_found_no_checkpoint(comm, root):
    with managed(root, comm) as manager:
        manager.save(state(4), 4, wait=True)
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(root)
        comm.barrier()
        assert manager.load_latest() is None
        manager.save(state(4), 4, wait=True)
        assert steps_in(root) == [4]


def test_old_checkpoints_that_cannot_be_removed_warn(comm, root, monkeypatch, caplog):
    remove = shutil.rmtree

    def refuse(path, **options):
        if "gone" in path.name:
            raise PermissionError(13, "Permission denied")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with managed(root, comm, keep=1) as manager:
        for step in (1, 2, 3, 4):
            manager.save(state(step), step, wait=True)
        assert caplog.text.count("cannot be removed: Permission denied") == 1
        assert loaded_value(manager) == 4
        assert steps_in(root) == [4]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_saves_do_not_wait_until_old_checkpoints_are_removed(comm, root, background, monkeypatch):
    remove, may_remove = shutil.rmtree, threading.Event()

    def remove_later(path, **options):
        if ".gone." in path.name:
            assert may_remove.wait(60)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_later)
    manager = Manager(root, comm, keep=1, background=background)
    for step in (1, 2):
        manager.save(state(step), step, wait=True)
    assert steps_in(root) == [2]
    comm.barrier()
    assert [path for path in root.iterdir() if ".gone." in path.name]
    comm.barrier()
    may_remove.set()
    manager.save(state(3), 3)
    manager.close()
    assert [path.name for path in root.iterdir()] == ["step-00000003"]


SCORES = st.none() | st.floats(0, 1) | st.just(math.nan)
PRESENT = st.lists(
    st.builds(Kept, step=st.integers(0, 50), whole=st.booleans(), score=SCORES),
    unique_by=lambda kept: kept.step,
)


@given(PRESENT, st.integers(1, 5), st.integers(0, 4))
def test_last_and_best_whole_checkpoints_are_kept(present, keep, keep_best):
    gone = expendable(present, keep=keep, keep_best=keep_best)
    whole = sorted((k for k in present if k.whole), key=lambda k: k.step)
    scored = [k for k in whole if k.score is not None and not math.isnan(k.score)]
    best = sorted(scored, key=lambda k: (-k.score, -k.step))[:keep_best]
    staying = {k.step for k in whole[-keep:] + best}
    assert not staying & {*gone}
    assert {k.step for k in whole} - {*gone} == staying
    assert gone == sorted(gone)


@given(PRESENT, st.integers(1, 5))
def test_damaged_checkpoint_is_removed_only_if_enough_newer_ones_are_whole(present, keep):
    gone = expendable(present, keep=keep)
    for kept in present:
        newer = sum(other.whole and other.step > kept.step for other in present)
        if not kept.whole:
            assert (kept.step in gone) == (newer >= keep)


@given(st.integers(0, 10**12))
def test_names_are_parsed_and_sorted_like_their_steps(step):
    assert step_of(name_of(step)) == step
    assert step >= 10**8 or name_of(step) < name_of(step + 1)


@pytest.mark.parametrize(
    "ending", ["1", "00000001.part", "00000001.aside", "000000001", "0000000a"]
)
def test_other_names_are_no_checkpoints(ending):
    assert step_of(f"step-{ending}") is None
