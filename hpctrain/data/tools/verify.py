"""Check a data set: every byte of it is as it was written, or the report says which are not."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.core.atomic import PART, reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.format.alone import LOCK
from hpctrain.data.format.compression import load_filters
from hpctrain.data.format.layout import MANIFEST, SHARD_FILE, Manifest
from hpctrain.data.tools.faults import Fault, FaultReport
from hpctrain.data.tools.shard_check import Advance, check_shard
from hpctrain.data.tools.turns import in_turns, or_alone

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

Start = Callable[[int], Advance]
"""Is told how many bytes this rank reads; returns what is told of each piece of them."""

_MOST_THREADS = 4
"""More do not read faster: a crc32 takes 7 GB each second."""


def verify(
    directory: Path | str,
    comm: "Communicator | None" = None,
    *,
    threads: int | None = None,
    start: Start | None = None,
) -> FaultReport:
    """Compare each byte of a data set with its manifest.

    Reads the shards only; needs memory for a few pieces of 4 MiB, or a few blocks if these are
    larger. Collective with ``comm``: the ranks share out the shards, and so do threads.

    A rank reads as many at once as it has cores, at most 4. What is wrong is the same on every
    rank; a missing or unreadable file is a fault too.

    Raises:
        DataError: there is no such directory, or zstd is needed and not installed; on every rank.
    """
    directory, comm = Path(directory), or_alone(comm)
    manifest, stray = on_root(comm, partial(_manifest, directory), DataError)
    if isinstance(manifest, Fault):
        return FaultReport(directory=str(directory), faults=(manifest,), leftovers=stray)
    with agreed(comm, DataError):
        load_filters(manifest.fields)
    threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    faults = _share(directory, manifest, comm, threads, start)
    return replace(FaultReport.of(directory, manifest), faults=faults, leftovers=stray)


def check_directory(directory: Path) -> None:
    """Check that there is a directory.

    Raises:
        DataError: there is none, or it cannot be seen.
    """
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise DataError(
            f"cannot see the data set {directory}: {reason_of(error)}; check path and mount"
        ) from error
    if not stat.S_ISDIR(mode):
        raise DataError(f"a data set is a directory, {directory} is none; give its path")


def _manifest(directory: Path) -> tuple[Manifest | Fault, tuple[str, ...]]:
    """Return the manifest, or what is wrong with it, and the leftovers beside it."""
    check_directory(directory)
    try:
        manifest = Manifest.read(directory)
    except DataError as error:
        fault = Fault(file=MANIFEST, what=f"cannot be used: {error}")
        return fault, leftovers(directory, None)
    return manifest, leftovers(directory, manifest)


def _share(
    directory: Path,
    manifest: Manifest,
    comm: "Communicator",
    threads: int,
    start: Start | None,
) -> tuple[Fault, ...]:
    mine = range(comm.rank, len(manifest.shards), comm.size)
    advance = start(sum(manifest.shards[i].num_bytes for i in mine)) if start else lambda _: None
    faults: list[Fault] = []
    with ThreadPoolExecutor(threads) as pool:

        def check() -> Iterator[None]:
            one = partial(check_shard, directory, manifest, advance=advance)
            for found in pool.map(one, mine):
                faults.extend(found)
                yield

        in_turns(comm, check())
    together = [fault for found in comm.allgather_object(faults) for fault in found]
    return tuple(sorted(together, key=lambda fault: fault.shard or 0))


_JOURNAL = re.compile(r"[\w.-]+-r\d{5,}\.journal(\.part)?")


def leftovers(directory: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """Name what killed writers have left, and shards that no manifest names.

    Without a manifest only unfinished files count, as the shards may be all that is left.
    """
    named = {shard.file for shard in manifest.shards} if manifest else set()
    with suppress(OSError):
        return tuple(
            sorted(
                path.name
                for path in directory.iterdir()
                if path.name not in named and _is_ours(path.name, any_shard=manifest is not None)
            )
        )
    return ()


def _is_ours(name: str, *, any_shard: bool) -> bool:
    if name in (MANIFEST + PART, LOCK) or _JOURNAL.fullmatch(name):
        return True
    return bool(SHARD_FILE.fullmatch(name)) and (any_shard or name.endswith(PART))
