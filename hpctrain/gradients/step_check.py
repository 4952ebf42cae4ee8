"""The comparison between ranks at the start of each step, before its gradients travel.

Ranks that take different steps, reduce other optimizers or hold other weights find out here, on
all ranks at once, in one small all-reduce that is sent anyway. Flags and sample counts ride along.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hpctrain.comm.agreement import by_rank, differing
from hpctrain.comm.communicator import Communicator, Owner
from hpctrain.comm.threaded import start_on
from hpctrain.core import logs
from hpctrain.core.errors import MismatchError
from hpctrain.gradients.sample_count import (
    NUM_FLAGS,
    bits_of,
    exponent_of_peaks,
    flags_of,
    peak_of,
)
from hpctrain.runtime.last_check import Collection

_MASK = (1 << 20) - 1
"""Bits of a number that are compared: squares of 8192 ranks add up exactly in float64."""
_MOST_KEPT = 16  # optimizers that are gone
LONG = 16  # every so many steps it is compared which parameters no backward has reached in them
_COMPARED = ("member", "step", "skipped", "by_hand", "weights", "first", "unreached", "settings")
"""Numbers of which the message tells whether all ranks that have one have the same."""
_COUNTED = (
    "is_weighted",
    "outdated",
    "new_sparse",
    "keeps_sums",
    "changed_early",
    "replaced_sum",
    "repeats",
    "needs_all",
    "may_skip_alone",
    "is_strict",
    "own_changed",
    "is_written",
    "is_new",
    "is_spoilt",
    "is_stale",
    "is_early",
    "is_void",
    "synchronizes",
)
"""Facts of which the message tells on how many ranks they are true."""
_NUM_SUMS = 4  # ranks that have joined, weights, losses times weights, peaks of weights
_NUM_WORDS = _NUM_SUMS + 3 * len(_COMPARED) + len(_COUNTED) + NUM_FLAGS


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """What a rank says before it reduces."""

    member: int = 0  # which optimizer of this communicator, see ``StepCheck.enter``
    step: int | None = None
    """Steps taken so far; None after state was loaded: the number of the others holds."""
    skipped: int = 0
    """Checksum of the steps whose gradients were averaged, and which this rank has not taken."""
    may_skip_alone: bool = False  # whether these may be others than those of other ranks
    weight: float = 1.0  # how much this rank's gradient counts
    is_weighted: bool = False  # whether that was set by a number of samples
    loss: float = 0.0  # of this rank's samples, see ``Opening.mean_loss``
    outdated: bool = False
    """Whether the parameters are no longer those that the buckets were laid out for."""
    new_sparse: bool = False  # whether there is a sparse gradient where none was so far
    by_hand: int | None = None
    """Checksum of reduced gradients that the program has replaced or dropped; None for none."""
    keeps_sums: bool = False
    """With ``by_hand`` and a sum: whether something is left of it, or was put in its place, and
    no ``zero_grad()`` has come in between."""
    changed_early: bool = False
    """Whether gradients were changed between a pass that was not the last and ``step()``."""
    replaced_sum: str = ""
    """Name of a parameter whose sum was replaced before backward added to it; empty for none."""
    repeats: bool = False
    """Whether gradients of the step before are there, and no backward has added to them."""
    needs_all: bool = False  # whether no rank may have joined
    weights: int | None = None
    """Checksum of a sample of the weights; None where they are not compared."""
    first: int | None = None
    """Checksum of the first gradients; None later, and where there are none but zeros."""
    unreached: int | None = None
    """Checksum of the names that follow; None where they are not compared in this step."""
    unreached_names: tuple[str, ...] = ()
    """Parameters that no backward of this rank has reached in the last ``LONG`` steps."""
    is_strict: bool = True  # whether weights that have parted are an error
    settings: int | None = None
    """Checksum of the optimizer's settings; None where every rank steps by its own."""
    own_changed: str = ""
    """Name of a parameter whose gradient of this rank alone was changed; empty for none."""
    is_written: bool = False
    """Whether the program has changed parameters that the ranks of a node share."""
    is_stale: bool = False  # whether parameters were changed where torch does not count it
    is_new: bool = False  # whether gradients have come since the last message of the same step
    is_spoilt: bool = False  # whether a step has failed in the middle, so that nobody has a model
    is_early: bool = False  # whether sums between nodes have begun, which all ranks must end
    is_void: bool = False  # whether they have, and gradients are others since
    synchronizes: bool = False  # whether this is ``synchronize()``, and a later call opens again
    flags: int = 0  # bits that all ranks shall see


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What all ranks together have said; the same on every rank."""

    num_active: int  # ranks that have not joined, see ``hpctrain.join``
    member: int
    step: int
    total_weight: float
    exponent: int  # of the least power of two not below the largest weight
    mean_loss: float  # over all samples; NaN of none
    outdated: bool
    new_sparse: bool
    changed_alike: bool
    """Whether all ranks have changed reduced gradients by hand, in the same way."""
    weights_compared: bool
    weights_differ: bool
    """Whether the sampled weights are not the same on every rank that has compared them."""
    is_strict: bool
    first_alike: bool  # whether the first gradients are the same bits on all ranks, of two or more
    unreached_differ: bool
    """Whether backward does not reach the same parameters on all ranks, for many steps."""
    is_new: bool  # whether gradients have come on any rank since the last message of the step
    is_written: bool  # whether a program has changed parameters that the ranks of a node share
    is_early: bool  # whether any rank has begun with sums between nodes
    is_void: bool  # whether they are no longer the sums of what any rank has
    synchronizes: bool  # whether any rank has called ``synchronize()``
    flags: int


class Leaving(Protocol):
    """Steps of which the last one has left something."""

    def left(self) -> Mapping[str, str]:
        """Return what that is, as text by name. Not collective."""


class Member(Protocol):
    """An optimizer whose steps begin with a header."""

    @property
    def steps(self) -> "Leaving":
        """Its steps."""

    def stand_in(self, opening: Opening) -> None:
        """Take part in the step that begins so with nothing. Collective."""


class StepCheck:
    """Opens the steps of all optimizers that share a communicator."""

    def __init__(self, comm: Communicator, *, is_asked: bool = False) -> None:
        """Make the message. Collective."""
        self._is_asked, self._owner = is_asked, Owner()
        self._message = comm.new_bucket(_NUM_WORDS, torch.float64)
        self._members: list[weakref.ref[Member]] = []
        self._were_equal: set[int] = set()
        self._were_told: set[int] = set()
        self._unreached_told: set[int] = set()
        self._num_taken = 0  # exchanges since all ranks had joined in which this one had not
        self._kept: dict[int, Mapping[str, str]] = {}  # what optimizers that are gone have left
        self.collection = Collection(self)

    @property
    def is_asked(self) -> bool:
        """Whether there is something to ``hand_over`` at the end; not in a forked child."""
        return self._is_asked and self._owner.is_here

    def enter(self, member: Member) -> int:
        """Return the number of one more optimizer; all ranks enter theirs in the same order."""
        self._members.append(weakref.ref(member))
        return len(self._members) - 1

    def exchange(
        self,
        comm: Communicator,
        mine: Announcement | None,
        sample: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> Opening:
        """Tell all ranks, and hear what they say together, on the communicator's thread.

        Collective. A rank that has joined gives None. ``sample`` returns the checksums of the
        weights that are looked at in a step, by name. Where the ranks do not begin the same step,
        all raise ``MismatchError``.
        """
        flat = self._message.flat
        flat.copy_(torch.tensor(_words(mine), dtype=torch.float64))
        comm.allreduce_(self._message).wait()
        self._num_taken += mine is not None
        opening, fault = _read(flat.tolist(), comm.size)
        if fault:
            said = [_describe(one) for one in comm.allgather_object(mine)]
            raise MismatchError(f"{fault}; they are at: {by_rank(said)}")
        if opening.weights_differ:
            self._weights_differ(comm, opening, sample)
        elif opening.weights_compared:
            self._were_equal.add(opening.member)
        if opening.first_alike and comm.rank == 0:
            text = (
                f"all {comm.size} ranks have found the same gradients in their first step: do "
                f"they read the same samples? hvd.shard(loader) gives each rank its own part"
            )
            logs.warn_merged([[text]])
        if opening.unreached_differ and opening.member not in self._unreached_told:
            self._unreached_told.add(opening.member)
            names = comm.allgather_object(mine.unreached_names if mine else ())
            if comm.rank == 0:
                logs.warn_merged([[_unreached(names)]])
        return opening

    def take_part(self, comm: Communicator) -> bool:
        """Take part in the others' next step with nothing; False if there is none. Collective."""
        heard: list[Opening] = []
        start_on(comm, lambda: heard.append(self.exchange(comm, None))).wait()
        opening = heard[0]
        if not opening.num_active:
            return False
        member = self._members[opening.member]()
        assert member is not None, "other ranks step an optimizer that is gone here"
        member.stand_in(opening)
        return True

    def last_to_step(self, comm: Communicator) -> list[int]:
        """Return the ranks that have taken every step since all ranks had joined. Collective."""
        numbers: list[int] = []
        start_on(comm, lambda: numbers.extend(comm.allgather_object(self._num_taken))).wait()
        self._num_taken = 0
        return [rank for rank, number in enumerate(numbers) if number == max(numbers)]

    def hand_over(self) -> dict[int, Mapping[str, str]]:
        """Return, by optimizer, what its last step has left; once, at the end. Not collective.

        These are the number of steps, and hashes of all its weights but those to which somebody
        has written since: ranks may do so for a purpose, such as to test with averaged weights.
        """
        self._is_asked = False
        living = ((number, member()) for number, member in enumerate(self._members))
        found = {number: one.steps.left() for number, one in living if one is not None}
        return self._kept | found

    def keep(self, number: int, left: Mapping[str, str]) -> None:
        """Keep what an optimizer leaves that is about to go; that of the last few."""
        self._kept[number] = left
        while len(self._kept) > _MOST_KEPT:
            del self._kept[min(self._kept)]

    def were_equal(self, member: int) -> bool:
        """Say whether the ranks have once found their weights to be the same."""
        return member in self._were_equal

    def _weights_differ(
        self, comm: Communicator, opening: Opening, sample: Callable[[int], Mapping[str, str]]
    ) -> None:
        """Raise where replicas have parted; those that never were alike may take one step so."""
        member, step = opening.member, opening.step
        is_known = member in self._were_told
        is_error = opening.is_strict and (is_known or member in self._were_equal)
        if is_known and not is_error:
            return
        self._were_told.add(member)
        whose = _first_difference(comm.allgather_object(sample(step)))
        text = (
            f"the replicas have parted before step {step}: {whose}; change weights, learning "
            f"rates and optimizer state on all ranks alike, take equally many steps, or broadcast "
            f"what differs with hvd.broadcast_parameters()"
            if member in self._were_equal
            else f"the ranks train from different weights at step {step}: {whose}; call "
            f"hvd.broadcast_parameters(model.state_dict()) before the first step, and after "
            f"weights were loaded"
        )
        if is_error:
            raise MismatchError(
                f"{text}; HPCTRAIN_CHECK_WEIGHTS=warn goes on, for processors that round "
                f"differently"
            )
        if comm.rank == 0:
            logs.warn_merged([[text]])


