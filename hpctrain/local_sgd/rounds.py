"""Steps, rounds, and what is known to all ranks: the bookkeeping of methods that agree rarely."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.sample_count import (
    NUM_FLAGS,
    bits_of,
    check_count,
    exponent_of_peaks,
    flags_of,
    peak_of,
)

Fields = Mapping[str, str | tuple[str, ...]]
"""From a name in a state to an attribute, or to several in a row; dots lead into parts, and ``[]``
is behind the name of a list of objects that have states."""

_PARTS = "[]"


class StateFields:
    """What an object goes on from: shared by all ranks, and a rank's own in mid-round.

    Attributes that have such states themselves give and load them; others are copied. A class
    adds to the tables of its bases.
    """

    _SHARED: ClassVar[Fields] = {}
    _OWN: ClassVar[Fields] = {}

    def shared_state(self) -> dict[str, Any]:
        """Return what is the same on every rank, for any number of ranks. Collective."""
        return _state_of(self, "_SHARED", "shared_state")

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round after a state of any number of ranks. Collective."""
        _load(self, "_SHARED", "load_shared_state", state)

    def own_state(self) -> dict[str, Any]:
        """Return what is this rank's own in the middle of a round. Collective."""
        return _state_of(self, "_OWN", "own_state")

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a round, after ``load_shared_state``. Collective."""
        _load(self, "_OWN", "load_own_state", state)


def _fields(owner: object, table: str) -> dict[str, str | tuple[str, ...]]:
    bases = reversed(type(owner).__mro__)
    return {name: path for base in bases for name, path in vars(base).get(table, {}).items()}


def _state_of(owner: object, table: str, method: str) -> dict[str, Any]:
    def at(path: str | tuple[str, ...]) -> Any:
        if isinstance(path, tuple):
            return [at(one) for one in path]
        value = attrgetter(path.removesuffix(_PARTS))(owner)
        if path.endswith(_PARTS):
            return [getattr(part, method)() for part in value]
        return getattr(value, method)() if hasattr(value, method) else deepcopy(value)

    return {name: at(path) for name, path in _fields(owner, table).items()}


def _load(owner: object, table: str, method: str, state: Mapping[str, Any]) -> None:
    for name, path in _fields(owner, table).items():
        paths, values = ((path,), (state[name],)) if isinstance(path, str) else (path, state[name])
        for one, value in zip(paths, values, strict=True):
            _put(owner, one, method, value)


def _put(owner: object, path: str, method: str, state: Any) -> None:
    *parents, name = path.removesuffix(_PARTS).split(".")
    holder = reduce(getattr, parents, owner)
    now = getattr(holder, name)
    if path.endswith(_PARTS):
        for part, own in zip(now, state, strict=True):
            getattr(part, method)(own)
    elif hasattr(now, method):
        getattr(now, method)(state)
    else:
        setattr(holder, name, deepcopy(state))


_NUM_SUMS = 15  # of what ranks report when they meet


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpening:
    """What all ranks know after they have met."""

    weight: float  # of this rank's replica
    total_weight: float  # of all ranks' replicas; 0 where all sit out
    outdated: bool  # whether tensors have changed on some rank
    step_s: float  # mean duration of a step, without averaging
    round_s: float
    """Mean time over ranks that the averaging before has cost, waiting for others included."""


class Share(NamedTuple):
    """What this rank's replica counts in a mean over ranks."""

    weight: float
    scale: float  # one over the sum of all ranks' weights


