"""The step message, in which ranks report facts before a step, and the resulting agreement.

The message contains a few numbers per fact and is summed over the ranks: the ranks with a fact are
counted, and values are compared by their sum and their sum of squares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from hpctrain.gradients.sample_count import (
    NUM_FLAGS,
    bits_of,
    exponent_of_peaks,
    flags_of,
    peak_of,
)

_BITS = 20
"""Compared bits of a value. A square is sent as two halves of ``_BITS`` bits, so that float64 adds
values and squares of up to 2^33 ranks exactly."""
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHeader:
    """Facts about the step that a rank begins, for any exchange of a ``DistributedOptimizer``."""

    member: int = 0  # index of the optimizer; see ``StepSync.enter``
    step: int | None = None  # number of steps taken; None, not compared, after loading a state
    skipped: int = 0
    """Checksum of the steps that this rank skipped after their gradients were averaged."""
    may_skip_alone: bool = False  # whether ``skipped`` can differ between ranks
    needs_all: bool = False  # whether it is an error if another rank has called ``join``
    weight: float = 1.0  # weight of this rank's gradient
    loss: float = 0.0  # mean loss over the samples of this rank
    flags: int = 0  # bits that this rank raises


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFacts:
    """Facts about the gradients that the step of a rank uses."""

    is_weighted: bool = False  # whether ``set_num_samples`` has set ``weight``
    outdated: bool = False
    """Whether the parameters no longer match the buckets."""
    new_sparse: bool = False  # whether a gradient that was dense so far is sparse
    repeats: bool = False
    """Whether gradients of the previous step are present without a later backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageFacts:
    """Changes that the program has made to gradients before the average."""

    program_changes: int | None = None
    """Checksum of reduced gradients that the program has changed or dropped; None if unchanged."""
    keeps_sums: bool = False
    """For ``op=Sum`` with ``program_changes``: whether any gradient remains, without a
    ``zero_grad()`` after the reduction."""
    changed_early: bool = False
    """Whether the program has changed gradients before the last backward pass of the step."""
    replaced_sum: str = ""
    """Name of a parameter whose sum was replaced before backward added a gradient, or empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedFacts:
    """Facts about a step with ``shard="node"``."""

    settings: int | None = None
    """Checksum of the settings of the optimizer; None for no comparison."""
    own_changed: str = ""
    """Name of a parameter whose local gradient the program has changed; empty for none."""
    is_written: bool = False
    """Whether the program has changed parameters that the ranks of a node share."""
    is_new: bool = False  # whether gradients were computed after the last message of this step
    is_spoilt: bool = False  # whether a step failed midway, so that no rank has valid weights
    is_stale: bool = False  # whether writes without a new version were detected some steps late
    is_early: bool = False  # whether sums between nodes are in flight
    is_void: bool = False  # whether gradients have changed after such sums were started
    synchronizes: bool = False  # whether ``synchronize()`` sends this message, before ``step()``


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFacts:
    """Facts about the weights of a rank, for the comparison of replicas."""

    weights: int | None = None  # checksum of a sample of the weights; None for no comparison
    first: int | None = None
    """Checksum of the gradients of the first step; None in later steps, or if all are zero."""
    unreached: int | None = None  # checksum of ``unreached_names``; None for no comparison
    unreached_names: tuple[str, ...] = ()
    """Parameters without a gradient on this rank in the last ``LONG`` steps."""
    is_strict: bool = True  # whether replicas that differ are an error


class StepMessage(NamedTuple):
    """Facts of one rank before a step; each kind of exchange sets the records it uses."""

    header: StepHeader = StepHeader()
    gradients: GradientFacts = GradientFacts()
    averages: AverageFacts = AverageFacts()
    sharded: ShardedFacts = ShardedFacts()
    weights: WeightFacts = WeightFacts()


class WeightAgreement(NamedTuple):
    """Result of the comparison of weights; the same on every rank."""

    are_compared: bool
    differ: bool  # whether checksums differ between the ranks that have reported one
    is_strict: bool
    first_is_equal: bool  # whether all ranks, two or more, have bitwise equal first gradients
    unreached_differ: bool
    """Whether backward has reached different parameters on some ranks for ``LONG`` steps."""


class ShardedAgreement(NamedTuple):
    """Facts of ``ShardedFacts`` that are true on one or more ranks."""

    is_written: bool
    is_new: bool
    is_early: bool
    is_void: bool
    synchronizes: bool


class StepAgreement(NamedTuple):
    """Combined facts of all ranks; the same on every rank."""

    num_active: int  # ranks that have not joined; see ``hpctrain.join``
    member: int
    step: int
    flags: int  # bits that any rank has raised
    total_weight: float
    exponent: int  # exponent of the smallest power of two that is at least the largest weight
    mean_loss: float  # mean loss over all samples; NaN without samples
    outdated: bool
    new_sparse: bool
    changed_equally: bool
    """Whether all ranks have made the same changes to reduced gradients."""
    weights: WeightAgreement
    sharded: ShardedAgreement


_COMPARED = (
    *("header.member", "header.step", "header.skipped", "averages.program_changes"),
    *("weights.weights", "weights.first", "weights.unreached", "sharded.settings"),
)
"""Facts that must be equal on all ranks that report a value."""
_COUNTED = (
    *("gradients.is_weighted", "gradients.outdated", "gradients.new_sparse"),
    *("averages.keeps_sums", "averages.changed_early", "averages.replaced_sum"),
    *("gradients.repeats", "header.needs_all", "header.may_skip_alone", "weights.is_strict"),
    *("sharded.own_changed", "sharded.is_written", "sharded.is_new", "sharded.is_spoilt"),
    *("sharded.is_stale", "sharded.is_early", "sharded.is_void", "sharded.synchronizes"),
)
"""Facts for which the ranks that report True or a name are counted."""
_compared_of, _counted_of = attrgetter(*_COMPARED), attrgetter(*_COUNTED)
_NAMES_COMPARED = [name.rpartition(".")[2] for name in _COMPARED]
_NAMES_COUNTED = [name.rpartition(".")[2] for name in _COUNTED]
_NUM_SUMS = 4  # joined ranks, weights, losses times weights, peaks of weights
_NUM_BEFORE = _NUM_SUMS + 4 * len(_COMPARED)
NUM_WORDS = _NUM_BEFORE + len(_COUNTED) + NUM_FLAGS


def words_of(mine: StepMessage | None) -> list[float]:
    """Encode the message of one rank as numbers, which are summed over the ranks.

    ``mine`` is None on a rank that has joined.
    """
    if mine is None:
        return [1.0, *[0.0] * (NUM_WORDS - 1)]
    weight, loss = mine.header.weight, mine.header.loss
    sums = [0.0, weight, weight * loss if weight else 0.0, peak_of(weight)]
    compared = [word for value in _compared_of(mine) for word in _comparable(value)]
    return [*sums, *compared, *map(bool, _counted_of(mine)), *bits_of(mine.header.flags)]


def _comparable(value: int | None) -> tuple[int, int, int, int]:
    """Return count, value and both halves of the square; ``_all_equal`` compares their sums."""
    if value is None:
        return 0, 0, 0, 0
    value &= _MASK
    return 1, value, *divmod(value * value, 1 << _BITS)


def _all_equal(sums: Sequence[float]) -> bool:
    """Return whether all values are equal: the mean of squares is the square of the mean."""
    count, total, high, low = map(int, sums)
    return count * ((high << _BITS) + low) == total * total


def _common(sums: Sequence[float]) -> int:
    return int(sums[1] // sums[0]) if sums[0] else 0


def agreement_of(sums: Sequence[float], size: int) -> tuple[StepAgreement, str]:
    """Decode the sums of ``words_of`` over the ranks.

    Returns:
        The agreement, and the message of the first rule that the ranks violate, or ``""``.
    """
    num_active = size - int(sums[0])
    of = {name: sums[_NUM_SUMS + 4 * i :][:4] for i, name in enumerate(_NAMES_COMPARED)}
    num = dict(zip(_NAMES_COUNTED, map(int, sums[_NUM_BEFORE:]), strict=False))
    agreement = StepAgreement(
        num_active=num_active,
        member=_common(of["member"]),
        step=_common(of["step"]),
        flags=flags_of(sums[_NUM_BEFORE + len(_COUNTED) :]),
        total_weight=sums[1] + (0 if num["is_weighted"] else size - num_active),
        exponent=exponent_of_peaks(sums[3]),
        mean_loss=sums[2] / sums[1] if sums[1] else math.nan,
        outdated=num["outdated"] > 0,
        new_sparse=num["new_sparse"] > 0,
        changed_equally=of["program_changes"][0] == num_active > 0
        and _all_equal(of["program_changes"]),
        weights=WeightAgreement(
            are_compared=of["weights"][0] > 1,
            differ=_all_equal(of["skipped"]) and not _all_equal(of["weights"]),
            is_strict=num["is_strict"] > 0,
            first_is_equal=of["first"][0] == size > 1 and _all_equal(of["first"]),
            unreached_differ=not _all_equal(of["unreached"]),
        ),
        sharded=ShardedAgreement(*(num[name] > 0 for name in ShardedAgreement._fields)),
    )
    return agreement, _broken(of, num, agreement, size)


def _broken(
    of: Mapping[str, Sequence[float]], num: Mapping[str, int], agreement: StepAgreement, size: int
) -> str:
    """Return the message of the first rule that the ranks violate, or an empty string."""
    some = range(1, agreement.num_active)
    is_broken = {
        "is_spoilt": num["is_spoilt"] > 0,
        "member": not _all_equal(of["member"]),
        "step": not _all_equal(of["step"]),
        "skipped": not (num["may_skip_alone"] or _all_equal(of["skipped"])),
        "repeats": num["repeats"] in some,
        "is_weighted": num["is_weighted"] in some,
        "outdated": num["outdated"] in some,
        "keeps_sums": num["keeps_sums"] > 0 and not agreement.changed_equally,
        "changed_early": num["changed_early"] > 0,
        "replaced_sum": num["replaced_sum"] > 0,
        "needs_all": num["needs_all"] > 0 and agreement.num_active < size,
        "settings": not _all_equal(of["settings"]),
        "own_changed": num["own_changed"] > 0,
        "is_stale": num["is_stale"] > 0,
    }
    rule = next((rule for rule, broken in is_broken.items() if broken), None)
    return _RULES[rule].format(num=num.get(rule), size=size) if rule else ""


SKIPPED = (
    "skip_step() in a step of averaged gradients must be called by all ranks or by none, but the "
    "ranks have skipped different steps; on a rank without samples call optimizer.zero_grad() and "
    "optimizer.step()"
)
_RULES = {
    "member": "several optimizers must begin their steps in the same order on every rank, but the "
    "order differs; build the same model and optimizers on every rank",
    "step": "ranks must take the same steps, but the numbers of steps differ; call backward() and "
    "step() equally often on every rank, step() alone on a rank without samples, and change .grad "
    "on all ranks or on none",
    "skipped": SKIPPED,
    "repeats": "a step without backward() must not use gradients of the previous step, but {num} "
    "of {size} ranks do; call step() equally often on every rank, and optimizer.zero_grad() on "
    "ranks without samples",
    "is_weighted": "set_num_samples must be called by all ranks or by none, but {num} of {size} "
    "ranks have called it; call set_num_samples on every rank, in every step",
    "outdated": "parameters must change on all ranks in the same step, but have changed on {num} "
    "of {size} ranks; add, freeze or convert parameters on all ranks",
    "keeps_sums": "with op=Sum, gradients that are changed between backward() and step() must "
    "become the same on every rank, but differ; change the loss instead, or call "
    "optimizer.zero_grad() and set all gradients again",
    "changed_early": "with backward_passes_per_step gradients must not be changed before the "
    "last pass, but were changed after an earlier pass; if a step has fewer passes, call "
    "optimizer.synchronize() before you clip or change gradients",
    "replaced_sum": "with op=Sum, a reduced gradient must not be replaced before backward() adds "
    "to the gradient, but was replaced on {num} of {size} ranks; call step() or "
    "optimizer.zero_grad() before backward()",
    "needs_all": 'all ranks must take the steps of op=Adasum and shard="node", but a rank has '
    "joined; call join() on all ranks after the same step",
    "is_spoilt": "shared parameters must not be used after a failed step, but a step has failed "
    "midway on {num} of {size} ranks; restart from a checkpoint",
    "settings": 'with shard="node" learning rates, other settings of the optimizer and gradient '
    "clipping must be the same on every rank, but differ; change them on all ranks",
    "is_stale": 'with shard="node" parameters must not be written through .data or numpy, but '
    "were on {num} of {size} ranks some steps ago; write to the parameter itself under "
    "torch.no_grad(), and restart from a checkpoint",
    "own_changed": 'with shard="node" .grad is local until step() and must not be changed after '
    "backward(), nor reused in a step with another sample count or after a step that was clipped "
    "or unscaled, but was changed or reused on {num} of {size} ranks; clip the average with "
    "optimizer.clip_grad_norm_() or clip_grad_value_(), scale the loss, call zero_grad() between "
    "steps, or leave shard out",
}
"""Error message of each rule that all ranks must follow."""


def describe(one: StepMessage | None) -> str:
    """Return a description of the step that a rank begins, for an error message."""
    if one is None:
        return "joined"
    header, gradients, averages, sharded = one[:4]
    notes = {
        f"step {header.step} of optimizer {header.member}": True,
        "steps skipped": header.skipped,
        "samples set": gradients.is_weighted,
        "parameters changed": gradients.outdated,
        "gradients changed": averages.program_changes is not None,
        "gradients of the previous step": gradients.repeats,
        f"{averages.replaced_sum}.grad replaced": averages.replaced_sum,
        f"{sharded.own_changed}.grad changed": sharded.own_changed,
        f"settings {sharded.settings or 0:08x}": sharded.settings is not None,
    }
    return ", ".join(note for note, holds in notes.items() if holds)
