"""Whereabouts of this process: its last collective, and the line of its main thread."""

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import hpctrain

MAX_FRAMES = 10
"""Lines of a stack; of a deeper one the innermost."""

_OURS = str(Path(hpctrain.__file__).parent)
_INSTALLED = ("stdlib", "platstdlib", "scripts")
_LIBRARIES = ("<frozen", _OURS, *map(sysconfig.get_path, _INSTALLED))
_PACKAGES = {"site-packages", "dist-packages"}


class LastCall:
    """Remembers the last collective of this process, and which threads had one."""

    __slots__ = ("_noted", "_threads")

    def __init__(self) -> None:
        self._noted: tuple[str, str, float] | None = None
        self._threads: set[int] = set()

    def enter(self) -> None:
        """Note that this thread communicates."""
        self._threads.add(threading.get_ident())

    def note(self, what: str, name: str = "") -> None:
        """Note one that is over: ``note("allreduce", "allreduce.loss")``."""
        self._noted = (what, name, time.monotonic())
        self.enter()

    def was_on(self, thread: int | None) -> bool:
        """Say whether a thread, by its identifier, has communicated."""
        return thread in self._threads

    def describe(self) -> tuple[str, float | None]:
        """Return its name and how many seconds ago it was noted; None if there was none."""
        if self._noted is None:
            return "none so far", None
        what, name, when = self._noted
        text = name if name.startswith(what) else f"{what} {name}".rstrip()
        return text, time.monotonic() - when


def main_stack() -> str:
    """Return where the main thread is, outermost first; of libraries the innermost line alone."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    if frame is None:
        return "it has no main thread any more"
    return _shown(list(traceback.StackSummary.extract(traceback.walk_stack(frame)))[::-1])


def _shown(stack: Sequence[traceback.FrameSummary]) -> str:
    users = [place for place, each in enumerate(stack) if not _is_library(each.filename)]
    kept = [stack[place] for place in users] or list(stack)
    if users:
        # What was called of hpctrain last stands in the line that calls it.
        inside = [each for each in stack[users[-1] + 1 :] if not each.filename.startswith(_OURS)]
        kept += inside[-1:]
    hidden = ["..."] if len(kept) > MAX_FRAMES else []
    return "\n".join([*hidden, *map(_line, kept[-MAX_FRAMES:])])


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or not _PACKAGES.isdisjoint(Path(file).parts)


def _line(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{code}"
