"""Trial of file operations in a directory.

The trial runs in a separate process, so that a hanging file system does not block the caller.

The process, ``python -m hpctrain.doctor.host.directory_trial DIR NAME``, prints a line of JSON
before and after each step. If the process hangs, the last line names the step that hangs.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.atomic import sync
from hpctrain.doctor.checks.facts import DirectoryFacts
from hpctrain.launch.program import run_to_end, start

if TYPE_CHECKING:
    import h5py

TRIAL_S = 10.0  # sufficient for a slow file system, but short enough for the user to wait

_GRACE_S = 1.0  # longest wait for a killed process; it may not end while a file server hangs
_VALUE = b"hpctrain doctor"


def try_directory(path: Path, limit_s: float = TRIAL_S) -> DirectoryFacts:
    """Try to write, lock and read files in a directory with the calls that hpctrain and HDF5 use.

    The trial removes its files. A trial that takes longer than ``limit_s`` counts as hanging.
    """
    name = f".hpctrain-doctor-{uuid.uuid4().hex[:8]}"
    line = [sys.executable, "-m", __name__, str(path), name]
    with start(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        hung, output = False, b""
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            hung = True
            child.kill()
            try:
                output, _ = child.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired as error:
                output = error.output or b""
                child.returncode = -9  # do not wait for the process
            _remove(path / name)
    return facts_of(path, output.decode(errors="replace").splitlines(), hung=hung)


def facts_of(path: Path, lines: Iterable[str], *, hung: bool) -> DirectoryFacts:
    """Return the facts about a directory from the output of the trial process.

    The output has a line about the file system, and two lines for each step.
    """
    file_system, free_bytes, last = "", 0, "start"
    steps: dict[str, str | None] = {}
    for line in lines:
        try:
            word, *rest = json.loads(line)
        except ValueError:  # incomplete, because the process was killed
            break
        if word == "place":
            file_system, free_bytes = rest
        else:
            last, steps[word] = word, rest[0]
    is_open = steps.get(last) is None
    return DirectoryFacts(
        path=path,
        file_system=file_system,
        free_bytes=free_bytes,
        steps={step: refusal for step, refusal in steps.items() if refusal is not None},
        hung=(last if is_open else "end") if hung else "",
    )


def _remove(folder: Path) -> None:
    """Remove the files of a killed trial in a separate process, because the removal may hang."""
    remover = start(["/bin/rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)
    with suppress(subprocess.TimeoutExpired):
        remover.wait(_GRACE_S)
    remover.returncode = remover.returncode or 0  # do not wait for the process


def file_system_of(path: Path) -> str:
    """Return the file system type of a path, such as ``xfs`` or ``lustre``; empty if unknown."""
    line = ["stat", "--file-system", "--format=%T", "--", str(path)]
    try:
        return run_to_end(line, timeout_s=TRIAL_S).stdout.strip()
    except OSError:
        return ""


def take_steps(directory: Path, name: str) -> None:
    """Run the steps of the trial, and print each result; new files are in the folder ``name``."""
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError:
        free_bytes = 0
    _report("place", file_system_of(directory), free_bytes)
    if not _step("list", lambda: list(directory.iterdir())):
        return
    folder = directory / name
    try:
        if _step("write", lambda: _write(folder)):
            _step("lock", lambda: _lock(folder / "lock"))
            _step("hdf5", lambda: _hdf5(folder / "plain.h5", locking=False))
            _step("hdf5 locked", lambda: _hdf5(folder / "locked.h5", locking=True))
        elif shards := sorted(directory.glob("*.h5")):
            _step("read hdf5", lambda: _opened(shards[0], "r", locking=False).close())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(*words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _step(name: str, act: Callable[[], object]) -> bool:
    _report(name, None)
    refusal = ""
    try:
        act()
    except (OSError, ImportError, ValueError) as error:
        refusal = f"{type(error).__name__}: {error}"
    _report(name, refusal)
    return not refusal


def _write(folder: Path) -> None:
    """Create a folder, write a file to disk and rename the file, like the checkpoint writer."""
    folder.mkdir(mode=0o700)
    with (folder / "part").open("wb") as file:
        file.write(_VALUE)
        file.flush()
        os.fsync(file.fileno())
    (folder / "part").replace(folder / "lock")
    sync(folder)


def _lock(path: Path) -> None:
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)


def _hdf5(path: Path, *, locking: bool) -> None:
    with _opened(path, "w", locking=locking) as file:
        file["value"] = list(_VALUE)
    with _opened(path, "r", locking=locking) as file:
        if bytes(file["value"][:].tolist()) != _VALUE:
            raise ValueError(f"{path.name} must contain the written value, but does not")


def _opened(path: Path, mode: str, *, locking: bool) -> "h5py.File":
    import h5py  # noqa: PLC0415 - a missing package is a finding

    return h5py.File(path, mode, locking=locking)


if __name__ == "__main__":
    take_steps(Path(sys.argv[1]), sys.argv[2])
