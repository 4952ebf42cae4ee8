"""Compare what two places hold: checkpoints, runs, or states that were exported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpctrain.checkpoint import store
from hpctrain.checkpoint.format.state_tree import flatten
from hpctrain.checkpoint.tools.convert import read_foreign
from hpctrain.checkpoint.tools.describe import checkpoints_in
from hpctrain.checkpoint.tools.diff import Difference, differences, plain_differences, plain_values
from hpctrain.checkpoint.tools.export import DCP_INDEX, part_of
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

PRIVATE = "private"
"""Begins the paths of what a rank has of its own: ``private/3/random``."""


def newest_state(path: Path | str, only: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint at a path, the newest one of a run directory, and its state.

    Args:
        path: of a checkpoint or a run directory.
        only: of this part of the state, by its path.

    Raises:
        CheckpointError: there is none, it is damaged, or it has no such part.
    """
    source = checkpoints_in(path)[-1]
    return source, _part(store.load(source, SerialCommunicator()).state, only, source)


def compare(a: Path | str, b: Path | str, only: Sequence[str] = ()) -> list[Difference]:
    """Return how two states differ: tensors first, then plain values, then what ranks have.

    Reads both into memory. What is private to ranks counts where both are checkpoints and
    ``only`` is not given.

    Args:
        a: a checkpoint, a run directory for its newest one, or what ``export`` writes.
        b: the same.
        only: these parts of the state, by their paths; an exported state that has no such part
            stands for the part.

    Raises:
        CheckpointError: one of them cannot be read, or a checkpoint has no such part.
    """
    (state_a, private_a), (state_b, private_b) = _read(a), _read(b)
    if only:
        return [
            found
            for part in only
            for found in _compare(
                _chosen(state_a, part, a, is_export=private_a is None),
                _chosen(state_b, part, b, is_export=private_b is None),
                f"{part}/",
            )
        ]
    found = _compare(state_a, state_b, "")
    if private_a is None or private_b is None:
        return found
    for rank in sorted({*private_a, *private_b}):
        path = f"{PRIVATE}/{rank}"
        if rank in private_a and rank in private_b:
            found += _compare(private_a[rank], private_b[rank], f"{path}/")
        else:
            where = ("A", "B") if rank in private_a else ("B", "A")
            text = f"{path}: of a rank of {where[0]}, not of {where[1]}"
            found.append(Difference(path, "missing", text))
    return found


def _read(path: Path | str) -> tuple[dict[str, Any], Mapping[int, Any] | None]:
    """Return a state, and what was private to ranks; None of that for an exported state."""
    path = Path(path)
    if path.is_file() or (path / DCP_INDEX).exists():
        return read_foreign(path), None
    source = checkpoints_in(path)[-1]
    loaded = store.load(source, SerialCommunicator())
    return _part(loaded.state, None, source), loaded.private


def _chosen(state: dict[str, Any], part: str, path: Path | str, *, is_export: bool) -> Any:
    if is_export and part.partition("/")[0] not in state:
        return state
    return _part(state, part, Path(path))


def _part(state: Any, only: str | None, source: Path) -> dict[str, Any]:
    part = state if only is None else part_of(state, only)
    if not isinstance(part, dict):
        raise CheckpointError(
            f"{only or 'the state'} of {source} is a {type(part).__name__}, a dict is needed; "
            f"name what holds it"
        )
    return part


def _compare(a: object, b: object, prefix: str) -> list[Difference]:
    found = list(differences(_tensors(a, prefix), _tensors(b, prefix)))
    return found + list(plain_differences(_plain(a, prefix), _plain(b, prefix)))


def _tensors(state: object, prefix: str) -> "dict[str, Tensor]":
    return {prefix + path: cast("Tensor", value) for path, value in flatten(state)[0].items()}


def _plain(state: object, prefix: str) -> dict[str, Any]:
    return {prefix + path: value for path, value in plain_values(state).items()}
