"""Try a directory in a process of its own: what hangs there must not hang the doctor."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpctrain.doctor.host.facts import DirectoryFacts, JobStep

TRIAL_S = 10.0
"""Enough for a slow file system, short enough to wait for."""

_GRACE_S = 1.0
"""A process that waits for a dead file server cannot even be killed."""


def try_directory(path: Path, limit_s: float = TRIAL_S) -> DirectoryFacts:
    """Write, lock and read there as hpctrain and HDF5 do, and remove what was written.

    Args:
        path: the directory; it need not exist.
        limit_s: what lasts longer counts as hanging.
    """
    with subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "hpctrain.doctor.host.directory_steps", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as child:
        hung, output = False, ""
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            hung = True
            child.kill()
            try:
                output, _ = child.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired as error:
                output = _text(error.output)
                child.returncode = -9  # nobody waits for it
            _remove_what_was_made(output)
    return facts_of(path, output.splitlines(), hung=hung)


def facts_of(path: Path, lines: Iterable[str], *, hung: bool) -> DirectoryFacts:
    """Read what the child said before it ended."""
    file_system, free_bytes, running = "", 0, "start"
    steps: list[JobStep] = []
    for line in lines:
        try:
            word, *rest = json.loads(line)
        except ValueError:  # cut off
            break
        if word == "place":
            file_system, free_bytes = rest
        elif word == "begin":
            running = rest[0]
        elif word == "end":
            steps.append(JobStep(name=running, error=rest[0]))
            running = ""
    return DirectoryFacts(
        path=path,
        file_system=file_system,
        free_bytes=free_bytes,
        steps=tuple(steps),
        hung=(running or "end") if hung else "",
    )


def _remove_what_was_made(output: str) -> None:
    """Remove the folder of a trial that was ended, in a process that may hang as well."""
    for line in output.splitlines():
        if line.startswith('["made", ') and line.endswith("]"):
            remover = subprocess.Popen(  # noqa: S603 - a folder that the trial made and named
                ["/bin/rm", "-rf", "--", json.loads(line)[1]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with suppress(subprocess.TimeoutExpired):
                remover.wait(_GRACE_S)
            remover.returncode = remover.returncode or 0  # nobody waits for it


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of file system a path is on, such as ``ext4`` or ``lustre``."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    path = Path(os.path.realpath(path))
    found = [(fields[4], line) for line in lines if len(fields := line.split()) > 6]
    # Of equal mount points the later one lies on top; max keeps the first of equals.
    on_path = [(point, line) for point, line in reversed(found) if path.is_relative_to(point)]
    if not on_path:
        return ""
    _, line = max(on_path, key=lambda each: len(each[0]))
    return line.partition(" - ")[2].split()[0]