class SampleSums:
    """How much a replica counts: by its samples since the last averaging, if they are counted."""

    def __init__(self) -> None:
        self._sum = self._nominal = 0.0
        self._of_step: list[tuple[float, float]] = []  # given for the step that is not over
        self._usual, self._num_untold = 0.0, 0  # nominal number of steps that were given none
        self.is_counted = False  # whether a number was ever given
        self.nominal = 0.0  # given last, since the last averaging; 0 where none was
        self.num_uncounted = 0  # steps since then that were taken, and given no number

    @property
    def weight(self) -> float:
        """Samples over the usual number of them; 1 where they are not counted."""
        num_samples = self._sum + sum(number for number, _ in self._of_step)
        nominal = self._nominal + sum(nominal for _, nominal in self._of_step)
        nominal += self._num_untold * self._usual
        return num_samples / (nominal or 1.0) if self.is_counted else 1.0

    @property
    def counts_step(self) -> bool:
        """Whether the step that is not over has samples, or they are not counted."""
        return not self.is_counted or any(number for number, _ in self._of_step)

    def add(self, num_samples: float, nominal: float) -> None:
        """Add the samples of a step; ``ConfigError`` if the numbers cannot be."""
        check_count(num_samples, nominal)
        self._of_step.append((num_samples, nominal))
        self.is_counted, self.nominal = True, nominal

    def end_step(self, *, is_skipped: bool) -> None:
        """Count the samples of a step, none if it ``is_skipped``: to others it is a step too."""
        if not self._of_step:
            self._num_untold += 1
            self.num_uncounted += not is_skipped
            return
        self._sum += 0.0 if is_skipped else sum(number for number, _ in self._of_step)
        self._usual = sum(nominal for _, nominal in self._of_step)
        self._nominal += self._usual
        self._of_step = []

    def clear(self) -> None:
        """Count anew."""
        self._sum = self._nominal = 0.0
        self._of_step, self._num_untold = [], 0
        self.nominal, self.num_uncounted = 0.0, 0

    def own_state(self) -> list[float]:
        """Return the sums, what a step adds to them, and whether there are any."""
        return [self._sum, self._nominal, self._usual, self._num_untold, self.is_counted]

    def load_own_state(self, state: Sequence[float]) -> None:
        """Go on from a state."""
        self._sum, self._nominal, *more, is_counted = state
        self._usual, num_untold = more or (0.0, 0)  # of older checkpoints
        self._num_untold, self.is_counted, self._of_step = int(num_untold), bool(is_counted), []


class Draw(StateFields):
    """Which ranks count in a round: a part of them, drawn from a seed, alike on every rank."""

    _SHARED: ClassVar[Fields] = {"seed": "_seed"}

    def __init__(self, rank: int, size: int, fraction: float = 1.0, seed: int = 0) -> None:
        """Draw ``fraction`` of ``size`` ranks, rounded, at least one; above 0 and at most 1."""
        self._rank, self._size, self._seed = rank, size, seed
        self.is_partial = fraction < 1
        self.num_ranks = max(1, int(fraction * size + 0.5))
        self._drawn: tuple[int, int, list[int]] | None = None

    def ranks(self, number: int) -> list[int]:
        """Return the ranks of the round ``number``, ascending: those with the smallest hashes."""
        if self._drawn is None or self._drawn[:2] != (self._seed, number):
            hashes = {rank: self._hash(number, rank) for rank in range(self._size)}
            drawn = sorted(sorted(hashes, key=hashes.__getitem__)[: self.num_ranks])
            self._drawn = self._seed, number, drawn
        return self._drawn[2]

    def includes(self, number: int) -> bool:
        """Say whether this rank is drawn for the round ``number``."""
        return self.num_ranks == self._size or self._rank in self.ranks(number)

    def _hash(self, number: int, rank: int) -> bytes:
        return sha256(f"{self._seed} {number} {rank}".encode()).digest()


