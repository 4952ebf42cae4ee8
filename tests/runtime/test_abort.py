"""Failures of a rank end all ranks within a time limit; other events do not end ranks."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.core.logs import file_in
from hpctrain.runtime.abort import computes, turn_s
from tests.harness.pace import scaled
from tests.processes import ended, wait_until

PREAMBLE = """
import ctypes, os, sys, threading
from pathlib import Path
from hpctrain.runtime.abort import FailureHooks

class World:
    "Prints calls of Abort and ends no process."
    rank = 7
    def Abort(self, errorcode=0):
        print("abort", errorcode, flush=True)

LOG = Path(sys.argv[1])
"""


def run(body: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return ended(
        [sys.executable, "-c", PREAMBLE + body, str(tmp_path)],
        cwd=Path(hpctrain.__file__).parents[1],
        timeout=30,
    )


def test_an_abort_that_hangs_still_ends_the_process(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = run(
        """
World.Abort = lambda self, code: ctypes.PyDLL(None).sleep(20)  # holds the GIL
FailureHooks(World(), None)
raise ValueError("bad luck")
""",
        tmp_path,
    )
    assert ended.returncode != 0
    assert time.monotonic() - start < scaled(5)
    assert "[rank 7] ValueError: bad luck" in ended.stderr


def test_every_line_is_tagged_and_on_disk_before_all_ranks_are_aborted(
    tmp_path: Path,
) -> None:
    ended = run(
        """
import pytest
from tests.power_loss import Disk
Disk(LOG, LOG / "record", pytest.MonkeyPatch())
FailureHooks(World(), LOG)
raise ValueError("two\\nlines")
""",
        tmp_path,
    )
    lines = ended.stderr.splitlines()
    assert [line for line in lines if not line.startswith("[rank 7] ")] == []
    log = file_in(tmp_path, 7)
    last = f"[rank 7] the whole traceback: {log}"
    assert lines[-3:] == ["[rank 7] ValueError: two", "[rank 7] lines", last]
    kept = (tmp_path / "record" / str(log.stat().st_ino)).read_text()
    assert kept == log.read_text()
    assert kept.startswith("[rank 7] Traceback (most recent call last):")
    assert (ended.returncode, ended.stdout) == (1, "abort 1\n")


def test_a_rank_has_no_process_and_no_file_before_it_fails(tmp_path: Path) -> None:
    ended = run(
        """
before = len(os.listdir("/proc/self/fd"))
hooks = FailureHooks(World(), LOG / "log")
print(os.listdir(LOG / "log"), Path(f"/proc/self/task/{os.getpid()}/children").read_text())
hooks.uninstall()
""",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["[]"]), ended.stderr


def test_crashes_of_ranks_and_of_their_children_are_tagged_in_one_file(tmp_path: Path) -> None:
    ended = run(
        """
import signal
def crash_in(what):
    os.kill(os.getpid(), what)
FailureHooks(World(), LOG)
if os.fork() == 0:
    crash_in(signal.SIGABRT)
