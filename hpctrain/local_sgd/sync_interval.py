"""Number of steps per round: fixed, computed by a function, or measured."""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from hpctrain.core.checks import Bounds, Number, checked
from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.state_fields import Fields, StateFields

Steps = int | str | Callable[[int], int]
"""A number, ``"auto"``, or a function of the index of a round, from 0."""

TRIAL_ROUNDS = 3
"""Number of rounds, each of ``least`` steps, before ``"auto"`` decides; the first is a warm-up."""


class SyncInterval(StateFields):
    """Number of steps of each round, identical on all ranks.

    ``"auto"`` measures the first rounds and chooses the smallest number of steps with which
    averaging takes at most the fraction ``share`` of the time. All later rounds have this number
    of steps.

    Args:
        steps: number, ``"auto"``, or function of the index of a round, from 0.
        share: largest fraction of the time for averaging, for ``"auto"``.
        least: smallest number of steps, for ``"auto"``.
        most: largest number of steps, for ``"auto"``.

    Raises:
        ConfigError: an argument is not valid.
    """

    _SHARED: ClassVar[Fields] = {"chosen": "_chosen", "measured": "_measured"}

    def __init__(
        self, steps: Steps, *, share: float = 0.1, least: int = 1, most: int = 512
    ) -> None:
        if not callable(steps):
            checked("steps", steps, Literal["auto"] | Number)
        checked("share", share, Annotated[float, Bounds(above=0, below=1)])
        if not 1 <= least <= most:
            raise ConfigError(f"least must be from 1 to most, got least={least}, most={most}")
        self._steps, self._share, self._least, self._most = steps, share, least, most
        self._chosen: int | None = None
        self._measured: list[list[float]] = []

    def steps_of(self, number: int) -> int:
        """Return the steps of round ``number``; raise ``ConfigError`` if below 1."""
        if isinstance(self._steps, int):
            return self._steps
        if isinstance(self._steps, str):
            return self._chosen or self._least
        return int(checked(f"steps({number})", self._steps(number), Number))

    def learn(self, step_s: float, round_s: float) -> None:
        """Record measured seconds of a step and of an average, identical on all ranks."""
        if self._steps != "auto" or self._chosen is not None:
            return
        self._measured.append([step_s, round_s])
        if len(self._measured) == TRIAL_ROUNDS:
            measured = self._measured[1:]
            step_s = min(step for step, _ in measured)
            round_s = min(seconds for _, seconds in measured)
            self._chosen = self._affordable(step_s, round_s)

    def _affordable(self, step_s: float, round_s: float) -> int:
        """Return the fewest steps for which averaging takes at most ``share`` of a round."""
        if step_s <= 0:
            return self._most
        steps = math.ceil(round_s * (1 - self._share) / (self._share * step_s))
        return min(max(steps, self._least), self._most)
