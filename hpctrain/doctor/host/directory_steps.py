"""The process that tries a directory: ``python -m hpctrain.doctor.host.directory_steps DIR``.

Before and after each step it writes a line of JSON, so that whoever started it knows where it
hangs.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hpctrain.core.atomic import sync
from hpctrain.doctor.host.directory_trial import file_system_of

_VALUE = b"hpctrain doctor"


def main(directory: Path) -> None:
    """Take all steps that make sense."""
    _say("place", file_system_of(directory), _free_bytes(directory))
    if not _step("list", lambda: os.listdir(directory)):  # noqa: PTH208 - errors come at once
        return
    made: list[Path] = []
    try:
        if _step("write", lambda: made.append(_write(directory))):
            folder = made[0]
            _step("lock", lambda: _lock(folder / "lock"))
            _step("hdf5", lambda: _hdf5(folder / "plain.h5", locking=False))
            _step("hdf5 locked", lambda: _hdf5(folder / "locked.h5", locking=True))
        else:
            shards = sorted(directory.glob("*.h5"))
            if shards:
                _step("read hdf5", lambda: _read(shards[0]))
    finally:
        for each in made:
            shutil.rmtree(each, ignore_errors=True)


def _say(*words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _step(name: str, act: Callable[[], object]) -> bool:
    _say("begin", name)
    error = ""
    try:
        act()
    except (OSError, ImportError, ValueError) as refusal:
        error = f"{type(refusal).__name__}: {refusal}"
    _say("end", error)
    return not error


def _free_bytes(directory: Path) -> int:
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _write(directory: Path) -> Path:
    """Make a folder with a file that reached the disk, and rename it, as checkpoints do."""
    folder = Path(tempfile.mkdtemp(prefix=".hpctrain-doctor-", dir=directory))
    _say("made", str(folder.absolute()))
    try:
        with (folder / "part").open("wb") as file:
            file.write(_VALUE)
            file.flush()
            os.fsync(file.fileno())
        (folder / "part").replace(folder / "lock")
        sync(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _lock(path: Path) -> None:
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)


def _hdf5(path: Path, *, locking: bool) -> None:
    import h5py  # noqa: PLC0415 - its absence is a finding

    with h5py.File(path, "w", locking=locking) as file:
        file["value"] = list(_VALUE)
    with h5py.File(path, "r", locking=locking) as file:
        if bytes(file["value"][:].tolist()) != _VALUE:
            raise ValueError(f"{path.name} does not hold what was written to it")


def _read(path: Path) -> None:
    import h5py  # noqa: PLC0415 - its absence is a finding

    with h5py.File(path, "r", locking=False) as file:
        list(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
