"""Keeps a daemon where no namespace does: all that came of it ends when its owner ends.

Started as a program, ``python keeper.py COMMAND...`` runs the command, which puts a daemon in the
background and ends; prints its exit code and its output in one line of JSON; and kills every
process that came of it once standard input closes.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""Of ``linux/prctl.h``: orphans among the descendants become children of this process."""


def descendants(pid: int) -> list[int]:
    """List the processes that came of one, without those that ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [process for child in children for process in (child, *descendants(child))]


def end_all() -> None:
    """Kill the descendants until none is left."""
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(sys.argv[1:], stdin=-3, stdout=said, stderr=said, check=False)
        said.seek(0)
        answer = {"code": done.returncode, "output": said.read().decode(errors="replace")}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects those that end
    sys.stdin.read()
    end_all()
