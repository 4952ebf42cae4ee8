"""Every way a launch can end, with the real mpirun of this environment."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.supervise import TIMED_OUT, descendants, supervise
from tests.launch.started import line, ranks_are_gone, start, wait_for

pytestmark = [pytest.mark.launches, pytest.mark.limit(60)]


WAITS_IN_INIT = "if rank == 1: sys.exit(3)\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()"
DEATHS = ("os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError")


@pytest.mark.parametrize(
    "code", [*(f"if rank == 1: {death}\ntime.sleep(50)" for death in DEATHS), WAITS_IN_INIT]
)
def test_one_ranks_death_ends_the_launch_with_an_error(tmp_path, code):
    before = time.monotonic()
    assert supervise(line(tmp_path, code), environ=mpiexec.environment()) != 0
    assert time.monotonic() - before < 30
    assert ranks_are_gone(tmp_path)


def test_a_launch_past_its_limit_ends_with_124(tmp_path):
    code = supervise(
        line(tmp_path, "time.sleep(50)"), environ=mpiexec.environment(), timeout_s=3.0, grace_s=1.0
    )
    assert code == TIMED_OUT
    assert ranks_are_gone(tmp_path)


@pytest.mark.parametrize(("code", "num_ranks"), [(0, 2), (7, 1), (1, 3), (85, 3)])
def test_a_code_that_all_ranks_end_with_is_passed_on(tmp_path, code, num_ranks):
    argv, before = line(tmp_path, f"sys.exit({code})", num_ranks), signal.getsignal(signal.SIGTERM)
    assert supervise(argv, environ=mpiexec.environment()) == code
    assert signal.getsignal(signal.SIGTERM) is before


STUBBORN = "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("number", "ignores"),
    [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGHUP, ""), (signal.SIGINT, STUBBORN)],
)
def test_a_signal_ends_mpirun_and_its_ranks(tmp_path, number, ignores):
    process = start(tmp_path, f"{ignores}time.sleep(50)", grace_s=1.0 if ignores else 2.0)
    process.send_signal(number)
    assert process.wait(timeout=15) != 0
    assert ranks_are_gone(tmp_path)


def test_a_second_signal_kills_at_once(tmp_path):
    process = start(tmp_path, f"{STUBBORN}time.sleep(50)", grace_s=60.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) != 0
    assert ranks_are_gone(tmp_path)


def test_the_input_of_a_script_around_a_launch_is_left_alone(tmp_path):
    launch = (
        "from hpctrain.launch import mpiexec; from hpctrain.launch.supervise import supervise; "
        f"supervise({line(tmp_path, 'pass')!r}, environ=mpiexec.environment())"
    )
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1"; cat', sys.executable, launch],
        input="still here\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "still here\n"


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path, "time.sleep(3)")
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=15) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(LaunchError, match="/nowhere/mpirun"):
        supervise(["/nowhere/mpirun"])


def test_descendants_are_children_and_their_children():
    with subprocess.Popen(["sh", "-c", "sleep 30 & wait"]) as shell:
        wait_for(lambda: len(descendants(shell.pid)) == 1)
        (sleep,) = descendants(shell.pid)
        assert shell.pid in descendants(os.getpid())
        assert sleep in descendants(os.getpid())
        os.kill(sleep, signal.SIGTERM)


def test_an_mpirun_that_outlives_its_ranks_is_killed(capfd):
    # It has had a rank and does not end: what Open MPI's does when it deadlocks in its own end.
    hung = "import subprocess, time; rank = subprocess.Popen(['true']); time.sleep(60)"
    before = time.monotonic()
    assert supervise([sys.executable, "-c", hung]) == 128 + signal.SIGKILL
    assert time.monotonic() - before < 20
    assert "mpirun hangs after its ranks have ended" in capfd.readouterr().err
