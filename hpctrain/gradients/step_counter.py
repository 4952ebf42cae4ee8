"""``StepCounter``, which counts the steps of an optimizer and builds its step messages."""

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
"""Flag that is set in ``raised_flags`` if the compared weights differ between ranks."""

_FIRST_BYTES = 64 * KIB  # bytes of each gradient that the first step compares


class UnreachedParameters:
    """Collects the parameters that had no gradient in any step since the last comparison."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._names: set[str] = set()

    def count(self, unreached: Iterable[str]) -> None:
        """Count a step in which the parameters ``unreached`` had no gradient."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._names = set(unreached)
        elif self._names:
            self._names.intersection_update(unreached)

    def take(self) -> tuple[str, ...] | None:
        """Return the names and reset the object; return None after fewer than ``LONG`` steps."""
        if self._num_steps < LONG:
            return None
        self._num_steps = 0
        return tuple(sorted(self._names))


class StepCounter:
    """Counts the steps of one optimizer and builds the step message of this rank.

    Args:
        check: comparison of the ranks at the start of each step.
        check_weights: reaction to replicas that differ: ``"error"``, ``"warn"`` or ``"off"``.
        may_skip_alone: whether ranks may skip different steps; if not, a difference is an error.
            The weights of ranks that have skipped different steps are not compared.
    """

    def __init__(
        self, check: StepSync, check_weights: str = "off", *, may_skip_alone: bool = False
    ) -> None:
        self.number: int | None = 0
        """Number of steps taken; None between loading a state and the next agreement."""
        self.skipped = 0  # checksum of the numbers of the skipped steps
        self.flags = 0  # bits that this rank raises
        self.raised_flags = 0  # bits that any rank raised in the last message; same on every rank
        self.loss = 0.0  # mean loss over the samples of this rank
        self.mean_loss = math.nan  # over the samples of all ranks in the last message
        self.num_active = 0  # ranks that had not joined at the last message
        self.may_differ = False  # whether this rank's weights may differ, and are not compared
        self._sample = WeightSample(())
        self._check, self._check_weights = check, check_weights
        self._may_skip_alone = may_skip_alone
        self._member, self._is_first = 0, True
        self._name = ""  # key of this optimizer in ``last_states``
        self.unreached = UnreachedParameters()

    def enter(self, member: Member) -> None:
        """Register an optimizer with ``StepSync``."""
        self._member = self._check.enter(member)
        if self._check.last_states is not None:
            self._name = self._check.last_states.enter((), self.left)

    def watch(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """Set the parameters whose samples are compared in later steps."""
        self._sample = WeightSample(parameters)

    def skip(self) -> None:
        """Record that this rank skips a step after its gradients were averaged."""
        self.skipped = crc32(f"{self.skipped} {self.number}".encode())

    def end(self, *, is_own: bool = True) -> None:
        """Count a finished step.

        Args:
            is_own: False on a rank that has joined and only contributed zeros, so that its weights
                are outdated.
        """
        if self.number is not None:
            self.number += 1
        if is_own:
            self._sample.mark(self.number)
        else:
            self._sample.unmark()

    def left(self, _: tuple[int, ...] = (), /, *, has_weights: bool = True) -> dict[str, str]:
        """Return the number of steps and hashes of the weights after the last step.

        Not collective. Weights that were written after the last step are omitted, because a
        program may change weights on one rank, for example to evaluate averaged weights.
        """
        if self._check_weights == "off" or self.number is None:
            return {}
        is_known = self._check.were_equal(self._member) and not self.may_differ
        hashes = value_hashes(self._sample.as_left()) if is_known and has_weights else {}
        return {"the number of steps": str(self.number), **hashes}

    def __del__(self) -> None:
        """Store the final state for the comparison at shutdown."""
        if self._check.last_states is not None:
            self._check.last_states.keep(self._name, self.left)

    def message(
        self,
        message: StepMessage,
        slots: Iterable[GradientState] = (),
        *,
        weight: float = 1.0,
        needs_all: bool = False,
    ) -> StepMessage:
        """Return ``message`` with the header and the facts about weights added.

        Args:
            message: message of the exchange, without these two records.
            slots: gradients of this rank; their checksum is sent in the first step, so that the
                ranks compare their first gradients.
            weight: weight of this rank's gradient.
            needs_all: whether it is an error if another rank has called ``join``.
        """
        step, is_first, self._is_first = self.number, self._is_first, False
        is_fresh = not message.gradients.outdated
        compares = self._check_weights != "off" and not self.may_differ and step is not None
        is_due = step is not None and step % LONG == 0 and is_fresh
        names = self.unreached.take() if is_due else None
        weights = WeightFacts(
            weights=self._sample.checksum(step or 0) if compares and is_fresh else None,
            first=_checksum_of_first(slots) if is_first and weight else None,
            unreached=None if names is None else crc32(repr(names).encode()),
            unreached_names=names or (),
            is_strict=self._check_weights == "error",
        )
        header = self._header(weight=weight, needs_all=needs_all, loss=self.loss, flags=self.flags)
        return message._replace(header=header, weights=weights)

    def _header(self, **facts: Any) -> StepHeader:
        return StepHeader(
            member=self._member,
            step=self.number,
            skipped=self.skipped,
            may_skip_alone=self._may_skip_alone,
            **facts,
        )

    def open(self, comm: Communicator, mine: StepMessage) -> StepAgreement:
        """Exchange step messages, and return the agreement of all ranks. Collective.

        Runs on the communicator's thread. After an error, the next agreement sets the number of
        steps.
        """
        try:
            return self._check.exchange(comm, mine, self._sample.by_name)
        except BaseException:
            self.number = None
            raise

    def confirm(self, comm: Communicator) -> None:
        """Raise ``MismatchError`` on all ranks unless all have taken the same steps. Collective.

        If the program changes gradients of only one rank after ``backward()``, this rank averages
        its gradients again, while the other ranks finish the step and call this method. Then the
        messages of both calls are exchanged, so that all ranks raise the error.
        """
        mine = StepMessage(self._header())
        start_on(comm, self.open, comm, mine).wait()

    def take(self, agreement: StepAgreement) -> None:
        """Store flags, mean loss and number of steps of the agreement."""
        self.raised_flags = agreement.flags | PARTED * agreement.weights.differ
        self.mean_loss = agreement.mean_loss
        self.num_active = agreement.num_active
        self.number = agreement.step if self.number is None else self.number


def _checksum_of_first(slots: Iterable[GradientState]) -> int | None:
    """Return a checksum of this rank's gradients; None if all are zero or any is not finite."""
    total, is_zero = 0, True
    for slot in slots:
        grad = slot.parameter.grad
        if grad is not None and not grad.is_sparse:
            start = grad.detach().reshape(-1)[: _FIRST_BYTES // grad.itemsize].cpu()
            total = checksum_of(start, total)
            is_zero = is_zero and not start.any()
            if not start.isfinite().all():
                return None  # gradients that are all NaN would be equal on all ranks
    return None if is_zero else total


def steps_over(comm: Communicator) -> StepCounter:
    """Return a step counter for the ranks of ``comm``. The first call is collective."""
    if comm.size == 1:
        return StepCounter(StepSync(comm))
    return StepCounter(check_over(comm), world.current().settings.check_weights)


def check_over(comm: Communicator) -> StepSync:
    """Return the ``StepSync`` of ``comm``. The first call is collective."""
    checks = world.current().step_checks
    if comm not in checks:
        checks[comm] = StepSync(comm, LastStates())
    return cast("StepSync", checks[comm])
