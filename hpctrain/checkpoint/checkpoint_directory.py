"""Directory with the checkpoints of a run: names, retention and removal."""

import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

from hpctrain.checkpoint.format.manifest import CheckpointManifest, name_of, step_of
from hpctrain.core.atomic import PART, discard, doomed, reason_of, sync
from hpctrain.core.errors import CheckpointError

SCORE = "score"  # key in the facts of a checkpoint: score of its model

ASIDE = ".aside"
"""Suffix of a checkpoint that a resumed run has set aside; its files are kept, but not loaded."""

T = TypeVar("T")

Version = tuple[int, int]  # time at which a checkpoint was completed, and inode

_MOST_LOOKS, _PAUSE_S = 4, 0.05
"""Listings, and seconds between them, while another job seems to rename checkpoints."""

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


def version_of(path: Path) -> Version | None:
    """Return a value that changes if a checkpoint is replaced; None if there is no checkpoint."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def is_unchanged(path: Path, before: Version | None) -> bool:
    """Return whether a checkpoint that had version ``before`` still exists and has it."""
    return before is not None and before == version_of(path)


class CheckpointDirectory:
    """Directory of a run's checkpoints: list, find, rename and remove them. Not collective.

    Several jobs may use the directory. A job never removes or renames a checkpoint that was
    completed after its own last one, so the checkpoint that was completed last always remains.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[int, Kept] = {}
        self._reported: set[str] = set()
        self._removal: Thread | None = None

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint after ``step`` steps."""
        return self.root / name_of(step)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, newest first.

        Raises ``CheckpointError``: the directory exists and cannot be read.
        """
        found: set[int] = set()
        for _ in range(_MOST_LOOKS):  # a listing may miss names that change meanwhile
            names = self._names()
            found = {step for name in names if (step := step_of(name)) is not None}
            if found or not any(name.startswith("step-") for name in names):
                break
            time.sleep(_PAUSE_S)
        return sorted(found, reverse=True)

    def newest(self, passed_over: Collection[int] = ()) -> tuple[int | None, dict[int, str]]:
        """Return the newest step with a whole manifest, and the faults of newer steps.

        ``passed_over`` are steps to ignore, because they are known to be damaged. Raises
        ``CheckpointError``: the directory exists and cannot be read.
        """
        faults: dict[int, str] = {}
        num_looks = Counter[int]()  # by step that another job removed or replaced
        while True:
            gone: dict[int, str] = {}
            for step in self.steps():
                if step in passed_over or step in faults:
                    continue
                path = self.path(step)
                before = version_of(path)
                try:
                    CheckpointManifest.read(path)
                except CheckpointError as error:
                    (faults if is_unchanged(path, before) else gone)[step] = str(error)
                else:
                    return step, faults
            num_looks.update([*gone])
            # Some file systems list removed files for a while: then the run has checkpoints.
            if all(num_looks[step] > _MOST_LOOKS for step in gone):
                return None, faults | gone
            time.sleep(_PAUSE_S)

    def tidy(
        self, newest: int, *, keep: int, keep_best: int = 0, damaged: Collection[int] = ()
    ) -> None:
        """Remove expendable checkpoints after ``newest`` was written; log failures.

        A checkpoint is renamed before it is removed, so a kill or a power failure leaves a
        leftover for the next call and not a damaged checkpoint. A thread removes the files, so
        that the caller does not wait for them. Checkpoints of steps after ``newest``, which the
        run wrote before it resumed from an older one, are renamed, because a restart would load
        them. Checkpoints that another job has completed after ``newest`` stay. ``damaged`` steps
        are not counted in ``keep``.
        """
        self.finish()
        self._known.pop(newest, None)  # ``newest`` may replace a checkpoint without a score
        steps = self._older(newest)
        for step in steps:
            if step > newest:
                self._try(
                    partial(self._set_aside, step, newest, steps[step], is_damaged=step in damaged)
                )
        present = [self._kept(step, damaged) for step in steps if step <= newest]
        going = expendable(present, keep=keep, keep_best=keep_best)
        for step in going:
            # Nothing reads this name, so an interrupted removal leaves no damaged checkpoint.
            self._try(partial(self._rename, step, doomed(self.path(step)), steps[step]))
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
            self._try(partial(discard, path))

    def _older(self, newest: int) -> dict[int, Version]:
        """Return ``newest`` and the steps that were completed before ``newest``, by version."""
        steps = self._try(self.steps) or []
        found = {step: at for step in steps if (at := version_of(self.path(step))) is not None}
        if (own := found.get(newest)) is None:  # renamed by another job
            return {}
        return {step: at for step, at in found.items() if (at[0], step) <= (own[0], newest)}

    def _rename(self, step: int, path: Path, version: Version) -> None:
        """Rename the checkpoint of ``step``, unless another job has replaced ``version``."""
        self.path(step).rename(path)
        if version_of(path) != version:
            path.rename(self.path(step))
            raise CheckpointError(f"another job writes {self.path(step)}")

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

    def _set_aside(self, step: int, newest: int, version: Version, *, is_damaged: bool) -> None:
        aside = self.path(step).with_name(name_of(step) + ASIDE)
        if aside.exists():
            shutil.rmtree(aside)
        self._rename(step, aside, version)
        origin = "of another job or of this run before it resumed"
        _LOG.warning(
            "a restart loads the latest checkpoint, which must be the last save of the run, but "
            "%s, %s, is later than step %d: it is renamed to %s; remove it if it is not needed",
            *(self.path(step), "which is damaged" if is_damaged else origin, newest, aside.name),
        )
