"""The steps of one distributed optimizer: what a rank says before each, and leaves at the end."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch.nn import Parameter

from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.threaded import start_on
from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB
from hpctrain.gradients.sample_count import NUM_FLAGS
from hpctrain.gradients.sparse_gradients import GradientState
from hpctrain.gradients.step_header import StepAgreement, StepHeader, StepMessage, WeightFacts
from hpctrain.gradients.step_sync import LONG, Member, StepSync
from hpctrain.gradients.weight_sample import WeightSample, checksum_of
from hpctrain.runtime import world
from hpctrain.runtime.last_check import LastStates

PARTED = 1 << NUM_FLAGS
"""Is raised where the weights that were compared in the last message have parted."""

_FIRST_BYTES = 64 * KIB  # how much of each gradient is compared in the first step


class StepCounter:
    """The steps of one optimizer: what this rank says before each, and what it hears."""

    def __init__(
        self, check: StepSync, check_weights: str = "off", *, may_skip_alone: bool = False
    ) -> None:
        """Begin at step 0. Replicas that part are an ``error``, ``warn``, or nothing: ``off``.

        Those that have skipped other steps than the rest are not compared; that is an error but
        where ranks ``may_skip_alone``.
        """
        self.number: int | None = 0
        """Steps that were taken; None after state was loaded, until the next one tells."""
        self.skipped = 0  # checksum of their numbers
        self.flags = 0  # bits of this rank
        self.raised_flags = 0  # bits that any rank had in the last message; the same on every rank
        self.loss = 0.0  # of this rank's samples, where somebody asks for the mean
        self.mean_loss = math.nan  # of all samples, as of the last message; the same on every rank
        self.num_active = 0  # ranks that have not joined, as of the last message
        self.may_differ = False  # whether this rank's weights may be others: it tells none
        self._sample = WeightSample(())
        self._check, self._check_weights = check, check_weights
        self._may_skip_alone = may_skip_alone
        self._member, self._is_first = 0, True
        self._name = ""  # of what the last step leaves
        self._num_counted = 0
        """Steps with samples since it was last compared what backward reaches."""
        self._unreached: set[str] = set()  # parameters that none of them has reached

    def enter(self, member: Member) -> None:
        """Let the check know whose steps these are."""
        self._member = self._check.enter(member)
        if self._check.last_states is not None:
            self._name = self._check.last_states.enter((), self)

    def watch(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """Compare samples of these parameters from here on."""
        self._sample = WeightSample(parameters)

    def count_reached(self, unreached: Iterable[str]) -> None:
        """Count a step with samples; take the parameters that its backward has not reached."""
        self._num_counted += 1
        if self._num_counted == 1:
            self._unreached = set(unreached)
        elif self._unreached:
            self._unreached &= set(unreached)

    def skip(self) -> None:
        """Note that this rank does not take a step whose gradients it has averaged."""
        self.skipped = crc32(f"{self.skipped} {self.number}".encode())

    def end(self, *, is_own: bool = True) -> None:
        """Count a step that was taken; is it of others alone, this rank's weights are old."""
        if self.number is not None:
            self.number += 1
        if is_own:
            self._sample.mark(self.number)
        else:
            self._sample.unmark()

    def left(self, _: tuple[int, ...] = (), /, *, has_weights: bool = True) -> dict[str, str]:
        """Return what the last step has left, as text by name. Not collective.

        This is the number of steps, and hashes of the weights except those to which somebody has
        written since: a rank may do so on purpose, such as to test with averaged weights.
        """
        if self._check_weights == "off" or self.number is None:
            return {}
        is_known = self._check.were_equal(self._member) and not self.may_differ
        hashes = value_hashes(self._sample.as_left()) if is_known and has_weights else {}
        return {"the number of steps": str(self.number), **hashes}

    def __del__(self) -> None:
        """Keep what is compared at the end: a program may drop its optimizer before."""
        if self._check.last_states is not None:
            self._check.last_states.keep(self._name, self)

    def message(
        self,
        told: StepMessage,
        slots: Iterable[GradientState] = (),
        *,
        weight: float = 1.0,
        needs_all: bool = False,
    ) -> StepMessage:
        """Return what is told, with the header and what can be compared of the replica."""
        step, is_first, self._is_first = self.number, self._is_first, False
        is_fresh = not told.gradients.outdated
        compares = self._check_weights != "off" and not self.may_differ and step is not None
        names = None
        if step is not None and step % LONG == 0 and self._num_counted >= LONG and is_fresh:
            names = tuple(sorted(self._unreached))
            self._num_counted = 0
        weights = WeightFacts(
            weights=self._sample.checksum(step or 0) if compares and is_fresh else None,
            first=_checksum_of_first(slots) if is_first and weight else None,
            unreached=None if names is None else crc32(repr(names).encode()),
            unreached_names=names or (),
            is_strict=self._check_weights == "error",
        )
        header = self._header(weight=weight, needs_all=needs_all, loss=self.loss, flags=self.flags)
        return told._replace(header=header, weights=weights)

    def _header(self, **facts: Any) -> StepHeader:
        return StepHeader(
            member=self._member,
            step=self.number,
            skipped=self.skipped,
            may_skip_alone=self._may_skip_alone,
            **facts,
        )

    def open(self, comm: Communicator, mine: StepMessage) -> StepAgreement:
        """Return what all ranks say together, on the communicator's thread. Collective.

        After an error the number of steps is that of others who go on.
        """
        try:
            return self._check.exchange(comm, mine, self._sample.by_name)
        except BaseException:
            self.number = None
            raise

    def confirm(self, comm: Communicator) -> None:
        """Raise ``MismatchError`` on all ranks unless all have taken the same steps. Collective.

        A rank whose gradients were changed after ``backward()`` averages them again while the
        other ranks finish the step; its message is received here.
        """
        mine = StepMessage(self._header())
        start_on(comm, self.open, comm, mine).wait()

    def take(self, agreement: StepAgreement) -> None:
        """Take over what all ranks have in common."""
        self.raised_flags = agreement.flags | PARTED * agreement.weights.differ
        self.mean_loss = agreement.mean_loss
        self.num_active = agreement.num_active
        self.number = agreement.step if self.number is None else self.number


def _checksum_of_first(slots: Iterable[GradientState]) -> int | None:
    """Return a checksum of this rank's own gradients; None if they are zeros, or not finite."""
    total, is_zero = 0, True
    for slot in slots:
        grad = slot.parameter.grad
        if grad is not None and not grad.is_sparse:
            start = grad.detach().reshape(-1)[: _FIRST_BYTES // grad.itemsize].cpu()
            total = checksum_of(start, total)
            is_zero = is_zero and not start.any()
            if not start.isfinite().all():
                return None  # every NaN is like the other
    return None if is_zero else total


def steps_over(comm: Communicator) -> StepCounter:
    """Return the steps of an optimizer over these ranks. Collective for the first one."""
    if comm.size == 1:
        return StepCounter(StepSync(comm))
    return StepCounter(check_over(comm), world.current().settings.check_weights)


def check_over(comm: Communicator) -> StepSync:
    """Return what compares the steps of these ranks. Collective for the first one."""
    checks = world.current().step_checks
    if comm not in checks:
        checks[comm] = StepSync(comm, LastStates())
    return cast("StepSync", checks[comm])
