"""Repair a damaged data set with the files of another copy."""

import shutil
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.atomic import crc32_of, publishing, reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    classes_of,
    read_classes,
    write_classes,
)
from hpctrain.data.format.writer_files import WriterLock, explained
from hpctrain.data.tools.rank_work import Start, in_turns, or_alone
from hpctrain.data.tools.verify import FaultReport, check_directory, verify


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """Result of ``repair``: the actions, and the faults that remain."""

    deeds: tuple[str, ...]  # actions, one sentence each
    report: FaultReport  # state of the data set after the repair


def repair(
    directory: Path | str,
    source: Path | str | None = None,
    comm: Communicator | None = None,
    *,
    start: Start | None = None,
) -> RepairOutcome:
    """Check a data set, remove leftovers, and replace damaged files by files of a copy.

    Collective with ``comm``, whose ranks divide the work. Every file is replaced or removed
    atomically, so a repair that was killed can be repeated. ``source`` is another copy of the same
    data set; without ``source``, only leftovers are removed. Raises ``DataError`` on every rank:
    neither ``directory`` nor ``source`` has a manifest, ``source`` is another data set, or the
    directory cannot be written.
    """
    directory, comm = Path(directory), or_alone(comm)
    source = None if source is None else Path(source)
    manifest, deeds = on_root(comm, partial(_manifest, directory, source), DataError)
    report = verify(directory, comm, start=start)
    on_root(comm, partial(_sweep, directory, source, manifest, report), DataError)
    deeds += [f"removed {name}" for name in report.leftovers]
    report = replace(report, leftovers=())
    if source is not None:
        refusals = _take(directory, source, manifest, report, comm)
        for index, refusal in refusals:
            name = manifest.shards[index].file
            deed = f"cannot copy {name} from {source}: {refusal}"
            deeds.append(deed if refusal else f"copied {name} from {source}")
        taken = {index for index, refusal in refusals if not refusal}
        report = replace(report, faults=tuple(f for f in report.faults if f.shard not in taken))
    return RepairOutcome(tuple(deeds), report)


def _manifest(directory: Path, source: Path | None) -> tuple[Manifest, list[str]]:
    """Return the manifest, restored from the copy if it is lost, and a list of actions."""
    check_directory(directory)
    copy = None if source is None else _manifest_of_copy(directory, source)
    try:
        manifest = Manifest.read(directory)
    except DataError:
        if copy is None or not any((directory / one.file).exists() for one in copy.shards):
            raise
        with explained(directory), closing(WriterLock(directory)):
            copy.write(directory)
        return copy, [f"copied {MANIFEST} from {source}"]
    if copy is not None and copy.uuid != manifest.uuid:
        raise DataError(
            f"--from must be a copy of the same data set, but {source} has the uuid {copy.uuid} "
            f"and {directory} has {manifest.uuid}; pass another copy"
        )
    return manifest, []


def _manifest_of_copy(directory: Path, source: Path) -> Manifest | None:
    """Return the manifest of the copy; None if damaged, since each shard is checked anyway."""
    check_directory(source)
    if source.samefile(directory):
        raise DataError(
            f"--from must be another copy, but {source} is {directory} itself; pass another "
            f"directory"
        )
    with suppress(DataError):
        return Manifest.read(source)
    return None


def _sweep(directory: Path, source: Path | None, manifest: Manifest, report: FaultReport) -> None:
    with explained(directory), closing(WriterLock(directory)):
        for name in report.leftovers:
            (directory / name).unlink(missing_ok=True)
        if source is not None:
            write_classes(directory, classes_of(directory, manifest) or read_classes(source))


def _take(
    directory: Path, source: Path, manifest: Manifest, report: FaultReport, comm: Communicator
) -> list[tuple[int, str]]:
    """Copy damaged shards from another copy of the data set. Collective.

    Returns, on every rank, ``(index, reason)`` for each shard; the reason of a failure is empty on
    success.
    """
    refusals: dict[int, str] = {}

    def take(index: int) -> None:
        refusals[index] = _take_shard(source, directory, manifest.shards[index])

    in_turns(comm, report.bad_shards[comm.rank :: comm.size], take)
    return sorted(item for some in comm.allgather_object(refusals) for item in some.items())


def _take_shard(source: Path, directory: Path, shard: ShardEntry) -> str:
    """Replace the file of a shard by the copy; return the reason of a failure, or ``""``."""
    path = source / shard.file
    try:
        if path.stat().st_size != shard.num_bytes or crc32_of(path) != shard.crc32:
            return "the shard is damaged in the copy too"
    except OSError as error:
        return reason_of(error)
    with explained(directory), publishing(directory / shard.file) as part:
        shutil.copyfile(path, part)
        if crc32_of(part) != shard.crc32:
            raise DataError(
                f"the copy of {path} must have the checksum of the original, but differs, so "
                f"{shard.file} was not replaced; check the disk of {directory}, and that no "
                f"program writes to {source}"
            )
    return ""
