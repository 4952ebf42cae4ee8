"""Crashes in native code: the Python stack of SIGSEGV and its like, tagged with the rank."""

import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path

FAREWELL_S = 1.0
"""Time for the tagger to end once nobody can write to it any more."""


class CrashReport:
    """Sends what ``faulthandler`` writes to stderr and the rank's log, each line with its rank.

    ``faulthandler`` writes to one file and knows no ranks, and a crashed process can do nothing
    more: so it writes into a pipe, and a sleeping ``sed`` on the other end does the rest. It
    ends with this process, however that ends. Without ``sed`` the stack is on stderr, untagged.
    """

    def __init__(self, rank: int) -> None:
        self._tag = f"[rank {rank}] "
        self._tagger: subprocess.Popen[bytes] | None = None
        self._enabled = False

    def start(self, log: Path | None) -> None:
        """Catch crashes from now on, unless the user has enabled ``faulthandler`` himself."""
        if self._enabled or faulthandler.is_enabled():
            return
        self._enabled = True
        with contextlib.suppress(OSError):
            self._tagger = _start_tagger(self._tag, log)
        if self._tagger and self._tagger.stdin:
            faulthandler.enable(self._tagger.stdin.fileno())
        elif sys.__stderr__:
            faulthandler.enable(sys.__stderr__.fileno())

    def stop(self) -> None:
        """Stop catching crashes."""
        if not self._enabled:
            return
        self._enabled = False
        faulthandler.disable()
        if self._tagger and self._tagger.stdin:
            self._tagger.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A forked child of ours may still hold the pipe: then the tagger outlives us.
                self._tagger.wait(FAREWELL_S)
        self._tagger = None


def _start_tagger(tag: str, log: Path | None) -> subprocess.Popen[bytes] | None:
    sed = shutil.which("sed")
    if sed is None:
        return None
    # stdout appends to the log; sed's own "w" would truncate it.
    out = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        return subprocess.Popen(  # noqa: S603 - nothing of it comes from a user
            [sed, "-u", "-e", f"s/^/{tag}/", "-e", "w /dev/stderr"],
            stdin=subprocess.PIPE,
            stdout=out,
            # Not in our process group: a Ctrl-C or the launcher's kill must not silence it.
            start_new_session=True,
        )
    finally:
        os.close(out)
