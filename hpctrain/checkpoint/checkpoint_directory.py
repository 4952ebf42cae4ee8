"""The directory of a run's checkpoints, as the one rank that tidies it sees it."""

import logging
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.retention import (
    ASIDE,
    Kept,
    expendable,
    leftovers,
    name_of,
    step_of,
)
from hpctrain.core.atomic import PART, reason_of, sync
from hpctrain.core.errors import CheckpointError

SCORE = "score"
"""Among the facts of a checkpoint: how good its model is."""

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class CheckpointDirectory:
    """Lists, removes and sets aside; nothing here is collective."""

    def __init__(self, root: Path) -> None:
        """Take the directory, which need not be there yet."""
        self.root = root
        self._known: dict[int, Kept] = {}
        self._told: set[str] = set()

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint after ``step`` steps."""
        return self.root / name_of(step)

    def is_there(self, step: int) -> bool:
        """Say whether there is a checkpoint of that step, damaged or not."""
        return self.path(step).exists()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, also damaged ones, newest first.

        Raises:
            CheckpointError: the directory is there and cannot be read.
        """
        found = (step_of(name) for name in self._names())
        return sorted((step for step in found if step is not None), reverse=True)

    def newest(self, passed_over: Collection[int] = ()) -> tuple[int | None, dict[int, str]]:
        """Return the newest step whose manifest is whole, and by step why newer ones are not.

        Args:
            passed_over: steps that are known as damaged.

        Raises:
            CheckpointError: as ``steps``.
        """
        faults: dict[int, str] = {}
        gone: dict[int, str] = {}  # removed by another job: what is there is listed again
        while steps := [s for s in self.steps() if s not in {*passed_over, *faults, *gone}]:
            try:
                CheckpointManifest.read(self.path(steps[0]))
            except CheckpointError as error:
                found = faults if self.is_there(steps[0]) else gone
                found[steps[0]] = str(error)
            else:
                return steps[0], faults
        # Some file systems list for a while what is gone: that is no run without checkpoints.
        listed = self.steps() if gone else []
        return None, faults | {step: why for step, why in gone.items() if step in listed}

    def tidy(
        self, newest: int, *, keep: int, keep_best: int = 0, damaged: Collection[int] = ()
    ) -> None:
        """Remove what need not stay, after ``newest`` was written; and warn where that fails.

        A removal is a change of name first, on disk: a kill or a loss of power in between leaves a
        leftover, not a damaged checkpoint. Checkpoints of later steps are of a course that the
        run went back behind. They get another name, as a restart would take them for the newest.

        Args:
            newest: the step that stays in any case.
            keep: so many of the newest stay.
            keep_best: so many of the best stay.
            damaged: steps that are known as damaged.
        """
        self._sweep()
        steps = self._try(self.steps) or []
        for step in steps:
            if step > newest:
                self._try(partial(self._set_aside, step))
        present = [self._kept(step, damaged) for step in steps if step <= newest]
        going = expendable(present, keep=keep, keep_best=keep_best, protected={newest})
        for step in going:
            self._known.pop(step, None)
            gone = self.path(step).with_name(f"{name_of(step)}.gone{PART}")
            self._try(partial(self.path(step).rename, gone))
        if going or len(present) < len(steps):
            self._try(partial(sync, self.root))
        self._sweep()

    def _sweep(self) -> None:
        for name in leftovers(self._try(self._names) or []):
            self._try(partial(shutil.rmtree, self.root / name))

    def _try(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (OSError, CheckpointError) as error:
            reason = reason_of(error)
            if reason not in self._told:
                self._told.add(reason)
                _LOG.warning("old checkpoints in %s cannot be removed: %s", self.root, reason)
            return None

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.root.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self.root}: {reason_of(error)}; check the path "
                f"and its rights"
            ) from error

    def _kept(self, step: int, damaged: Collection[int]) -> Kept:
        if step in damaged:
            return Kept(step, whole=False)
        if step not in self._known:
            try:
                score = CheckpointManifest.read(self.path(step)).facts.get(SCORE)
            except CheckpointError:
                return Kept(step, whole=False)
            self._known[step] = Kept(step, score=score if isinstance(score, float) else None)
        return self._known[step]

    def _set_aside(self, step: int) -> None:
        aside = self.path(step).with_name(name_of(step) + ASIDE)
        if aside.exists():
            shutil.rmtree(aside)
        self.path(step).rename(aside)
        self._known.pop(step, None)
        _LOG.warning(
            "checkpoint %s is of a course that this run went back behind, or is damaged; it is "
            "%s now, remove it when nobody needs it",
            self.path(step),
            aside.name,
        )
