"""Directory with the checkpoints of a run: names, retention and removal."""

import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Thread
from typing import TypeVar

from hpctrain.checkpoint.format.manifest import CheckpointManifest, name_of, step_of
from hpctrain.core.atomic import PART, reason_of, sync
from hpctrain.core.errors import CheckpointError

SCORE = "score"  # key in the facts of a checkpoint: score of its model

ASIDE = ".aside"
"""Suffix of a checkpoint that a resumed run has set aside; its files are kept, but not loaded."""

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """Step, validity and score of a checkpoint, for ``expendable``."""

    step: int
    whole: bool = True  # False if the checkpoint is known to be damaged
    score: float | None = None
    """Quality of the model, larger is better; None and NaN are never the best."""


def expendable(present: Iterable[Kept], *, keep: int, keep_best: int = 0) -> list[int]:
    """Return the steps whose checkpoints can be removed, oldest first.

    The ``keep`` newest and the ``keep_best`` best whole checkpoints are kept; of two equal
    scores, the newer one is better. A damaged checkpoint is kept for inspection until ``keep``
    whole checkpoints are newer.
    """
    present = sorted(present, key=lambda kept: kept.step)
    whole = [kept for kept in present if kept.whole]
    if len(whole) < keep:
        return []
    last = whole[-keep:]
    scored = [(k.score, k.step) for k in whole if k.score is not None and not math.isnan(k.score)]
    best = sorted(scored)[-keep_best:] if keep_best else []
    staying = {kept.step for kept in last} | {step for _, step in best}
    return [
        kept.step
        for kept in present
        if kept.step not in staying and (kept.whole or kept.step < last[0].step)
    ]


class CheckpointDirectory:
    """Directory of a run's checkpoints: list, find, rename and remove them. Not collective."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[int, Kept] = {}
        self._reported: set[str] = set()
        self._removal: Thread | None = None

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint after ``step`` steps."""
        return self.root / name_of(step)

    def is_there(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` exists, whole or damaged."""
        return self.path(step).exists()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, newest first.

        Raises ``CheckpointError``: the directory exists and cannot be read.
        """
        found = (step_of(name) for name in self._names())
        return sorted((step for step in found if step is not None), reverse=True)

    def newest(self, passed_over: Collection[int] = ()) -> tuple[int | None, dict[int, str]]:
        """Return the newest step with a whole manifest, and the faults of newer steps.

        ``passed_over`` are steps to ignore, because they are known to be damaged. Raises
        ``CheckpointError``: the directory exists and cannot be read.
        """
        faults: dict[int, str] = {}
        gone: dict[int, str] = {}  # removed by another job; list the directory again
        while steps := [s for s in self.steps() if s not in {*passed_over, *faults, *gone}]:
            try:
                CheckpointManifest.read(self.path(steps[0]))
            except CheckpointError as error:
                found = faults if self.is_there(steps[0]) else gone
                found[steps[0]] = str(error)
            else:
                return steps[0], faults
        if not faults and not gone and {*self.steps()} - {*passed_over}:
            return self.newest(passed_over)  # another job wrote a checkpoint after the listing
        # Some file systems list removed files for a while. Steps that are still listed are
        # faults, so that the caller does not start the run again without its checkpoints.
        listed = self.steps() if gone else []
        return None, faults | {step: why for step, why in gone.items() if step in listed}

    def tidy(
        self, newest: int, *, keep: int, keep_best: int = 0, damaged: Collection[int] = ()
    ) -> None:
        """Remove expendable checkpoints after ``newest`` was written; log failures.

        A checkpoint is renamed before it is removed, so a kill or a power failure leaves a
        leftover for the next call and not a damaged checkpoint. A thread removes the files, so
        that the caller does not wait for them. Checkpoints of steps after ``newest``, which the
        run wrote before it resumed from an older one, are renamed, because a restart would load
        them. ``damaged`` steps are not counted in ``keep``.
        """
        self.finish()
        self._known.pop(newest, None)  # ``newest`` may replace a checkpoint without a score
        steps = self._try(self.steps) or []
        for step in steps:
            if step > newest:
                self._try(partial(self._set_aside, step, newest, is_damaged=step in damaged))
        present = [self._kept(step, damaged) for step in steps if step <= newest]
        going = expendable(present, keep=keep, keep_best=keep_best)
        for step in going:
            # Nothing reads this name, so an interrupted removal leaves no damaged checkpoint.
            gone = self.root / f"{name_of(step)}.gone.{token_hex(4)}{PART}"
            self._try(partial(self.path(step).rename, gone))
        if going or len(present) < len(steps):
            self._try(partial(sync, self.root))
        # List now: later, the directory of the next save has such a name too.
        names = [name for name in self._try(self._names) or [] if name.startswith("step-")]
        leftovers = [self.root / name for name in names if name.endswith(PART)]
        self._removal = Thread(target=self._remove, args=(leftovers,), daemon=True)
        self._removal.start()

    def finish(self) -> None:
        """Wait until the files of removed checkpoints are removed."""
        if self._removal is not None:
            self._removal.join()

    def _remove(self, leftovers: Iterable[Path]) -> None:
        """Remove directories of killed writers and of removed checkpoints."""
        for path in leftovers:
            self._try(partial(shutil.rmtree, path))

    def _try(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (OSError, CheckpointError) as error:
            reason = reason_of(error)
            if reason not in self._reported:
                self._reported.add(reason)
                _LOG.warning("old checkpoints in %s cannot be removed: %s", self.root, reason)
            return None

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.root.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot list checkpoints in {self.root}: {reason_of(error)}; check the path and "
                f"its permissions"
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

    def _set_aside(self, step: int, newest: int, *, is_damaged: bool) -> None:
        aside = self.path(step).with_name(name_of(step) + ASIDE)
        if aside.exists():
            shutil.rmtree(aside)
        self.path(step).rename(aside)
        origin = "of another job or of this run before it resumed"
        _LOG.warning(
            "a restart loads the latest checkpoint, which must be the last save of the run, but "
            "%s, %s, is later than step %d: it is renamed to %s; remove it if it is not needed",
            *(self.path(step), "which is damaged" if is_damaged else origin, newest, aside.name),
        )
