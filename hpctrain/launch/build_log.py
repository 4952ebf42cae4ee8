"""Log of a build: programs write into it, and what they say is read on the way."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from hpctrain.core.errors import LaunchError

LAST_LINES = 12
"""So much of a log is shown when something fails."""

_TELLING = re.compile(
    r"\berror\b|undefined reference|No space left|Killed|No matching distribution|not find|HASHES",
    re.IGNORECASE,
)

Say = Callable[[str], None]
"""Is told what happens, a line each."""


class BuildLog:
    """A file that holds all that the programs of a build print."""

    def __init__(self, path: Path, say: Say) -> None:
        """Begin a new file; ``say`` is told how far the compilers are, in steps of a tenth."""
        self.path = path
        self._say = say
        self._tenths = 0
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._file.close()

    def run(self, words: list[str], folder: Path, environ: dict[str, str], failure: str) -> None:
        """Run a program to its end; what ends this call before, ends all that it has started.

        Raises:
            LaunchError: ``failure``, and the lines that tell why.
        """
        said: list[str] = []
        self._file.write(f"$ {shlex.join(words)}\n")
        with subprocess.Popen(  # noqa: S603 - pip and compilers
            words,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            try:
                for line in child.stdout or ():
                    self._hear(line)
                    said.append(line.rstrip())
                code = child.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                raise
        if code:
            lines = telling(said) or [f"exit code {code}, it has printed nothing"]
            raise LaunchError(f"{failure}; {self.path} ends with:\n" + "\n".join(lines))

    def _hear(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()
        if match := re.match(r"\s*\[(\d+)/(\d+)\]", line):  # of ninja
            tenths = 10 * int(match[1]) // max(1, int(match[2]))
            if tenths > self._tenths:
                self._say(f"compiled: {10 * tenths} %")
            self._tenths = tenths


def telling(lines: list[str]) -> list[str]:
    """Pick the lines of a failure that people look for: errors, or else the last ones."""
    errors = [line for line in lines if _TELLING.search(line)]
    return (errors or [line for line in lines if line.strip()])[-LAST_LINES:]