os.wait()
crash_in(signal.SIGBUS)
""",
        tmp_path,
    )
    assert ended.returncode == -signal.SIGBUS
    lines = ended.stderr.splitlines()
    assert all(line.startswith("[rank 7] ") for line in lines)
    message = [line for line in lines if "Fatal Python error" in line]
    assert message == [f"[rank 7] Fatal Python error: {what}" for what in ("Aborted", "Bus error")]
    assert sum("in crash_in" in line for line in lines) == 2
    assert file_in(tmp_path, 7).read_text() == ended.stderr


def test_one_rank_of_a_host_prints_the_error_of_all(tmp_path: Path) -> None:
    wait = "(LOG / str(os.getpid())).touch(); sys.stdin.read()"
    body = f"{PREAMBLE}\nFailureHooks(World(), LOG)\n{wait}\nraise ValueError('bad luck')"
    line = [sys.executable, "-c", body, str(tmp_path)]
    root = Path(hpctrain.__file__).parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with (tmp_path / "err").open("w") as err:
        ranks = [subprocess.Popen(line, cwd=root, stderr=err, **pipes) for _ in range(6)]
    assert wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 6, 90)
    for rank in ranks:
        rank.stdin.close()
    log = file_in(tmp_path, 7)
    assert wait_until(lambda: log.exists() and log.read_text().count("ValueError") == 6, 60)
    assert wait_until(lambda: any(rank.poll() is not None for rank in ranks), 60)
    time.sleep(1.0)  # other ranks would print at this time
    for rank in ranks:  # the launcher ends all ranks after the first abort
        rank.kill()
        rank.wait()
    assert (tmp_path / "err").read_text().count("ValueError: bad luck") == 1


def test_few_hosts_print_an_error_of_ten_thousand_ranks() -> None:
    first = range(2, 10_000, 64)  # the ranks that fail first on their hosts
    turns = [turn_s(rank, is_first=True) for rank in first]
    assert turns == sorted(turns)
    assert sum(turn < turns[0] + 1.0 for turn in turns) == 1
    assert turns[-1] < 6
    assert turn_s(0, is_first=False) == 0
    assert turn_s(3, is_first=False) > turns[-1]


RANK_LOST = "from hpctrain.core.errors import RankLostError; raise RankLostError('gone')"


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [("raise KeyboardInterrupt", 130, "interrupted"), (RANK_LOST, 87, "gone")],
)
def test_interrupts_and_lost_ranks_are_reported_in_one_line(
    statement: str, code: int, words: str, tmp_path: Path
) -> None:
    ended = run(f"FailureHooks(World(), None)\n{statement}", tmp_path)
    assert (ended.returncode, ended.stdout) == (code, f"abort {code}\n")
    assert ended.stderr.startswith(f"[rank 7] {words}")
    assert len(ended.stderr.splitlines()) == 1


def test_an_exception_in_a_forked_child_ends_only_the_child(tmp_path: Path) -> None:
    ended = run(
        """
FailureHooks(World(), None)
if os.fork() == 0:
    raise ValueError("a child's")
os.wait()
print("parent goes on")
""",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "parent goes on\n")
    assert "ValueError: a child's" in ended.stderr


def test_exceptions_in_helper_threads_do_not_abort_and_hooks_are_restored(
    tmp_path: Path,
) -> None:
    ended = run(
        """
def in_thread(target, *args):
    thread = threading.Thread(target=target, args=args)
    thread.start(); thread.join()

threading.excepthook = lambda args: print("heard", args.exc_value)  # set by the user
before = sys.excepthook, threading.excepthook
hooks = FailureHooks(World(), LOG)
assert (sys.excepthook, threading.excepthook) != before
in_thread(sys.exit, 1)
in_thread(lambda: 1 / 0)
hooks.uninstall()
assert (sys.excepthook, threading.excepthook) == before
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
""",
        tmp_path,
    )
    # Python calls a user's threading.excepthook for SystemExit too.
    assert (ended.returncode, ended.stdout) == (
        0,
        "heard 1\nheard division by zero\nno child\n",
    )
    assert ended.stderr.count("Traceback") == 1
    assert "[rank 7] ZeroDivisionError" in ended.stderr


def test_only_code_that_uses_torch_counts_as_computing() -> None:
    def trace(function):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any
            function()
        return caught.value.__traceback__.tb_next

    tensor, model = torch.ones(3), torch.nn.Linear(2, 2)
    assert computes(trace(lambda: tensor @ torch.ones(4)))
    assert computes(trace(lambda: Closing(model).work()))
    assert computes(trace(lambda: torch.load("/nowhere")))
    assert not computes(trace(lambda: {}["key"]))
    assert not computes(trace(lambda: json.loads("{")))


class Closing:
    def __init__(self, model):
        self.work = lambda: (model, 1 / 0)