class Rounds:
    """Counts a rank's steps and samples, and lets the ranks meet.

    Between two averagings the ranks need not speak. A flag that one raises becomes known when they
    meet next: at an averaging, or by a message of its own ``within_s`` after the last meeting.
    """

    def __init__(self, comm: Communicator) -> None:
        """Make the message. Collective."""
        self.step = 0  # steps that were taken, those that were skipped included
        self.number = 0  # rounds that have ended
        self.start = 0  # step at which the present round began
        self.has_met = True  # whether the ranks have met in the last step
        self.drift = 0.0
        """Distance of replicas from their mean, root mean square over ranks, at the averaging
        before the last meeting; the same on every rank."""
        self.own_drift = 0.0
        """Squared distance of this rank's replica from the mean, at the last averaging."""
        self.waited_s = 0.0
        """Time that this rank has spent on others since the last averaging began."""
        self.round_s = 0.0
        """Mean time over ranks that the averaging before the last has cost; the same on all."""
        self.takes_part = True  # whether this rank's replica counts where it is drawn
        self.draw = Draw(comm.rank, comm.size)
        self.flags = 0  # bits of this rank
        self.raised_flags = 0  # bits that any rank had at the last meeting; the same on every rank
        self.within_s = float("inf")  # time between two meetings at most, about
        self.must_meet = False  # whether the next step ends in a meeting; the same on every rank
        self.agrees = True  # whether all ranks have the same parameters
        self.reducers: Sequence[Reducer] = ()  # of gradients, over these ranks or a part of them
        self._comm = comm
        self._message = comm.new_bucket(_NUM_SUMS + NUM_FLAGS, torch.float64)
        self._last_meeting, self._steps_between = 0, 1
        self._num_timed, self._timed_s = 0, 0.0
        self.resume_clock()

    @property
    def step_in_round(self) -> int:
        """Steps of the present round that were taken."""
        return self.step - self.start

    @property
    def counts(self) -> bool:
        """Whether this rank's replica counts in the present round."""
        return self.takes_part and self.draw.includes(self.number)

    def is_meeting_due(self, *, busy: bool) -> bool:
        """Say whether the ranks meet now, if nothing else has let them meet in this step.

        A message would wait behind replicas that are under way: then all ranks are ``busy``.
        """
        since = self.step - self._last_meeting
        soon = self.within_s < float("inf") and since >= self._steps_between
        return not self.has_met and (self.must_meet or (soon and not busy))

    def resume_clock(self) -> None:
        """Let the next step begin."""
        self._clock = time.perf_counter()

    def count_step(self, *, synchronous: bool) -> None:
        """Note that a step is over, and whether all ranks have taken it together."""
        self.step += 1
        self.agrees &= synchronous
        self.has_met = synchronous
        if synchronous:
            self._last_meeting = self.step
        self._num_timed += 1
        self._timed_s += time.perf_counter() - self._clock

    def meet(self, samples: SampleSums | None = None, *, outdated: bool = False) -> RoundOpening:
        """Let all ranks report. Collective.

        This rank's replica counts by ``samples``; None where none is averaged. Its tensors are
        ``outdated`` where they have changed since buckets were laid out.
        """
        weight, total, self.raised_flags = self._report(
            samples,
            outdated=outdated,
            step_s=self._timed_s / max(self._num_timed, 1),
            round_s=self.waited_s,
            drift=self.own_drift if self.takes_part else 0.0,
        )
        size = self._comm.size
        self.has_met, self.must_meet, self._last_meeting = True, False, self.step
        self.drift = (total["drift"] / self.draw.num_ranks) ** 0.5
        self._num_timed, self._timed_s = 0, 0.0
        if samples:
            self.waited_s, self.round_s = 0.0, total["round_s"] / size
        step_s = total["step_s"] / size
        if self.within_s < float("inf") and step_s > 0:
            self._steps_between = max(1, int(self.within_s / step_s))
        return RoundOpening(
            weight=weight,
            total_weight=total["weight"],
            outdated=total["outdated"] > 0,
            step_s=step_s,
            round_s=self.round_s,
        )

    def share(self, samples: SampleSums) -> Share:
        """Return what this rank's replica counts in a mean of all ranks' here. Collective.

        As in a round that ends here; all alike where none of them counts.
        """
        weight, total, _ = self._report(samples)
        if not total["weight"]:
            return Share(1.0, 1.0 / self._comm.size)
        return Share(weight, 1.0 / total["weight"])

    def confirm(self) -> None:
        """Raise ``MismatchError`` on all ranks that have averaged other gradients. Collective.

        A rank that averages again, as its gradients were changed after ``backward()``, would wait
        for ranks of its node that wait for it in a call of all ranks.
        """
        for reducer in self.reducers:
            if reducer.is_on:
                reducer.reduction.confirm()

    def _report(
        self, samples: SampleSums | None, **more: float
    ) -> tuple[float, dict[str, float], int]:
        """Return this rank's weight, sums of what ranks report, and their flags. Collective.

        All weights are divided by a power of two, so that none is above 1: a product of 16 bits
        could overflow.
        """
        self.confirm()
        takes_part = bool(samples and self.counts)
        weight = samples.weight if samples and takes_part else 0.0
        own: dict[str, float] = {
            "weight": weight,
            "peak": peak_of(weight),
            "has_count": bool(samples and samples.is_counted and takes_part),
            "takes_part": takes_part,
            **_told(samples if samples and takes_part else SampleSums()),
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
                f"a round ends on all ranks after the same step, they have taken "
                f"{total['step'] / size:g} on average and this one {own['step']:g}; call "
                f"skip_step() on a rank that does not take a step"
            )
        if total["has_count"] not in (0, total["takes_part"]):
            raise MismatchError(
                f"set_num_samples must be called by all ranks or by none, "
                f"{total['has_count']:.0f} of {total['takes_part']:.0f} have called it; call it "
                f"on every rank, set_num_samples(0) before skip_step()"
            )
        _require_same_counting(total, own)
        top = 2.0 ** exponent_of_peaks(total["peak"])
        total["weight"] /= top
        return weight / top, total, flags_of(values[:NUM_FLAGS])

    def close(self, *, agrees: bool) -> None:
        """Begin the next round, after one that has made all ranks agree, or has not."""
        self.number += 1
        self.agrees = agrees
        self.start_here()

    def start_again(self) -> None:
        """Let a round begin in which all ranks have the same parameters, after steps elsewhere."""
        self.start = self._last_meeting = self.step
        self.agrees = True
        self.resume_clock()

    def start_here(self) -> None:
        """Let the present round begin with the next step."""
        self.start = self.step


