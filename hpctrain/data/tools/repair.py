"""Make a damaged data set whole: from another copy, from its shards, or without what is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.atomic import crc32_of, publishing, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format.alone import WriterLock
from hpctrain.data.format.classes import carry_classes
from hpctrain.data.format.layout import MANIFEST, Manifest, ShardEntry
from hpctrain.data.format.rows import count
from hpctrain.data.io.copying.copy import as_samples, in_turns, share, stream
from hpctrain.data.tools.faults import FaultReport, Range
from hpctrain.data.tools.inspection import Advance
from hpctrain.data.tools.rebuild import rebuild
from hpctrain.data.tools.verify import Start, check_directory, verify
from hpctrain.data.writer import ShardWriter


def drop(
    directory: Path,
    manifest: Manifest,
    lost: tuple[Range, ...],
    comm: Communicator,
    advance: Advance,
) -> Manifest:
    """Replace a data set by its samples outside of ``lost``, in the same order.

    Collective. Needs room for both until the end; until then the old one stays.

    Args:
        directory: of the data set.
        manifest: of the data set.
        lost: in growing order, none touching the next.
        comm: ranks that share the work.
        advance: told how many samples this rank has written.

    Returns:
        The manifest of the new data set.

    Raises:
        DataError: nothing is left, or it cannot be read or written; on every rank.
    """
    if sum(stop - start for start, stop in lost) == manifest.num_samples:
        raise DataError(f"no sample of {directory} can be had, so nothing is changed")
    start, stop = share(manifest.num_samples, comm, manifest.block_size)
    writer = ShardWriter(
        directory,
        manifest.fields,
        samples_per_shard=max(shard.num_samples for shard in manifest.shards),
        split=manifest.split,
        block_size=manifest.block_size,
        comm=comm,
        classes=manifest.classes,
    )
    with writer:

        def copy() -> Iterator[None]:
            for first, last in kept(lost, start, stop):
                for _, rows in stream(directory, manifest, first, last, check=False):
                    writer.append(as_samples(rows))
                    advance(count(rows))
                    yield

        in_turns(comm, copy())
    return writer.manifest


def kept(lost: tuple[Range, ...], start: int, stop: int) -> Iterator[Range]:
    """Return what is left of the samples ``[start, stop)``."""
    for first, last in lost:
        if start < min(first, stop):
            yield start, min(first, stop)
        start = max(start, last)
    if start < stop:
        yield start, stop


_COPY_BYTES = 8 * MIB


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
    return _Repair.begin(Path(directory), plan, comm or SerialCommunicator()).run(start)


class _Repair:
    def __init__(
        self, directory: Path, plan: RepairPlan, comm: Communicator, manifest: Manifest
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._comm = comm
        self._manifest = manifest
        self._deeds: list[str] = []

    @classmethod
    def begin(cls, directory: Path, plan: RepairPlan, comm: Communicator) -> Self:
        """Find the manifest, here, in the copy or by the shards."""
        found: tuple[Manifest, str] | None = None
        with agreed(comm, DataError):
            if comm.rank == 0:
                found = _find_manifest(directory, plan)
        found = comm.broadcast_object(found)
        assert found
        manifest, deed = found
        repair = cls(directory, plan, comm, manifest)
        if deed:
            with repair._alone() as may_write:
                if may_write:
                    manifest.write(directory)
            repair._deeds.append(deed)
        return repair

    def run(self, start: Start | None) -> RepairOutcome:
        """Do all of it."""
        report = verify(self._directory, self._comm, start=start, manifest=self._manifest)
        report = self._sweep(report)
        if self._plan.source is not None and report.bad_shards:
            report = self._take(self._plan.source, report)
        if self._plan.drop and not report.is_whole:
            report = self._drop(report, start)
        return RepairOutcome(tuple(self._deeds), report)

    def _sweep(self, report: FaultReport) -> FaultReport:
        with self._alone() as may_write:
            for name in report.leftovers if may_write else ():
                (self._directory / name).unlink(missing_ok=True)
        self._deeds += [f"removed {name}" for name in report.leftovers]
        return replace(report, leftovers=())

    def _take(self, source: Path, report: FaultReport) -> FaultReport:
        """Take shards from another copy; each rank some."""
        rank, size = self._comm.rank, self._comm.size
        mine: list[tuple[int, str]] = []

        def take() -> Iterator[None]:
            for index in report.bad_shards[rank::size]:
                shard = self._manifest.shards[index]
                refusal = _take_shard(source, self._directory, shard, dry=self._plan.dry_run)
                mine.append((index, refusal))
                yield

        in_turns(self._comm, take())
        if not self._plan.dry_run:
            carry_classes(source, self._directory, self._comm)
        results = [found for some in self._comm.allgather_object(mine) for found in some]
        for index, refusal in sorted(results):
            name = self._manifest.shards[index].file
            deed = f"could not take {name} from {source}: {refusal}"
            self._deeds.append(deed if refusal else f"took {name} from {source}")
        taken = {index for index, refusal in results if not refusal}
        return replace(report, faults=tuple(f for f in report.faults if f.shard not in taken))

    def _drop(self, report: FaultReport, start: Start | None) -> FaultReport:
        lost = report.lost
        self._deeds.append(
            f"wrote {report.num_samples - report.num_lost} samples anew, "
            f"{report.num_lost} lost ones are dropped"
        )
        if not self._plan.dry_run:
            advance = start(report.num_samples // self._comm.size) if start else lambda _: None
            self._manifest = drop(self._directory, self._manifest, lost, self._comm, advance)
            return FaultReport.of(self._directory, self._manifest)
        return replace(report, faults=(), num_samples=report.num_samples - report.num_lost)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Tell whether this rank may write now: one does, none where nothing shall change."""
        with agreed(self._comm, DataError):
            may_write = self._comm.rank == 0 and not self._plan.dry_run
            try:
                lock = WriterLock(self._directory) if may_write else None
                try:
                    yield may_write
                finally:
                    if lock:
                        lock.release()
            except OSError as error:
                raise _refused(self._directory, error) from error


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
    if not dry:
        try:
            _copy(path, directory / shard.file, shard)
        except OSError as error:
            raise _refused(directory, error) from error
    return ""


def _copy(source: Path, target: Path, shard: ShardEntry) -> None:
    with publishing(target) as part:
        crc = 0
        with source.open("rb") as old, part.open("wb") as new:
            while piece := old.read(_COPY_BYTES):
                crc = crc32(piece, crc)
                new.write(piece)
        if crc != shard.crc32 or crc32_of(part) != crc:
            raise DataError(
                f"{source} changed while it was copied, or {target.parent} does not keep what is "
                f"written to it; {target.name} is as before"
            )


def _refused(directory: Path, error: OSError) -> DataError:
    return DataError(f"cannot repair {directory}: {reason_of(error)}; make room or check its mode")
