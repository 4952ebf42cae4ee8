import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cluster.memory import Room
from hpctrain.core.units import GIB, MIB
from hpctrain.doctor.host.facts import Leftover
from hpctrain.doctor.host.leftovers import leftovers
from hpctrain.doctor.host.memory import check, check_leftovers, check_node_memory
from tests.doctor.host.healthy import HEALTHY, MPICH, SRUN, only, with_

REFUSED = "[Errno 1] Operation not permitted"


@pytest.mark.parametrize(("left_bytes", "level"), [(2 * GIB, "ok"), (2 * GIB - 1, "warning")])
def test_a_group_without_room_for_the_ranks_is_a_warning(left_bytes, level):
    rooms = (*HEALTHY.memory.rooms, Room((0, 1), "the control group /job_7", left_bytes))
    found = only(check(with_(SRUN, memory={"rooms": rooms})))
    assert found.level == level
    assert "/job_7" in found.what


def test_a_system_that_tells_nothing_has_no_fault():
    assert only(check(with_(memory={"rooms": ()}))).level == "ok"


@pytest.mark.parametrize(
    ("environ", "library", "free_bytes", "level"),
    [
        ({}, None, 64 * MIB, "warning"),  # a rank for each of eight cores
        ({}, None, 128 * MIB, "ok"),
        (SRUN, None, 64 * MIB, "ok"),
        (SRUN, None, 63 * MIB, "warning"),
        (SRUN, MPICH, 16 * MIB, "ok"),
        (SRUN, None, 0, "warning"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1"}, None, 0, "ok"),
        ({**SRUN, "HPCTRAIN_SHARED_MEMORY": "window"}, None, 64 * MIB, "warning"),
        ({**SRUN, "HPCTRAIN_SHARED_MEMORY": "window"}, None, 164 * MIB, "ok"),
    ],
)
def test_a_small_dev_shm_is_a_warning(environ, library, free_bytes, level):
    mpi = {"library": library} if library else {}
    facts = with_(environ, mpi=mpi, memory={"shm_free_bytes": free_bytes})
    found = only(check_node_memory(facts))
    assert found.level == level
    assert level == "ok" or "--shm-size" in found.do


def test_without_memfd_windows_are_taken_and_that_is_a_warning():
    found = only(check_node_memory(with_(memory={"memfd_error": REFUSED})))
    assert found.level == "warning"
    assert REFUSED in found.what


def test_a_memfd_that_was_forced_and_refused_is_an_error():
    environ = {"HPCTRAIN_SHARED_MEMORY": "memfd"}
    assert only(check_node_memory(with_(environ, memory={"memfd_error": "no"}))).level == "error"


def test_node_memory_that_was_switched_off_is_a_note():
    assert only(check_node_memory(with_({"HPCTRAIN_SHARED_MEMORY": "off"}))).level == "note"


def test_a_setting_that_is_not_valid_is_left_to_another_check():
    assert only(check_node_memory(with_({"HPCTRAIN_SHARED_MEMORY": "?"}))).level == "ok"


def left(names, num_bytes=MIB):
    found = [Leftover(path=Path("/dev/shm", n), num_bytes=num_bytes, maker="MPI") for n in names]
    return with_(memory={"leftovers": tuple(found)})


def test_stale_files_are_a_note_and_a_warning_where_they_take_much():
    assert only(check_leftovers(HEALTHY)).level == "ok"
    assert only(check_leftovers(left(["sm_segment.a"]))).level == "note"
    assert only(check_leftovers(left(["sm_segment.a"], 2 * GIB))).level == "warning"


def test_few_are_removed_by_name_and_many_by_pattern():
    few = only(check_leftovers(left(["sm_segment.a", "mpich_shm_b"])))
    assert few.do == "cd /dev/shm && rm -r sm_segment.a mpich_shm_b"
    many = only(check_leftovers(left([f"sm_segment.{number}" for number in range(400)])))
    assert "-name 'sm_segment.*'" in many.do
    assert len(many.do) < 200


def make(path, age_s=3600):
    path.write_bytes(b"x" * 8192)
    old = time.time() - age_s
    os.utime(path, (old, old))
    return path


def test_only_old_files_that_nobody_uses_are_stale(tmp_path):
    stale = make(tmp_path / "sm_segment.vm.0.1")
    mapped, opened = make(tmp_path / "vader_segment.1"), make(tmp_path / "mpich_shm_1")
    make(tmp_path / "sm_segment.vm.0.2", age_s=1)
    make(tmp_path / "somebody_elses")
    code = (
        "import mmap, sys; a = open(sys.argv[1], 'r+b'); m = mmap.mmap(a.fileno(), 0); a.close();"
        "b = open(sys.argv[2]); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, mapped, opened], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        user.stdout.readline()
        (found,) = leftovers(tmp_path)
        user.stdin.close()
    assert (found.path, found.maker, found.num_bytes) == (stale, "Open MPI", 8192)
    assert {each.path for each in leftovers(tmp_path)} == {stale, mapped, opened}


def test_a_folder_of_ours_is_stale_without_its_lock(tmp_path):
    old = time.time() - 3600
    for name in ("hpctrain-held", "hpctrain-ended", "hpctrain-unknown"):
        (tmp_path / name).mkdir()
        if name != "hpctrain-unknown":
            (tmp_path / name / "lock").write_bytes(b"")
        os.utime(tmp_path / name, (old, old))
    code = (
        "import fcntl, sys; a = open(sys.argv[1]); fcntl.flock(a, fcntl.LOCK_SH);"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "hpctrain-held/lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        assert [each.path.name for each in leftovers(tmp_path)] == ["hpctrain-ended"]
        holder.stdin.close()
