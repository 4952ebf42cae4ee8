"""Collection of facts about GPUs, their network and the caches of their compilers."""

import os
import re
import resource
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpctrain.cluster.binding import gpu_places
from hpctrain.cluster.resources import affinity, text_of
from hpctrain.core.errors import LaunchError
from hpctrain.core.units import parse_numbers
from hpctrain.doctor.checks.facts import DirectoryFacts, GpuNetworkFacts, StripeFacts
from hpctrain.doctor.host.directory_trial import file_system_of
from hpctrain.launch.program import run_to_end

LFS_S = 5.0  # time limit of ``lfs getstripe``

_PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*")
_LIBRARIES = ("/usr/lib64", "/usr/lib", "/usr/local/lib")
_CACHES = (
    ("TRITON_CACHE_DIR", "~/.triton/cache", ""),
    ("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir(), ""),
    ("MIOPEN_USER_DB_PATH", "~/.config/miopen", "amd"),
    ("MIOPEN_CUSTOM_CACHE_DIR", "~/.cache/miopen", "amd"),
)
"""For each cache: its variable, its default directory, and the vendor of the GPUs that use it."""


def gather(
    environ: Mapping[str, str],
    directories: Iterable[DirectoryFacts] = (),
    *,
    root: Path = Path("/"),
    mask: Iterable[int] | None = None,
) -> GpuNetworkFacts:
    """Return the facts about the GPUs of this machine and their network.

    Args:
        environ: environment variables of the process.
        directories: trial results of the directories that the user named.
        root: folder that contains ``sys`` and ``proc``; tests pass another folder.
        mask: hardware threads of this process; by default from the affinity mask.
    """
    own = set(affinity() if mask is None else mask)
    places = tuple(gpu_places(root / "sys"))
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    free, total = _memory(root / "proc/meminfo")
    return GpuNetworkFacts(
        places=places,
        interfaces=tuple(sorted(path.name for path in (root / "sys/class/net").glob("*"))),
        plugins=tuple(_plugins(environ)),
        num_numa_nodes=sum(bool(own & {*parse_numbers(text_of(node))}) for node in nodes) or 1,
        caches={
            path: file_system_of(_existing(path))
            for path in _caches(environ, {each.vendor for each in places})
        },
        stripes={
            each.path: found
            for each in directories
            if each.file_system == "lustre" and not each.hung
            if (found := _stripes(each.path, environ))
        },
        core_bytes=resource.getrlimit(resource.RLIMIT_CORE)[0],
        huge_bytes=free,
        total_bytes=total,
    )


def _plugins(environ: Mapping[str, str]) -> Iterable[Path]:
    """Yield the network plugins in library folders, and the file that NCCL_NET_PLUGIN names."""
    named = Path(environ.get("NCCL_NET_PLUGIN", ""))
    if named.is_absolute() and named.is_file():
        yield named
    for word in (*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *_LIBRARIES):
        for pattern in _PLUGINS:
            try:
                yield from sorted(Path(word).glob(pattern))
            except OSError:  # the folder is not readable
                continue


def _caches(environ: Mapping[str, str], vendors: set[str]) -> Iterable[Path]:
    if vendors:
        for name, default, vendor in _CACHES:
            if vendor in ("", *vendors):
                yield Path(environ.get(name) or default).expanduser()


def _existing(path: Path) -> Path:
    """Return ``path`` if it exists, otherwise its nearest parent that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def _stripes(path: Path, environ: Mapping[str, str]) -> StripeFacts | None:
    """Return the striping of a Lustre directory; None if ``lfs`` does not report it."""
    line = ["lfs", "getstripe", "-d", "-c", str(path)]
    try:
        counts = run_to_end(line, environ, timeout_s=LFS_S).stdout.split()
        largest = max((each.stat().st_size for each in os.scandir(path)), default=0)
    except (LaunchError, OSError):
        return None
    # A progressive layout has a stripe count for each part of a file.
    numbers = [int(word) for word in counts if re.fullmatch(r"-?\d+", word)]
    return StripeFacts(count=numbers[0], largest_bytes=largest) if len(numbers) == 1 else None


def _memory(file: Path) -> tuple[int, int]:
    """Return the bytes of free huge pages, and the bytes of the whole memory."""
    rows = (line.replace(":", " ").split() for line in text_of(file).splitlines())
    values = {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    huge = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0)
    return huge * 1024, values.get("MemTotal", 0) * 1024
