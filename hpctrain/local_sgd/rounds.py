"""Rounds of local methods: counts of steps and rounds, and the message that synchronizes ranks."""

from dataclasses import dataclass

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import MismatchError
from hpctrain.gradients.sample_count import (
    NUM_FLAGS,
    bits_of,
    exponent_of_peaks,
    flags_of,
    peak_of,
)
from hpctrain.local_sgd.federated import Draw
from hpctrain.local_sgd.replica_weight import SampleSums, Share, require_same_counting
from hpctrain.local_sgd.round_clock import RoundClock
from hpctrain.local_sgd.synchronous_gradients import SynchronousGradients

_NUM_SUMS = 15  # numbers that ranks report when they synchronize


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpening:
    """Result of a synchronization of all ranks."""

    weight: float  # weight of this rank's replica
    total_weight: float  # sum of all ranks' weights; 0 if no replica counts
    outdated: bool  # whether the tensors of some rank do not match its buckets
    step_s: float  # mean seconds of a step, without averages
    round_s: float
    """Seconds that the previous average took, with waits for other ranks; mean over ranks."""


class Rounds:
    """Counts a rank's steps and rounds, and synchronizes ranks by a message.

    The constructor is collective.

    Args:
        comm: ranks of the rounds.
        clock: clock that measures steps, and decides when the ranks synchronize.
        gradients: gradients that all or some of these ranks average.
    """

    def __init__(
        self, comm: Communicator, clock: RoundClock, gradients: SynchronousGradients
    ) -> None:
        self.step = 0  # steps taken, including skipped steps
        self.number = 0  # rounds that have ended
        self.start = 0  # step at which the current round began
        self.drift = 0.0
        """Distance of replicas from their mean, root mean square over ranks, at the last average
        before the last synchronization; the same on every rank."""
        self.own_drift = 0.0
        """Squared distance of this rank's replica from the mean, at the last average."""
        self.samples: SampleSums | None = None
        """Samples of this rank's replica, which determine its weight in ``share``."""
        self.takes_part = True  # whether this rank's replica counts if the rank is drawn
        self.draw = Draw(comm.rank, comm.size)
        self.flags = 0  # bits that this rank raises
        self.raised_flags = 0  # bits that any rank raised at the last synchronization
        self.agrees = True  # whether all ranks have the same parameters
        self._comm, self._clock, self._gradients = comm, clock, gradients
        self._message = comm.new_bucket(_NUM_SUMS + NUM_FLAGS, torch.float64)

    @property
    def step_in_round(self) -> int:
        """Number of steps taken in the current round."""
        return self.step - self.start

    @property
    def counts(self) -> bool:
        """Whether this rank's replica counts in the current round."""
        return self.takes_part and self.draw.includes(self.number)

    def count_step(self, *, synchronous: bool) -> None:
        """Record the end of a step; if ``synchronous``, all ranks averaged its gradients."""
        self.step += 1
        self.agrees &= synchronous
        self._clock.count_step(self.step, synchronous=synchronous)

    def close(self, *, agrees: bool) -> None:
        """Begin the next round; ``agrees`` is True if all ranks have the same parameters."""
        self.number += 1
        self.agrees = agrees
        self.start_here()

    def start_again(self) -> None:
        """Begin a round after a state was loaded, with the same parameters on all ranks."""
        self.start_here()
        self.agrees = True
        self._clock.restart(self.step)

    def start_here(self) -> None:
        """Let the current round begin with the next step."""
        self.start = self.step

    def synchronize(
        self, samples: SampleSums | None = None, *, outdated: bool = False
    ) -> RoundOpening:
        """Exchange reports between all ranks. Collective.

        Args:
            samples: sample counts that determine the weight of this rank's replica; None if
                replicas are not averaged.
            outdated: whether the tensors of this rank do not match its buckets.

        Raises:
            MismatchError: ranks have taken different numbers of steps, have not called
                ``set_num_samples`` in the same steps, or have passed different ``nominal``
                values. Raised on every rank.
        """
        weight, total, self.raised_flags = self._report(
            samples,
            outdated=outdated,
            step_s=self._clock.step_s,
            round_s=self._clock.waited_s,
            drift=self.own_drift if self.takes_part else 0.0,
        )
        size = self._comm.size
        self.drift = (total["drift"] / self.draw.num_ranks) ** 0.5
        step_s = total["step_s"] / size
        self._clock.record_sync(self.step, step_s, total["round_s"] / size if samples else None)
        return RoundOpening(
            weight=weight,
            total_weight=total["weight"],
            outdated=total["outdated"] > 0,
            step_s=step_s,
            round_s=self._clock.round_s,
        )

    def share(self) -> Share:
        """Return weight and scale of this rank's replica in a mean of all replicas. Collective.

        Replicas have the same weights as at the end of a round, or equal weights if no replica
        counts.
        """
        weight, total, _ = self._report(self.samples)
        if not total["weight"]:
            return Share(1.0, 1.0 / self._comm.size)
        return Share(weight, 1.0 / total["weight"])

    def _report(
        self, samples: SampleSums | None, **more: float
    ) -> tuple[float, dict[str, float], int]:
        """Return this rank's weight, the sums of all reports, and the raised flags. Collective.

        All weights are divided by a power of two, so that no weight is above 1: the product of a
        larger weight and a 16-bit number could overflow.
        """
        self._gradients.confirm()
        takes_part = bool(samples and self.counts)
        weight = samples.weight if samples and takes_part else 0.0
        own: dict[str, float] = {
            "weight": weight,
            "peak": peak_of(weight),
            "has_count": bool(samples and samples.is_counted and takes_part),
            "takes_part": takes_part,
            **(samples if samples and takes_part else SampleSums()).report(),
            "step": self.step,
            "step_squared": self.step**2,
            **more,
        }
        flat = self._message.flat.zero_()
        reported = (*bits_of(self.flags), *own.values())
        flat[: len(reported)] = torch.tensor(reported, dtype=torch.float64)
        self._comm.allreduce_(self._message).wait()
        values, size = flat.tolist(), self._comm.size
        total = dict(zip(own, values[NUM_FLAGS:], strict=False))
        if total["step_squared"] * size != total["step"] ** 2:
            raise MismatchError(
                f"a round must end on all ranks after the same step, but the mean over ranks is "
                f"{total['step'] / size:g} steps and this rank has taken {own['step']:g}; call "
                f"skip_step() on a rank that does not take a step"
            )
        require_same_counting(total, own)
        top = 2.0 ** exponent_of_peaks(total["peak"])
        total["weight"] /= top
        return weight / top, total, flags_of(values[:NUM_FLAGS])