def _told(samples: SampleSums) -> dict[str, float]:
    """Return what a rank reports of its ``set_num_samples``, beside its weight."""
    told = samples.nominal > 0
    nominal = samples.nominal
    uncounted = samples.num_uncounted if samples.is_counted else 0
    return {
        "tells": told,
        "nominal": nominal,
        "nominal_squared": nominal**2,
        "uncounted": uncounted,
        "uncounted_squared": uncounted**2,
    }


def _require_same_counting(total: Mapping[str, float], own: Mapping[str, float]) -> None:
    """Raise ``MismatchError``, on all ranks, if their weights would not be by their samples."""
    spread = total["nominal_squared"] * total["tells"] - total["nominal"] ** 2
    if spread > 1e-12 * total["nominal"] ** 2:
        raise MismatchError(
            f"nominal of set_num_samples is the same on every rank, the mean of "
            f"{total['tells']:.0f} ranks is {total['nominal'] / total['tells']:g} and this one "
            f"has {own['nominal']:g}; give the usual number of samples, not that of this rank"
        )
    if total["uncounted_squared"] * total["takes_part"] != total["uncounted"] ** 2:
        raise MismatchError(
            f"set_num_samples comes before every step that a rank takes, this one has taken "
            f"{own['uncounted']:.0f} of the round without it and others another number, "
            f"{total['uncounted'] / total['takes_part']:g} on average; call it in each step, with "
            f"0 where there are no samples"
        )


Steps = int | str | Callable[[int], int]
"""A number, ``"auto"``, or a function from the number of a round, counted from 0."""

TRIAL_ROUNDS = 3
"""Rounds of the smallest number of steps before ``auto`` decides; the first is not measured."""


class SyncInterval(StateFields):
    """The number of steps of each round, the same on every rank.

    ``auto`` measures the first rounds and takes the smallest number with which averaging costs at
    most ``share`` of the time. It decides once: a later part of the run has the same rounds.
    """

    _SHARED: ClassVar[Fields] = {"chosen": "_chosen", "measured": "_measured"}

    def __init__(
        self, steps: Steps, *, share: float = 0.1, least: int = 1, most: int = 512
    ) -> None:
        """Check the arguments; all but ``steps`` are for ``auto``."""
        if isinstance(steps, str) and steps != "auto":
            raise ConfigError(f'steps is a number, a function or "auto", got {steps!r}')
        if isinstance(steps, int) and steps < 1:
            raise ConfigError(f"a round has at least 1 step, got steps={steps}")
        if not 0 < share < 1:
            raise ConfigError(f"share is between 0 and 1, got {share}")
        if not 1 <= least <= most:
            raise ConfigError(f"least is from 1 to most, got least={least}, most={most}")
        self._steps, self._share, self._least, self._most = steps, share, least, most
        self._chosen: int | None = None
        self._measured: list[list[float]] = []

    def steps_of(self, number: int) -> int:
        """Return the steps of a round; ``ConfigError`` if a function gives no such number."""
        if isinstance(self._steps, int):
            return self._steps
        if isinstance(self._steps, str):
            return self._chosen or self._least
        steps = self._steps(number)
        if steps < 1:
            raise ConfigError(f"steps({number}) is a number of at least 1, got {steps!r}")
        return steps

    def learn(self, step_s: float, round_s: float) -> None:
        """Take a measurement that all ranks agree on: of a step alone, and of an averaging."""
        if self._steps != "auto" or self._chosen is not None:
            return
        self._measured.append([step_s, round_s])
        if len(self._measured) == TRIAL_ROUNDS:
            measured = self._measured[1:]
            step_s = min(step for step, _ in measured)
            round_s = min(seconds for _, seconds in measured)
            self._chosen = self._affordable(step_s, round_s)

    def _affordable(self, step_s: float, round_s: float) -> int:
        """Return the fewest steps with which a round costs at most its share, within bounds."""
        if step_s <= 0:
            return self._most
        steps = math.ceil(round_s * (1 - self._share) / (self._share * step_s))
        return min(max(steps, self._least), self._most)
