import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.launch.horovod.log import LAST_LINES, Log, percent_of, telling

SLEEPER = """
import os, signal, sys
from pathlib import Path
from hpctrain.launch.horovod.build import _ended_by_sigterm
from hpctrain.launch.horovod.log import Log
folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
program = "echo $$ > first; (sh -c 'echo $$ > second; exec sleep 60') & wait"
with _ended_by_sigterm(), Log(folder / "log") as log:
    log.run(["sh", "-c", program], environ=os.environ, folder=folder)
"""


def run(tmp_path, program, heard=lambda _line: None):
    with Log(tmp_path / "log") as log:
        return log.run(["sh", "-c", program], environ=os.environ, folder=tmp_path, heard=heard)


def test_all_that_is_printed_is_in_the_log_and_heard(tmp_path):
    lines = []
    assert run(tmp_path, "echo one; echo two >&2; printf three", lines.append) == []
    assert "".join(lines) == "one\ntwo\nthree"
    text = (tmp_path / "log").read_text()
    assert "one\ntwo\nthree" in text
    assert text.endswith("# exit code 0\n")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo fine; echo 'x.cc:3: error: no'; echo make: stop; exit 2", ["x.cc:3: error: no"]),
        ("echo first; echo; echo last; exit 1", ["first", "last"]),
        ("exit 3", ["exit code 3, it has printed nothing"]),
    ],
)
def test_what_tells_of_a_failure_is_returned(tmp_path, program, said):
    assert run(tmp_path, program) == said


def test_of_many_errors_the_last_are_shown():
    lines = [f"error {number}" for number in range(100)]
    assert telling(lines) == lines[-LAST_LINES:]


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[  7%] Building CXX object a.o\n", 7),
        ("[100%] Built target pytorch\n", 100),
        ("[3/12] Building CXX object a.o\n", 25),
        ("[0/0] none\n", None),
        ("-- Found MPI_CXX: 50%\n", None),
    ],
)
def test_percentages_of_make_and_ninja(line, percent):
    assert percent_of(line) == percent


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_the_build_ends_its_compilers(tmp_path, number):
    def pids():
        files = [tmp_path / name for name in ("first", "second")]
        return [int(file.read_text() or 0) for file in files if file.exists()]

    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stderr=subprocess.DEVNULL
    ) as build:
        wait_for(lambda: len(pids()) == 2 and all(pids()))
        build.send_signal(number)
        assert build.wait(30) != 0
    wait_for(lambda: not any(map(is_alive, pids())))