def _words(mine: Announcement | None) -> list[float]:
    """Return what one rank adds to the message."""
    if mine is None:
        return [1.0, *[0.0] * (_NUM_WORDS - 1)]
    compared = [word for name in _COMPARED for word in _comparable(getattr(mine, name))]
    counted = [bool(getattr(mine, name)) for name in _COUNTED]
    loss = mine.weight * mine.loss if mine.weight else 0.0
    sums = [0.0, mine.weight, loss, peak_of(mine.weight)]
    return [*sums, *compared, *counted, *bits_of(mine.flags)]


def _comparable(value: int | None) -> tuple[int, int, int]:
    """Return what is added up to know whether a value is the same on all ranks that have one."""
    if value is None:
        return 0, 0, 0
    value &= _MASK
    return 1, value, value * value


def _all_equal(sums: Sequence[float]) -> bool:
    """Say whether the values of ``_comparable`` are equal: where the mean square is the mean's."""
    count, total, squares = map(int, sums)
    return count * squares == total * total


def _common(sums: Sequence[float]) -> int:
    return int(sums[1] // sums[0]) if sums[0] else 0


def _read(sums: Sequence[float], size: int) -> tuple[Opening, str]:
    """Return what all ranks have said, and what is wrong with it, if anything."""
    num_active, behind = size - int(sums[0]), _NUM_SUMS + 3 * len(_COMPARED)
    places = enumerate(_COMPARED)
    of = {name: sums[_NUM_SUMS + 3 * i :][:3] for i, name in places}
    num = dict(zip(_COUNTED, map(int, sums[behind:]), strict=False))
    opening = Opening(
        num_active=num_active,
        member=_common(of["member"]),
        step=_common(of["step"]),
        total_weight=sums[1] + (0 if num["is_weighted"] else size - num_active),
        mean_loss=sums[2] / sums[1] if sums[1] else math.nan,
        exponent=exponent_of_peaks(sums[3]),
        outdated=num["outdated"] > 0,
        new_sparse=num["new_sparse"] > 0,
        changed_alike=of["by_hand"][0] == num_active > 0 and _all_equal(of["by_hand"]),
        weights_compared=of["weights"][0] > 1,
        weights_differ=_all_equal(of["skipped"]) and not _all_equal(of["weights"]),
        is_strict=num["is_strict"] > 0,
        first_alike=of["first"][0] == size > 1 and _all_equal(of["first"]),
        unreached_differ=not _all_equal(of["unreached"]),
        is_new=num["is_new"] > 0,
        is_written=num["is_written"] > 0,
        is_early=num["is_early"] > 0,
        is_void=num["is_void"] > 0,
        synchronizes=num["synchronizes"] > 0,
        flags=flags_of(sums[behind + len(_COUNTED) :]),
    )
    return opening, _broken(of, num, opening, size)


def _broken(
    of: Mapping[str, Sequence[float]], num: Mapping[str, int], opening: Opening, size: int
) -> str:
    """Return the first rule of those for all ranks that they have broken; empty for none."""
    some = range(1, opening.num_active)
    is_broken = {
        "is_spoilt": num["is_spoilt"] > 0,
        "member": not _all_equal(of["member"]),
        "step": not _all_equal(of["step"]),
        "skipped": not (num["may_skip_alone"] or _all_equal(of["skipped"])),
        "repeats": num["repeats"] in some,
        "is_weighted": num["is_weighted"] in some,
        "outdated": num["outdated"] in some,
        "keeps_sums": num["keeps_sums"] > 0 and not opening.changed_alike,
        "changed_early": num["changed_early"] > 0,
        "replaced_sum": num["replaced_sum"] > 0,
        "needs_all": num["needs_all"] > 0 and opening.num_active < size,
        "settings": not _all_equal(of["settings"]),
        "own_changed": num["own_changed"] > 0,
        "is_stale": num["is_stale"] > 0,
    }
    rule = next((rule for rule, broken in is_broken.items() if broken), None)
    return _RULES[rule].format(num=num.get(rule), size=size) if rule else ""


SKIPPED = (
    "skip_step() in a step of averaged gradients must be called by all ranks or by none: one "
    "without samples calls optimizer.zero_grad() and optimizer.step(), as it needs the average too"
)
_RULES = {
    "member": "the optimizers of a backward must be reached in the same order on every rank",
    "step": "ranks must take the same steps: backward() and step() equally often, and one without "
    "samples step() alone; change .grad on all ranks or on none",
    "skipped": SKIPPED,
    "repeats": "a step without backward() must not take the gradients of the step before, which "
    "others have replaced: call step() equally often on every rank, and optimizer.zero_grad() "
    "where one has no samples",
    "is_weighted": "set_num_samples must be called by all ranks or by none, {num} of {size} have "
    "called it; call it on every rank, in every step",
    "outdated": "parameters must change on all ranks in the same step, they have changed on {num} "
    "of {size}: added, frozen, another dtype or layout",
    "keeps_sums": "with op=Sum, gradients that are changed between backward() and step() must "
    "become the same on every rank, and they differ; change the loss instead, or call "
    "optimizer.zero_grad() and set all gradients anew",
    "changed_early": "backward_passes_per_step averages gradients after the last pass, and they "
    "were changed after an earlier one; where passes are left over, call optimizer.synchronize() "
    "before you clip or change gradients",
    "replaced_sum": "with op=Sum, backward() adds to what was reduced, and that was replaced; "
    "call step() or optimizer.zero_grad() in between",
    "needs_all": 'a rank has joined, and op=Adasum and shard="node" need the steps of all ranks; '
    "join on all at once",
    "is_spoilt": "a step has failed in the middle on {num} of {size} ranks, and parameters that "
    "ranks of a node share are not to be trusted; start again from a checkpoint",
    "settings": 'with shard="node" every rank steps a part of each parameter, so learning rates, '
    "other settings of the optimizer and what clips must be the same on every rank; change them "
    "on all",
    "is_stale": 'with shard="node" torch must count what a program writes to parameters, and some '
    "steps ago {num} of {size} ranks have written by .data or numpy; write to the parameter "
    "itself under torch.no_grad(), and start again from a checkpoint",
    "own_changed": 'with shard="node" .grad is each rank\'s own gradient until step(), which must '
    "not be changed after backward(), nor kept for a step that counts other samples, nor after a "
    "step that was clipped or unscaled, and was on {num} of {size} ranks; clip the average with "
    "optimizer.clip_grad_norm_() or clip_grad_value_(), scale the loss, call zero_grad() between "
    "steps, or leave shard out",
}
"""What all ranks must do alike, the first one first."""


def _first_difference(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Name a parameter whose checksum differs, and the ranks."""
    for name, seen in differing(of_ranks).items():
        return f"the checksums of {name} are {seen}"
    return "the parameters that are compared are not the same"


def _describe(one: Announcement | None) -> str:
    if one is None:
        return "joined"
    notes = [f"step {one.step} of optimizer {one.member}"]
    notes += ["steps skipped"] * bool(one.skipped)
    notes += ["samples set"] * one.is_weighted + ["parameters changed"] * one.outdated
    notes += ["gradients changed by hand"] * (one.by_hand is not None)
    notes += ["gradients of the step before"] * one.repeats
    notes += [f"{one.replaced_sum}.grad replaced"] * bool(one.replaced_sum)
    notes += [f"{one.own_changed}.grad changed"] * bool(one.own_changed)
    notes += [f"settings {s:08x}" for s in (one.settings,) if s is not None]
    return ", ".join(notes)


def _unreached(of_ranks: Sequence[Sequence[str]]) -> str:
    """Say which ranks train what others do not."""
    common = set(of_ranks[0]).intersection(*of_ranks[1:])
    own = [[name for name in names if name not in common] for names in of_ranks]
    whose = [f"{names[0]} ({len(names)} in all)" if names else None for names in own]
    return (
        f"for {LONG} steps no backward has reached parameters that it reaches on other ranks, "
        f"{by_rank(whose)}; these ranks add zeros to the average, which is right if their loss "
        f"needs none of them or they have no samples; if their model has got other parameters, as "
        f"by load_state_dict(assign=True), it no longer trains: make the optimizer anew after "
        f"that, on all ranks"
    )
