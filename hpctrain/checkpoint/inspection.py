"""Checkpoints as people see them: which there are, what one holds, which are whole."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_directory import SCORE, CheckpointDirectory
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import CheckpointManifest, step_of
from hpctrain.checkpoint.loading import check
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import format_bytes

_LONGEST = 200  # characters shown of a fact

FOLDER = "checkpoints"  # where the checkpoints of a run directory lie


def checkpoints_in(path: Path | str) -> list[Path]:
    """Return the checkpoints that a path names, by step: itself, or those of a run directory.

    One that is not finished, or that its run went back behind, is not among them.
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


def checkpoint_of(path: Path | str, which: str) -> Path:
    """Return one of the checkpoints that a path names: ``last``, ``best`` or a number of steps."""
    found = checkpoints_in(path)
    if which == "last":
        return found[-1]
    if which == "best":
        # The newest of equal ones, as that is what a run keeps.
        facts = ((CheckpointManifest.read(one).facts, one) for one in found)
        scored = [(told[SCORE], one) for told, one in facts if SCORE in told]
        if scored:
            return max(scored)[1]
        raise CheckpointError(
            f"no checkpoint of {path} was taken behind a test, so that none is the best; "
            f"checkpoint.keep_best or test.patience does so"
        )
    steps = {str(step_of(one.name)): one for one in found}
    if which not in steps:
        raise CheckpointError(
            f"a checkpoint is last, best, or a number of steps, which here is one of "
            f"{', '.join(steps)}; got {which!r}"
        )
    return steps[which]


def describe(directory: Path | str, *, num_largest: int = 10) -> dict[str, Any]:
    """Tell what a checkpoint holds, as values for JSON; reads its manifest only.

    Raises ``CheckpointError``: there is none, or its manifest is damaged.
    """
    directory = Path(directory)
    told = CheckpointManifest.read(directory)
    largest = sorted(told.tensors.items(), key=lambda item: -item[1].num_bytes)[:num_largest]
    private = [record for own in told.private.values() for record in own.values()]
    records = [*told.tensors.values(), *private]
    parts = [part for record in told.tensors.values() for part in record.parts]
    files = sorted({manifest.file_name(part.rank) for each in records for part in each.parts})
    written = datetime.fromtimestamp((directory / manifest.NAME).stat().st_mtime, timezone.utc)
    return {
        "directory": str(directory),
        "step": told.step,
        "written": written.isoformat(timespec="seconds"),
        "world": told.world,
        "num_tensors": len(told.tensors),
        "num_elements": sum(part.shard.numel for part in parts),
        "state_bytes": sum(record.num_bytes for record in told.tensors.values()),
        "private_bytes": sum(record.num_bytes for record in private),
        "files": [{"name": name, "num_bytes": _size_of(directory / name)} for name in files],
        "largest": [
            {
                "path": path,
                "dtype": record.dtype,
                "shape": record.shape,
                "num_bytes": record.num_bytes,
                "num_parts": len(record.parts),
            }
            for path, record in largest
        ],
        "facts": told.facts,
    }


def lines_of(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read of a description."""
    yield f"{told['directory']}: step {told['step']}"
    yield f"written    {told['written']}"
    yield f"ranks      {told['world']}"
    yield (
        f"state      {told['num_tensors']} tensors, {told['num_elements']} elements, "
        f"{format_bytes(told['state_bytes'])}"
    )
    yield f"private    {format_bytes(told['private_bytes'])} of the ranks' own"
    missing = [file["name"] for file in told["files"] if file["num_bytes"] is None]
    size = format_bytes(sum(file["num_bytes"] or 0 for file in told["files"]))
    yield f"files      {len(told['files'])}, {size}" + (
        f"; missing: {', '.join(missing)}" if missing else ""
    )
    if told["largest"]:
        yield from ("", "largest tensors")
    for held in told["largest"]:
        shape = f"({', '.join(map(str, held['shape']))})"
        size = format_bytes(held["num_bytes"])
        yield f"  {size:>10}  {held['dtype']:10} {shape:16} {held['path']}"
    if told["facts"]:
        yield from ("", "facts")
    for name, value in told["facts"].items():
        yield f"  {name:16} {_short(value)}"


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


def verify(path: Path | str) -> Iterator[tuple[Path, list[str]]]:
    """Read every byte of one checkpoint, or of all of a run directory, and compare.

    Not collective. Yields each checkpoint and what is wrong with it, oldest first, as soon as it
    is read; none that its run removed meanwhile. Raises ``CheckpointError``: there is none.
    """
    has_checked = False
    for directory in checkpoints_in(path):
        faults = check(directory)
        if not faults or directory.exists() or directory == Path(path):
            has_checked = True
            yield directory, faults
    if not has_checked:  # all were removed: there are others now, or none
        yield from verify(path)
