"""Rounds of local methods: the position of a rank, and the message that synchronizes ranks."""

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

    weight: float  # of this rank's replica
    total_weight: float  # of all ranks' replicas; 0 if no rank takes part
    outdated: bool  # whether tensors have changed on some rank
    step_s: float  # mean duration of a step, without averaging
    round_s: float
    """Mean time over ranks of the averaging before, including the wait for other ranks."""


class Rounds:
    """Counts a rank's steps and rounds, and synchronizes ranks by a message.

    Args:
        comm: ranks of the rounds.
        clock: measures steps, and decides when the ranks synchronize.
        gradients: gradients that some of these ranks average.
    """

    def __init__(
        self, comm: Communicator, clock: RoundClock, gradients: SynchronousGradients
    ) -> None:
        """Allocate the message. Collective."""
        self.step = 0  # steps taken, including skipped steps
        self.number = 0  # rounds that have ended
        self.start = 0  # step at which the current round began
        self.drift = 0.0
        """Distance of replicas from their mean, root mean square over ranks, at the averaging
        before the last synchronization; the same on every rank."""
        self.own_drift = 0.0
        """Squared distance of this rank's replica from the mean, at the last averaging."""
        self.samples: SampleSums | None = None
        """Samples of this rank's replica since the averaging that ``share`` follows."""
        self.takes_part = True  # whether this rank's replica counts if it is drawn
        self.draw = Draw(comm.rank, comm.size)
        self.flags = 0  # bits of this rank
        self.raised_flags = 0  # bits of any rank at the last synchronization
        self.agrees = True  # whether all ranks have the same parameters
        self._comm, self._clock, self._gradients = comm, clock, gradients
        self._message = comm.new_bucket(_NUM_SUMS + NUM_FLAGS, torch.float64)

    @property
    def step_in_round(self) -> int:
        """Steps of the current round that were taken."""
        return self.step - self.start

    @property
    def counts(self) -> bool:
        """Whether this rank's replica counts in the current round."""
        return self.takes_part and self.draw.includes(self.number)

    def count_step(self, *, synchronous: bool) -> None:
        """Record the end of a step; ``synchronous`` if all ranks have taken the step together."""
        self.step += 1
        self.agrees &= synchronous
        self._clock.count_step(self.step, synchronous=synchronous)

    def close(self, *, agrees: bool) -> None:
        """Begin the next round; ``agrees`` is whether all ranks have the same parameters."""
        self.number += 1
        self.agrees = agrees
        self.start_here()

    def start_again(self) -> None:
        """Begin a round after a state was loaded: all ranks have the same parameters."""
        self.start_here()
        self.agrees = True
        self._clock.restart(self.step)

    def start_here(self) -> None:
        """Begin the current round with the next step."""
        self.start = self.step

    def synchronize(
        self, samples: SampleSums | None = None, *, outdated: bool = False
    ) -> RoundOpening:
        """Exchange reports between all ranks. Collective.

        Args:
            samples: sample counts of this rank, the weight of its replica; None if replicas are
                not averaged.
            outdated: whether its tensors have changed since the buckets were laid out.

        Raises:
            MismatchError: ranks have taken different numbers of steps, or count samples in
                different steps; on every rank.
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
        """Return the factors of this rank's replica in a mean of all replicas now. Collective.

        As at the end of a round; the factors are equal on all ranks if no rank counts.
        """
        weight, total, _ = self._report(self.samples)
        if not total["weight"]:
            return Share(1.0, 1.0 / self._comm.size)
        return Share(weight, 1.0 / total["weight"])

    def _report(
        self, samples: SampleSums | None, **more: float
    ) -> tuple[float, dict[str, float], int]:
        """Return this rank's weight, the sums of all reports, and the raised flags. Collective.

        All weights are divided by a power of two, so that none is above 1: a product of 16-bit
        numbers could overflow.
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
                f"{total['step'] / size:g} and this rank has taken {own['step']:g}; call "
                f"skip_step() on a rank that does not take a step"
            )
        require_same_counting(total, own)
        top = 2.0 ** exponent_of_peaks(total["peak"])
        total["weight"] /= top
        return weight / top, total, flags_of(values[:NUM_FLAGS])
