"""The log of a build: programs write into it, and what they say is read on the way."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

LAST_LINES = 12
"""So much of a log is shown when something fails."""

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_TELLING = re.compile(
    r"\berror\b|CMake Error|undefined reference|No space left|Killed|No matching distribution"
    r"|not find|HASHES",
    re.IGNORECASE,
)


class Log:
    """A file that holds all that the programs of a build print."""

    def __init__(self, path: Path) -> None:
        """Begin a new file."""
        self.path = path
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self._file.close()

    def run(
        self,
        line: Sequence[str | Path],
        *,
        environ: Mapping[str, str],
        folder: Path,
        heard: Callable[[str], None] = lambda _line: None,
    ) -> list[str]:
        """Run a program to its end; return the lines that tell why it failed, none if it did not.

        Whatever ends this call before, ends the program and all that it has started.

        Args:
            line: of the program and its arguments.
            environ: its variables.
            folder: where it runs.
            heard: is called with each line that it prints.
        """
        said: list[str] = []
        words = list(map(str, line))
        self._write("$ " + " ".join(words) + "\n")
        with (
            _Ending() as ending,
            subprocess.Popen(  # noqa: S603 - pip and compilers
                words,
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as child,
        ):
            ending.watch(child)
            assert child.stdout is not None
            try:
                for text in child.stdout:
                    self._write(text)
                    said.append(text.rstrip())
                    heard(text)
                code = child.wait()
            except BaseException:
                _end(child, signal.SIGKILL)
                raise
        self._write(f"# exit code {code}\n")
        return telling(said) or [f"exit code {code}, it has printed nothing"] if code else []

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def telling(lines: Sequence[str]) -> list[str]:
    """Pick the lines of a failure that people look for: errors, or else the last ones."""
    errors = [line for line in lines if _TELLING.search(line)]
    return (errors or [line for line in lines if line.strip()])[-LAST_LINES:]


def percent_of(line: str) -> int | None:
    """Read ``[ 42%] Building ...`` of make and ``[5/12] Building ...`` of ninja."""
    if match := _PERCENT.match(line):
        return int(match[1])
    if (match := _COUNT.match(line)) and int(match[2]):
        return 100 * int(match[1]) // int(match[2])
    return None


class _Ending:
    """Lets Ctrl-C and SIGTERM reach a program first, and this process when that has ended.

    An exception in the instant in which a program starts would leave it running.
    """

    def __init__(self) -> None:
        self._caught: list[int] = []
        self._child: subprocess.Popen[str] | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._caught:
            signal.raise_signal(self._caught[0])

    def watch(self, child: "subprocess.Popen[str]") -> None:
        """Name the program; one that was to end already is ended."""
        self._child = child
        if self._caught:
            _end(child, signal.SIGTERM)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self._child is not None:  # who asks twice means it
            _end(self._child, signal.SIGKILL if self._caught else signal.SIGTERM)
        self._caught.append(number)


def _end(child: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send a signal to a program and all that it has started: they are one process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
