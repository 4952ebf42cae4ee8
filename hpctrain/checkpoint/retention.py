"""Retention of checkpoints, by their names and scores: pure."""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpctrain.core.atomic import PART
from hpctrain.core.errors import ConfigError

ASIDE = ".aside"
"""Ending of a checkpoint that a run went back behind; it is kept for people, and never loaded."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint as the rules see it."""

    step: int
    whole: bool = True
    """Whether it can be loaded, as far as is known."""
    score: float | None = None
    """How good the model is, the larger the better; None and NaN are never the best."""


def name_of(step: int) -> str:
    """Return the name of the directory of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory; None for all other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name_of(int(match[1])) == name else None


def check_keep(keep: int, keep_best: int) -> None:
    """Return if so many checkpoints can be kept.

    Raises:
        ConfigError: not even the last one would be kept, or a number is negative.
    """
    if keep < 1 or keep_best < 0:
        raise ConfigError(
            f"at least the last checkpoint is kept, and 0 or more of the best ones, got "
            f"keep={keep} and keep_best={keep_best}"
        )


def expendable(
    present: Iterable[Kept], *, keep: int, keep_best: int = 0, protected: Collection[int] = ()
) -> list[int]:
    """Return the steps whose checkpoints can go, oldest first.

    The ``keep`` newest whole ones and the ``keep_best`` best whole ones stay, of equal scores the
    newer one. A damaged one counts for neither; it stays until ``keep`` whole ones are newer, so
    that there is time to look at it, and it never pushes a whole one out.

    Args:
        present: what is there, in any order, each step once.
        keep: at least 1, so the newest whole one always stays.
        keep_best: of those that have a score.
        protected: steps that stay in any case.

    Raises:
        ConfigError: as ``check_keep``.
    """
    check_keep(keep, keep_best)
    present = sorted(present, key=lambda kept: kept.step)
    whole = [kept for kept in present if kept.whole]
    if len(whole) < keep:
        return []
    last = whole[-keep:]
    scored = [(k.score, k.step) for k in whole if k.score is not None and not math.isnan(k.score)]
    best = sorted(scored)[-keep_best:] if keep_best else []
    staying = {kept.step for kept in last} | {step for _, step in best} | {*protected}
    return [
        kept.step
        for kept in present
        if kept.step not in staying and (kept.whole or kept.step < last[0].step)
    ]


def leftovers(names: Iterable[str], in_work: Collection[str] = ()) -> list[str]:
    """Return the names that dead writers and removals cut short have left; nothing reads them.

    Args:
        names: all in the directory of the checkpoints.
        in_work: names of checkpoints that are being written now.
    """
    return sorted(
        name
        for name in names
        if name.endswith(PART)
        and name.startswith("step-")
        and name.removesuffix(PART) not in in_work
    )
