"""Listing, description and verification of checkpoints."""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_directory import (
    SCORE,
    CheckpointDirectory,
    is_unchanged,
    version_of,
)
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import CheckpointManifest, step_of
from hpctrain.checkpoint.loading import Loaded, check, load
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import format_bytes

_LONGEST = 200  # maximum characters of a fact

FOLDER = "checkpoints"  # folder of the checkpoints in a run directory


def checkpoints_in(path: Path | str) -> list[Path]:
    """Return the checkpoint at a path, or all checkpoints of a run directory, oldest first.

    Unfinished checkpoints and checkpoints that were set aside are omitted.
    """
    path = Path(path)
    if (path / manifest.NAME).exists() or step_of(path.name) is not None:
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    shelf = CheckpointDirectory(folder)
    if steps := shelf.steps():
        return [shelf.path(step) for step in reversed(steps)]
    raise CheckpointError(
        f"{folder} must contain a complete checkpoint, but has none; pass a run directory or "
        f"one of its checkpoints"
    )


def load_newest(path: Path | str) -> tuple[Path, Loaded]:
    """Load a checkpoint, or the newest checkpoint of a run directory; return its path too. Local.

    Raises ``CheckpointError``: there is no checkpoint, or it cannot be read.
    """
    source = checkpoints_in(path)[-1]
    return source, load(source, SerialCommunicator())


def checkpoint_of(path: Path | str, which: str) -> Path:
    """Return the checkpoint of a run that ``which`` selects: ``last``, ``best`` or a step."""
    found = checkpoints_in(path)
    if which == "last":
        return found[-1]
    if which == "best":
        # Choose the newest of equal scores, as the run does when it removes checkpoints.
        before = [version_of(one) for one in found]
        try:
            facts = [(CheckpointManifest.read(one).facts, one) for one in found]
        except CheckpointError:
            if all(map(is_unchanged, found, before)):
                raise
            return checkpoint_of(path, which)  # a checkpoint was removed or replaced
        scored = [(of_one[SCORE], one) for of_one, one in facts if SCORE in of_one]
        if scored:
            return max(scored)[1]
        raise CheckpointError(
            f"the best checkpoint must have the score of a test, but no checkpoint of {path} has "
            f"one; set checkpoint.keep_best or test.patience for the next run"
        )
    steps = {str(step_of(one.name)): one for one in found}
    if which not in steps:
        raise CheckpointError(
            f"a checkpoint must be chosen as last, best or by its step, one of "
            f"{', '.join(steps)}, got {which!r}"
        )
    return steps[which]


def describe(directory: Path | str, *, num_largest: int = 10) -> dict[str, Any]:
    """Return a description of a checkpoint from its manifest, as JSON values.

    Raises ``CheckpointError``: the checkpoint is missing, or its manifest is damaged.
    """
    directory = Path(directory)
    found = CheckpointManifest.read(directory)
    largest = sorted(found.tensors.items(), key=lambda item: -item[1].num_bytes)[:num_largest]
    names = [manifest.file_name(first) for first in found.first_ranks]
    written = datetime.fromtimestamp((directory / manifest.NAME).stat().st_mtime, timezone.utc)
    return {
        "directory": str(directory),
        "step": found.step,
        "written": written.isoformat(timespec="seconds"),
        "world": found.world,
        "num_tensors": len(found.tensors),
        "num_elements": sum(math.prod(record.shape) for record in found.tensors.values()),
        "state_bytes": found.state_bytes,
        "private_bytes": found.private_bytes,
        "files": [{"name": name, "num_bytes": _size_of(directory / name)} for name in names],
        "largest": [
            {
                "path": path,
                "dtype": record.dtype,
                "shape": record.shape,
                "num_bytes": record.num_bytes,
            }
            for path, record in largest
        ],
        "facts": found.facts,
    }


def lines_of(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the human-readable lines of a description."""
    yield f"{about['directory']}: step {about['step']}"
    yield f"written    {about['written']}"
    yield f"ranks      {about['world']}"
    yield (
        f"state      {about['num_tensors']} tensors, {about['num_elements']} elements, "
        f"{format_bytes(about['state_bytes'])}"
    )
    yield f"private    {format_bytes(about['private_bytes'])}, different on each rank"
    missing = [file["name"] for file in about["files"] if file["num_bytes"] is None]
    size = format_bytes(sum(file["num_bytes"] or 0 for file in about["files"]))
    yield f"files      {len(about['files'])}, {size}" + (
        f"; missing: {', '.join(missing)}" if missing else ""
    )
    if about["largest"]:
        yield from ("", "largest tensors")
    for held in about["largest"]:
        shape = f"({', '.join(map(str, held['shape']))})"
        size = format_bytes(held["num_bytes"])
        yield f"  {size:>10}  {held['dtype']:10} {shape:16} {held['path']}"
    if about["facts"]:
        yield from ("", "facts")
    for name, value in about["facts"].items():
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
    """Compare the bytes of a checkpoint, or of all checkpoints of a run, with their checksums.

    Not collective. Yields each checkpoint and its faults, oldest first; checkpoints that the run
    removes or replaces meanwhile are omitted. Raises ``CheckpointError``: there is no checkpoint.
    """
    has_checked = False
    for directory in checkpoints_in(path):
        before = version_of(directory)
        faults = check(directory)
        if not faults or is_unchanged(directory, before) or directory == Path(path):
            has_checked = True
            yield directory, faults
    if not has_checked:  # all listed checkpoints were removed, so list the directory again
        yield from verify(path)
