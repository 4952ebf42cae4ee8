"""Checkpoints as people see them: which there are, what one holds, whether it is whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_directory import CheckpointDirectory, step_of
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.loading import check
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import format_bytes

_LONGEST = 200
"""Characters shown of a fact."""

FOLDER = "checkpoints"
"""Where the checkpoints of a run directory lie."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint."""

    name: str
    num_bytes: int | None
    """None where it is missing."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a checkpoint."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int
    """Over how many files it is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A checkpoint as ``hpctrain checkpoint info`` tells it."""

    directory: str
    step: int
    written: str
    """When, as ISO 8601 in UTC."""
    world: int
    """Number of ranks that wrote it."""
    num_tensors: int
    num_elements: int
    """Of all tensors of the state."""
    state_bytes: int
    """Of all tensors of the state, once."""
    private_bytes: int
    """Of what each rank has of its own, over all ranks."""
    files: tuple[File, ...]
    largest: tuple[Held, ...]
    """The largest tensors, largest first."""
    facts: dict[str, Any]

    def lines(self) -> Iterator[str]:
        """Yield what people read of it."""
        yield f"{self.directory}: step {self.step}"
        yield f"written    {self.written}"
        yield f"ranks      {self.world}"
        yield (
            f"state      {self.num_tensors} tensors, {self.num_elements} elements, "
            f"{format_bytes(self.state_bytes)}"
        )
        yield f"private    {format_bytes(self.private_bytes)} of the ranks' own"
        missing = [file.name for file in self.files if file.num_bytes is None]
        size = format_bytes(sum(file.num_bytes or 0 for file in self.files))
        yield f"files      {len(self.files)}, {size}" + (
            f"; missing: {', '.join(missing)}" if missing else ""
        )
        if self.largest:
            yield ""
            yield "largest tensors"
        for held in self.largest:
            shape = f"({', '.join(map(str, held.shape))})"
            yield f"  {format_bytes(held.num_bytes):>10}  {held.dtype:10} {shape:16} {held.path}"
        if self.facts:
            yield ""
            yield "facts"
        for name, value in self.facts.items():
            yield f"  {name:16} {_short(value)}"


@dataclass(frozen=True, slots=True)
class Checked:
    """One checkpoint and what is wrong with it."""

    directory: str
    faults: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield what people read of it."""
        yield f"{self.directory}: {'not whole' if self.faults else 'whole'}"
        for fault in self.faults:
            yield f"  {fault}"


def checkpoints_in(path: Path | str) -> list[Path]:
    """Return the checkpoints that a path names, by step: itself, or those of a run directory.

    One that is not finished, or that its run went back behind, is not among them.

    Raises:
        CheckpointError: there is none, or the directory cannot be read.
    """
    path = Path(path)
    if (path / manifest.NAME).exists() or step_of(path.name) is not None:
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    shelf = CheckpointDirectory(folder)
    if steps := shelf.steps():
        return [shelf.path(step) for step in reversed(steps)]
    raise CheckpointError(
        f"there is no checkpoint in {folder} that is finished and in use; give a run directory or "
        f"one of its checkpoints"
    )


def describe(directory: Path | str, *, num_largest: int = 10) -> Description:
    """Tell what a checkpoint holds; reads its manifest only.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    directory = Path(directory)
    told = CheckpointManifest.read(directory)
    held = [
        Held(path, record.dtype, record.shape, record.num_bytes, len(record.parts))
        for path, record in told.tensors.items()
    ]
    private = [record for own in told.private.values() for record in own.values()]
    ranks = {part.rank for record in (*told.tensors.values(), *private) for part in record.parts}
    files = [manifest.file_name(rank) for rank in sorted(ranks)]
    return Description(
        directory=str(directory),
        step=told.step,
        written=_time_of(directory / manifest.NAME),
        world=told.world,
        num_tensors=len(held),
        num_elements=sum(
            part.shard.numel for record in told.tensors.values() for part in record.parts
        ),
        state_bytes=sum(tensor.num_bytes for tensor in held),
        private_bytes=sum(record.num_bytes for record in private),
        files=tuple(File(name, _size_of(directory / name)) for name in files),
        largest=tuple(sorted(held, key=lambda tensor: -tensor.num_bytes)[:num_largest]),
        facts=told.facts,
    )


def verify(path: Path | str) -> Iterator[Checked]:
    """Read every byte of one checkpoint, or of all of a run directory, and compare.

    Not collective. Yields each checkpoint, oldest first, as soon as it is read; none that its run
    removed meanwhile.

    Raises:
        CheckpointError: there is none.
    """
    has_checked = False
    for directory in checkpoints_in(path):
        faults = check(directory)
        if not faults or directory.exists() or directory == Path(path):
            has_checked = True
            yield Checked(str(directory), tuple(faults))
    if not has_checked:  # all were removed: there are others now, or none
        yield from verify(path)


def _time_of(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _short(value: object) -> str:
    text = str(value)
    if "\n" in text.strip():
        return f"{text.count(chr(10))} lines of text, shown by --json"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
