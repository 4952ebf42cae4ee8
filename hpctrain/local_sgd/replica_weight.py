"""Weights of replicas in a mean over ranks, from numbers of samples."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.core.errors import MismatchError


class Share(NamedTuple):
    """Weight of this rank's replica in a sum over ranks, and factor that makes the sum a mean."""

    weight: float
    scale: float  # one over the sum of all ranks' weights


class SampleSums:
    """Sums the numbers of samples that the program has set since the last average."""

    def __init__(self) -> None:
        self._sum = self._nominal = 0.0
        self._of_step: list[tuple[float, float]] = []  # numbers set for the current step
        # Nominal number that is assumed for a step without a number, and count of such steps.
        self._usual, self._num_unset = 0.0, 0
        self.is_counted = False  # whether a number was ever set
        self.nominal = 0.0  # last nominal number since the last average; 0 without one
        self.num_uncounted = 0  # steps without a number since the last average

    @property
    def weight(self) -> float:
        """Sum of samples divided by the sum of nominal numbers; 1 if no number was set."""
        num_samples = self._sum + sum(number for number, _ in self._of_step)
        nominal = self._nominal + sum(nominal for _, nominal in self._of_step)
        nominal += self._num_unset * self._usual
        return num_samples / (nominal or 1.0) if self.is_counted else 1.0

    @property
    def counts_step(self) -> bool:
        """Whether the current step has samples, or no number was set."""
        return not self.is_counted or any(number for number, _ in self._of_step)

    def add(self, num_samples: float, nominal: float) -> None:
        """Add the numbers of a backward pass to the current step."""
        self._of_step.append((num_samples, nominal))
        self.is_counted, self.nominal = True, nominal

    def end_step(self, *, is_skipped: bool) -> None:
        """Add the numbers of the current step; a skipped step counts with 0 samples."""
        if not self._of_step:
            self._num_unset += 1
            self.num_uncounted += not is_skipped
            return
        self._sum += 0.0 if is_skipped else sum(number for number, _ in self._of_step)
        self._usual = sum(nominal for _, nominal in self._of_step)
        self._nominal += self._usual
        self._of_step = []

    def clear(self) -> None:
        """Set all sums to zero, after an average."""
        self._sum = self._nominal = 0.0
        self._of_step, self._num_unset = [], 0
        self.nominal, self.num_uncounted = 0.0, 0

    def report(self) -> dict[str, float]:
        """Return the numbers of this rank whose sums ``require_same_counting`` checks."""
        nominal = self.nominal
        uncounted = self.num_uncounted if self.is_counted else 0
        return {
            "has_nominal": nominal > 0,
            "nominal": nominal,
            "nominal_squared": nominal**2,
            "uncounted": uncounted,
            "uncounted_squared": uncounted**2,
        }

    def own_state(self) -> list[float]:
        """Return the sums, the nominal number of a step, and whether a number was set."""
        return [self._sum, self._nominal, self._usual, self._num_unset, self.is_counted]

    def load_own_state(self, state: Sequence[float]) -> None:
        """Restore a result of ``own_state``."""
        self._sum, self._nominal, *more, is_counted = state
        self._usual, num_unset = more or (0.0, 0)  # for checkpoints of older versions
        self._num_unset, self.is_counted, self._of_step = int(num_unset), bool(is_counted), []


def require_same_counting(total: Mapping[str, float], own: Mapping[str, float]) -> None:
    """Raise ``MismatchError``, on all ranks, unless all ranks set numbers in the same steps.

    Args:
        total: sums over ranks of ``SampleSums.report``; also the number of ranks that take part,
            and the number of ranks that have set a number.
        own: report of this rank.
    """
    if total["has_count"] not in (0, total["takes_part"]):
        raise MismatchError(
            f"set_num_samples must be called by all ranks or by none, but "
            f"{total['has_count']:.0f} of {total['takes_part']:.0f} ranks have called it; call "
            f"set_num_samples on every rank, with 0 before skip_step()"
        )
    spread = total["nominal_squared"] * total["has_nominal"] - total["nominal"] ** 2
    if spread > 1e-12 * total["nominal"] ** 2:
        raise MismatchError(
            f"nominal of set_num_samples must be the same on every rank, but the mean of "
            f"{total['has_nominal']:.0f} ranks is {total['nominal'] / total['has_nominal']:g} and "
            f"this rank has {own['nominal']:g}; pass the same number on every rank, such as "
            f"the usual number of samples of one rank"
        )
    if total["uncounted_squared"] * total["takes_part"] != total["uncounted"] ** 2:
        raise MismatchError(
            f"set_num_samples must precede every step that a rank takes, but this rank has taken "
            f"{own['uncounted']:.0f} steps of the round without it and the mean over ranks is "
            f"{total['uncounted'] / total['takes_part']:g}; call set_num_samples in each step, "
            f"with 0 if the rank has no samples"
        )
