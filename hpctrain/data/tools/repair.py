"""Make a damaged data set whole: from another copy, from its shards, or without what is lost."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.atomic import crc32_of, publishing, reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.format.alone import WriterLock
from hpctrain.data.format.classes import classes_of, read_classes, write_classes
from hpctrain.data.format.layout import MANIFEST, Manifest, ShardEntry
from hpctrain.data.tools.copying import stream, write_rows
from hpctrain.data.tools.faults import FaultReport, Range
from hpctrain.data.tools.rebuild_manifest import rebuild
from hpctrain.data.tools.turns import in_turns, share
from hpctrain.data.tools.verify import Start, check_directory, verify
from hpctrain.data.writer import ShardWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairPlan:
    """What may be done to make a data set whole."""

    source: Path | None = None
    """Another copy of the same data set, to take damaged and missing shards from."""
    rebuild_manifest: bool = False
    """Make a manifest that is lost or damaged anew from the shards."""
    drop: bool = False
    """Write the data set anew without the samples that remain lost."""
    dry_run: bool = False
    """Change nothing, tell what would be done."""


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """What became of a data set."""

    deeds: tuple[str, ...]
    """What was done, or would be."""
    report: FaultReport
    """Its state afterwards; in a dry run, what it would be."""


def repair(
    directory: Path | str,
    plan: RepairPlan,
    comm: Communicator | None = None,
    *,
    start: Start | None = None,
) -> RepairOutcome:
    """Check a data set, then do what the plan allows, and remove leftovers.

    Collective with ``comm``. Each step is atomic: after a kill the data set is as before or as
    after it, and the next repair goes on.

    Args:
        directory: of the data set.
        plan: what may be done.
        comm: ranks that share the work.
        start: as for ``verify``.

    Returns:
        What was done; the same on every rank.

    Raises:
        DataError: the plan cannot be carried out; on every rank.
    """
    return _Repair(Path(directory), plan, comm or SerialCommunicator()).run(start)


class _Repair:
    def __init__(self, directory: Path, plan: RepairPlan, comm: Communicator) -> None:
        self._directory = directory
        self._plan = plan
        self._comm = comm
        self._deeds: list[str] = []

    def run(self, start: Start | None) -> RepairOutcome:
        """Do all of it."""
        manifest = self._manifest()
        report = verify(self._directory, self._comm, start=start, manifest=manifest)
        report = self._sweep(report)
        if self._plan.source is not None and report.bad_shards:
            report = self._take(manifest, self._plan.source, report)
        if self._plan.drop and not report.is_whole:
            report = self._drop(manifest, report, start)
        return RepairOutcome(tuple(self._deeds), report)

    def _manifest(self) -> Manifest:
        """Return the manifest, which is had here, in the copy or by the shards."""
        directory, plan = self._directory, self._plan
        manifest, deed = on_root(self._comm, lambda: _find_manifest(directory, plan), DataError)
        if deed:
            self._alone(lambda: manifest.write(directory))
            self._deeds.append(deed)
        return manifest

    def _sweep(self, report: FaultReport) -> FaultReport:
        def remove() -> None:
            for name in report.leftovers:
                (self._directory / name).unlink(missing_ok=True)

        self._alone(remove)
        self._deeds += [f"removed {name}" for name in report.leftovers]
        return replace(report, leftovers=())

    def _take(self, manifest: Manifest, source: Path, report: FaultReport) -> FaultReport:
        """Take shards from another copy; each rank some."""
        rank, size = self._comm.rank, self._comm.size
        mine: list[tuple[int, str]] = []

        def take() -> Iterator[None]:
            for index in report.bad_shards[rank::size]:
                shard = manifest.shards[index]
                refusal = _take_shard(source, self._directory, shard, dry=self._plan.dry_run)
                mine.append((index, refusal))
                yield

        in_turns(self._comm, take())
        classes = classes_of(self._directory, manifest) or read_classes(source)
        self._alone(lambda: write_classes(self._directory, classes))
        results = [found for some in self._comm.allgather_object(mine) for found in some]
        for index, refusal in sorted(results):
            name = manifest.shards[index].file
            deed = f"could not take {name} from {source}: {refusal}"
            self._deeds.append(deed if refusal else f"took {name} from {source}")
        taken = {index for index, refusal in results if not refusal}
        return replace(report, faults=tuple(f for f in report.faults if f.shard not in taken))

    def _drop(self, manifest: Manifest, report: FaultReport, start: Start | None) -> FaultReport:
        num_kept = report.num_samples - report.num_lost
        if not num_kept:
            raise DataError(f"no sample of {self._directory} can be had, so nothing is changed")
        self._deeds.append(
            f"wrote {num_kept} samples anew, {report.num_lost} lost ones are dropped"
        )
        if self._plan.dry_run:
            return replace(report, faults=(), num_samples=num_kept)
        writer = ShardWriter(
            self._directory,
            manifest.fields,
            samples_per_shard=max(shard.num_samples for shard in manifest.shards),
            split=manifest.split,
            block_size=manifest.block_size,
            comm=self._comm,
            classes=classes_of(self._directory, manifest),
        )
        mine = share(manifest.num_samples, self._comm, manifest.block_size)
        rows = chain.from_iterable(
            stream(self._directory, manifest, *some, check=False)
            for some in kept(report.lost, *mine)
        )
        with writer:
            advance = start(num_kept // self._comm.size) if start else lambda _: None
            write_rows(writer, rows, self._comm, advance)
        return FaultReport.of(self._directory, writer.manifest)

    def _alone(self, action: Callable[[], None]) -> None:
        """Let one rank change the directory, unless nothing shall change."""

        def locked() -> None:
            try:
                lock = WriterLock(self._directory)
                try:
                    action()
                finally:
                    lock.release()
            except OSError as error:
                raise _refused(self._directory, error) from error

        if not self._plan.dry_run:
            on_root(self._comm, locked, DataError)


def kept(lost: tuple[Range, ...], start: int, stop: int) -> Iterator[Range]:
    """Return what is left of the samples ``[start, stop)``."""
    for first, last in lost:
        if start < min(first, stop):
            yield start, min(first, stop)
        start = max(start, last)
    if start < stop:
        yield start, stop


def _find_manifest(directory: Path, plan: RepairPlan) -> tuple[Manifest, str]:
    """Return the manifest, and how it was had if it is not in the directory."""
    check_directory(directory)
    copy = None if plan.source is None else _manifest_of_copy(directory, plan.source)
    try:
        manifest = Manifest.read(directory)
    except DataError as error:
        if copy is not None and any((directory / shard.file).exists() for shard in copy.shards):
            return copy, f"took {MANIFEST} from {plan.source}"
        if plan.rebuild_manifest:
            return rebuild(directory), f"made {MANIFEST} anew from the shards"
        raise DataError(
            f"{error}; if its shards are here, make the manifest anew: "
            f"hpctrain data repair {directory} --rebuild-manifest"
        ) from None
    if copy is not None and copy.uuid != manifest.uuid:
        raise DataError(
            f"shards are taken from a copy of the same data set, but {plan.source} is {copy.uuid} "
            f"and {directory} is {manifest.uuid}; give another copy"
        )
    return manifest, ""


def _manifest_of_copy(directory: Path, source: Path) -> Manifest | None:
    """Return the manifest of the copy; None where it is damaged: shards prove themselves."""
    check_directory(source)
    if source.samefile(directory):
        raise DataError(f"--from is another copy, but {source} is {directory} itself")
    try:
        return Manifest.read(source)
    except DataError:
        return None


def _take_shard(source: Path, directory: Path, shard: ShardEntry, *, dry: bool) -> str:
    """Replace the file of a shard by that of the copy, or say why that one is no better."""
    path = source / shard.file
    try:
        if path.stat().st_size != shard.num_bytes or crc32_of(path) != shard.crc32:
            return "it is damaged there too"
    except OSError as error:
        return reason_of(error)
    if dry:
        return ""
    try:
        with publishing(directory / shard.file) as part:
            shutil.copyfile(path, part)
            if crc32_of(part) != shard.crc32:
                raise DataError(
                    f"{path} changed while it was copied, or {directory} does not keep what is "
                    f"written to it; {shard.file} is as before"
                )
    except OSError as error:
        raise _refused(directory, error) from error
    return ""


def _refused(directory: Path, error: OSError) -> DataError:
    return DataError(f"cannot repair {directory}: {reason_of(error)}; make room or check its mode")
