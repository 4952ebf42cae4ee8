import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PYTHON = shlex.quote(sys.executable)


def hpctrain(*words):
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", *words], capture_output=True, text=True, check=False
    )


def test_help_shows_examples():
    done = hpctrain("launch", "--help")
    assert done.returncode == 0
    assert "hpctrain launch -n 4 python train.py" in done.stdout


def test_a_dry_run_prints_the_line_and_starts_nothing(tmp_path):
    done = hpctrain("launch", "-n", "2", "--dry-run", "touch", str(tmp_path / "started"))
    words = shlex.split(done.stdout)
    assert Path(words[0]).name == "mpirun"
    assert words[words.index("-np") + 1] == "2"
    assert words[-1] == str(tmp_path / "started")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_behind_the_command_are_its_own(dashes):
    done = hpctrain(
        "launch", "-n", "2", "--dry-run", *dashes, "python", "-c", "0", "-n", "9", "--help"
    )
    assert done.stdout.rstrip().endswith(f" {PYTHON} -c 0 -n 9 --help")
    assert " -np 2 " in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2"], "needs a command"),
        (["-n", "2", "no-such-program"], "no-such-program"),
        (["-n", "4", "--nodes", "3", "python"], "4 ranks cannot make 3"),
        (["-n", "2", "--mpirun", "/nowhere/mpirun", "python"], "/nowhere/mpirun"),
        (["-n", "2", "--node", "2", "python"], "--nodes"),
        (["python"], "-n"),
    ],
)
def test_a_launch_that_cannot_be_is_one_error_and_no_traceback(words, text):
    done = hpctrain("launch", *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.launches
def test_declared_nodes_are_one_two_level_world():
    code = "from hpctrain import *; init(); print(f'{rank()}/{size()} {cross_rank()}\\n', end='')"
    done = hpctrain("launch", "-n", "4", "--nodes", "2", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0/4 0", "1/4 0", "2/4 1", "3/4 1"]


@pytest.mark.launches
def test_the_exit_code_is_the_commands():
    assert hpctrain("launch", "-n", "1", "python", "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.launches
def test_a_launch_past_its_limit_ends_with_124():
    done = hpctrain("launch", "-n", "2", "--timeout", "2", "sleep", "60")
    assert done.returncode == 124


@pytest.mark.launches
def test_each_line_names_its_rank_on_request():
    done = hpctrain("launch", "-n", "2", "--tag-output", "echo", "hello")
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    assert all("hello" in line for line in lines)
    assert "0" in lines[0].partition("hello")[0]
    assert "1" in lines[1].partition("hello")[0]


@pytest.mark.launches
def test_ctrl_c_ends_with_130(tmp_path):
    code = f"import time; open({str(tmp_path / 'here')!r}, 'w'); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "launch", "-n", "1", "python", "-c", code],
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 30
    while not (tmp_path / "here").exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
