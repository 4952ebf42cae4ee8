"""Remove old checkpoints of a run that is not running, and never the last whole one."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.checkpoint_directory import (
    Kept,
    check_keep,
    expendable,
    put_away,
    step_of,
)
from hpctrain.checkpoint.loading import check
from hpctrain.checkpoint.tools.describe import checkpoints_in
from hpctrain.core.atomic import reason_of, sync
from hpctrain.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went, or would go, and what stays; oldest first."""

    gone: tuple[Path, ...]
    kept: tuple[Path, ...]
    damaged: tuple[Path, ...]
    """Of those that were read; they count for nothing."""


def prune(path: Path | str, *, keep: int, keep_best: int = 0, dry_run: bool = False) -> Pruned:
    """Keep the newest whole checkpoints of a run, and the best ones; remove the others.

    Those that are to stay are read to the last byte first: a damaged one replaces no whole one.
    Not collective. ``path`` is a run directory, or its folder of checkpoints.

    Raises:
        CheckpointError: there is none, ``path`` is one itself, or the disk refuses.
        ConfigError: not even the last one would stay.
    """
    check_keep(keep, keep_best)
    found = {step: place for place in checkpoints_in(path) if (step := step_of(place.name))
             is not None}  # fmt: skip
    if Path(path) in found.values() or not found:
        raise CheckpointError(
            f"prune takes a run directory or its folder of checkpoints, {path} is a single "
            f"checkpoint; remove it by hand"
        )
    known: dict[int, bool] = {}
    present = {step: Kept.read(step, place) for step, place in found.items()}
    while True:
        going = expendable(present.values(), keep=keep, keep_best=keep_best)
        unread = [
            step
            for step in sorted(present, reverse=True)
            if step not in going and step not in known and present[step].whole
        ]
        if not unread:
            break
        for step in unread:
            known[step] = not check(found[step])
            if not known[step]:
                present[step] = Kept(step, whole=False)
    if not dry_run:
        for step in going:
            _remove(found[step])
    return Pruned(
        gone=tuple(found[step] for step in going),
        kept=tuple(found[step] for step in sorted(found) if step not in going),
        damaged=tuple(found[step] for step in sorted(found) if not present[step].whole),
    )


def _remove(place: Path) -> None:
    try:
        gone = put_away(place)
        sync(place.parent)
        shutil.rmtree(gone)
    except OSError as error:
        raise CheckpointError(
            f"cannot remove {place}: {reason_of(error)}; check its rights"
        ) from error
