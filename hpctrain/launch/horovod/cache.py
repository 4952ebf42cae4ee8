"""Cache of Horovod's wheels: atomic, and written by one build at a time."""

import fcntl
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.atomic import publishing, reason_of
from hpctrain.core.errors import LaunchError

LOG = "build.log"
"""Everything that the last build of a folder has printed."""

_LOCK = "lock"


def root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of all wheels: ``hpctrain/horovod`` of the user's cache."""
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be passed over, says the XDG Base Directory Specification.
    base = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return base / "hpctrain" / "horovod"


def wheel_in(folder: Path) -> Path | None:
    """Return the wheel of a folder, if one was built."""
    found = sorted(folder.glob("horovod-*.whl"))
    return found[-1] if found else None


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep all other builds away from a folder, on this machine and others that lock files there.

    Waits for a build that is under way.

    Args:
        folder: is made if need be.
        say: is told, once, who is waited for.

    Raises:
        LaunchError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"wheels are kept in {folder}, it cannot be written: {reason_of(error)}; "
            "name another folder with --wheel-dir"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(
                f"another build of this wheel is under way ({file.read().strip()}): waiting for it"
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def store(wheel: Path, folder: Path) -> Path:
    """Copy a finished wheel to its folder, where it appears at once; return its place.

    Raises:
        LaunchError: the folder cannot be written.
    """
    place = folder / wheel.name
    try:
        with publishing(place) as part:
            shutil.copyfile(wheel, part)
    except OSError as error:
        raise LaunchError(
            f"wheels are kept in {folder}, it cannot be written: {reason_of(error)}; "
            "name another folder with --wheel-dir"
        ) from None
    for other in folder.glob("horovod-*.whl"):
        if other != place:
            other.unlink(missing_ok=True)
    return place
