"""Check checkpoints: every byte is as it was written, or the report says what is not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.loading import check
from hpctrain.checkpoint.tools.describe import checkpoints_in, files_of
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One checkpoint and what is wrong with it."""

    directory: str
    step: int | None = None
    """None where the manifest cannot be read."""
    files: tuple[str, ...] = ()
    """That hold its tensors."""
    num_tensors: int = 0
    """Of the state, and of the ranks' own."""
    num_bytes: int = 0
    """Of these."""
    faults: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it can be loaded, bit for bit as it was saved."""
        return not self.faults

    def lines(self) -> Iterator[str]:
        """Yield what people read of it."""
        num_files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        size = f"{self.num_tensors} tensors in {num_files}, {format_bytes(self.num_bytes)}"
        if self.is_whole:
            yield f"{self.directory}: whole; {size}"
            return
        yield f"{self.directory}: not whole" + (f"; {size}" if self.step is not None else "")
        for fault in self.faults:
            yield f"  {fault}"


def verify(path: Path | str) -> Iterator[Checked]:
    """Read every byte of one checkpoint, or of all of a run directory, and compare.

    Not collective.

    Args:
        path: of a checkpoint, of a run directory, or of its folder of checkpoints.

    Yields:
        Each checkpoint, oldest first, as soon as it is read; none that its run removed meanwhile.

    Raises:
        CheckpointError: there is none.
    """
    has_checked = False
    for directory in checkpoints_in(path):
        report = _check(directory)
        if report.is_whole or directory.exists() or directory == Path(path):
            has_checked = True
            yield report
    if not has_checked:  # all were removed: there are others now, or none
        yield from verify(path)


def _check(directory: Path) -> Checked:
    try:
        told = CheckpointManifest.read(directory)
    except CheckpointError as error:
        return Checked(directory=str(directory), faults=(str(error),))
    records = [*told.tensors.values()]
    records += [record for own in told.private.values() for record in own.values()]
    return Checked(
        directory=str(directory),
        step=told.step,
        files=tuple(files_of(told)),
        num_tensors=len(records),
        num_bytes=sum(record.num_bytes for record in records),
        faults=tuple(str(fault) for fault in check(directory)),
    )
