"""Description of a checkpoint, from its manifest and the sizes of its files."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_directory import ASIDE, step_of
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.core.atomic import PART, reason_of
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
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(
            f"cannot see checkpoints in {folder}: {reason_of(error)}; give a run directory or one "
            f"of its checkpoints"
        ) from error
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    if not steps:
        aside = [name for name in names if name.endswith((PART, ASIDE))]
        unfinished = f" that is finished and in use; {len(aside)} other" if aside else ""
        raise CheckpointError(
            f"there is no checkpoint in {folder}{unfinished}; give a run directory or one of its "
            f"checkpoints"
        )
    return [folder / name for _, name in steps]


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
    private = [
        record.num_bytes for records in told.private.values() for record in records.values()
    ]
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
        private_bytes=sum(private),
        files=tuple(File(name, _size_of(directory / name)) for name in files_of(told)),
        largest=tuple(sorted(held, key=lambda tensor: -tensor.num_bytes)[:num_largest]),
        facts=told.facts,
    )


def files_of(told: CheckpointManifest) -> list[str]:
    """Return the names of the files that hold the tensors of a checkpoint, by rank."""
    records = [*told.tensors.values()]
    records += [record for own in told.private.values() for record in own.values()]
    ranks = {part.rank for record in records for part in record.parts}
    return [manifest.file_name(rank) for rank in sorted(ranks)]


def lines_of(found: Description) -> Iterator[str]:
    """Yield what people read of a description."""
    yield f"{found.directory}: step {found.step}"
    yield f"written    {found.written}"
    yield f"ranks      {found.world}"
    yield (
        f"state      {found.num_tensors} tensors, {found.num_elements} elements, "
        f"{format_bytes(found.state_bytes)}"
    )
    yield f"private    {format_bytes(found.private_bytes)} of the ranks' own"
    missing = [file.name for file in found.files if file.num_bytes is None]
    size = format_bytes(sum(file.num_bytes or 0 for file in found.files))
    yield f"files      {len(found.files)}, {size}" + (
        f"; missing: {', '.join(missing)}" if missing else ""
    )
    if found.largest:
        yield ""
        yield "largest tensors"
    for tensor in found.largest:
        shape = f"({', '.join(map(str, tensor.shape))})"
        yield f"  {format_bytes(tensor.num_bytes):>10}  {tensor.dtype:10} {shape:16} {tensor.path}"
    if found.facts:
        yield ""
        yield "facts"
    for name, value in found.facts.items():
        yield f"  {name:16} {_short(value)}"


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
