"""Failures of a rank end all ranks within a time limit; other events do not end ranks."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.runtime.abort import computes
from tests.harness.pace import scaled
from tests.processes import ended

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
    log = tmp_path / "rank-7.log"
    last = f"[rank 7] the whole traceback: {log}"
    assert lines[-3:] == ["[rank 7] ValueError: two", "[rank 7] lines", last]
    kept = (tmp_path / "record" / str(log.stat().st_ino)).read_text()
    assert kept == log.read_text()
    assert kept.startswith("[rank 7] Traceback (most recent call last):")
    assert (ended.returncode, ended.stdout) == (1, "abort 1\n")


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
