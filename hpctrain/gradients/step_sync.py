"""Comparison of the ranks at the start of each step, before gradients are sent.

One small all-reduce per step, which also sends flags and sample counts, detects ranks that take
different steps, reduce different optimizers or hold different weights. All ranks raise the error.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hpctrain.comm.agreement import differing, gather_distinct
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.threaded import start_on
from hpctrain.core import logs
from hpctrain.core.errors import MismatchError
from hpctrain.core.units import by_rank
from hpctrain.gradients.step_header import (
    NUM_WORDS,
    StepAgreement,
    StepMessage,
    agreement_of,
    describe,
    words_of,
)
from hpctrain.runtime.last_check import LastStates

LONG = 16  # steps between two comparisons of the parameters without a gradient


class Member(Protocol):
    """Optimizer whose steps begin with a step message."""

    def contribute_zeros(self, agreement: StepAgreement) -> None:
        """Contribute zeros to the step of ``agreement``, on a rank that has joined. Collective."""


class StepSync:
    """Compares the ranks at the start of each step of an optimizer.

    All optimizers with the same communicator share one ``StepSync``. The constructor is
    collective.

    Args:
        comm: ranks to synchronize.
        last_states: collection of final states for the comparison at shutdown; None for no
            comparison.
    """

    def __init__(self, comm: Communicator, last_states: LastStates | None = None) -> None:
        self.last_states = last_states
        self._message = comm.new_bucket(NUM_WORDS, torch.float64)
        self._members: list[weakref.ref[Member]] = []
        self._were_equal: set[int] = set()
        self._were_reported: set[int] = set()
        self._unreached_reported: set[int] = set()
        self._num_taken = 0  # own steps of this rank since all ranks had joined

    def enter(self, member: Member) -> int:
        """Register an optimizer and return its index. Called in the same order on all ranks."""
        self._members.append(weakref.ref(member))
        return len(self._members) - 1

    def exchange(
        self,
        comm: Communicator,
        mine: StepMessage | None,
        sample: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> StepAgreement:
        """Sum the step messages of all ranks, and return the agreement. Collective.

        Runs on the communicator's thread.

        Args:
            comm: ranks to synchronize.
            mine: message of this rank; None if the rank has joined.
            sample: function of a step that returns the checksums of the weights that are compared
                in this step, by name.

        Raises:
            MismatchError: the ranks do not begin the same step; raised on all ranks.
        """
        flat = self._message.flat
        flat.copy_(torch.tensor(words_of(mine), dtype=torch.float64))
        comm.allreduce_(self._message).wait()
        self._num_taken += mine is not None
        agreement, fault = agreement_of(flat.tolist(), comm.size)
        if fault:
            descriptions = [describe(one) for one in comm.allgather_object(mine)]
            raise MismatchError(f"{fault}; the ranks are at: {by_rank(descriptions)}")
        if agreement.weights.differ:
            self._weights_differ(comm, agreement, sample)
        elif agreement.weights.are_compared:
            self._were_equal.add(agreement.member)
        if agreement.weights.first_is_equal and comm.rank == 0:
            text = (
                f"ranks should read different samples, but all {comm.size} ranks have computed "
                f"the same gradients in their first step; divide the batches of the DataLoader by "
                f"`loader = hvd.shard_data(loader, optimizer)` after the optimizer is wrapped"
            )
            logs.warn_merged([[text]])
        if agreement.weights.unreached_differ and agreement.member not in self._unreached_reported:
            self._unreached_reported.add(agreement.member)
            names = comm.allgather_object(mine.weights.unreached_names if mine else ())
            if comm.rank == 0:
                logs.warn_merged([[_unreached(names)]])
        return agreement

    def take_part(self, comm: Communicator) -> bool:
        """Contribute zeros to a step of other ranks; return False if all joined. Collective."""
        agreements: list[StepAgreement] = []
        start_on(comm, lambda: agreements.append(self.exchange(comm, None))).wait()
        agreement = agreements[0]
        if not agreement.num_active:
            return False
        member = self._members[agreement.member]()
        assert member is not None, "other ranks step an optimizer that is gone here"
        member.contribute_zeros(agreement)
        return True

    def last_to_step(self, comm: Communicator) -> list[int]:
        """Return the ranks that took the most steps since all ranks had joined. Collective."""
        numbers: list[int] = []
        start_on(comm, lambda: numbers.extend(comm.allgather_object(self._num_taken))).wait()
        self._num_taken = 0
        return [rank for rank, number in enumerate(numbers) if number == max(numbers)]

    def were_equal(self, member: int) -> bool:
        """Return whether an earlier comparison has found equal weights on all ranks."""
        return member in self._were_equal

    def _weights_differ(
        self,
        comm: Communicator,
        agreement: StepAgreement,
        sample: Callable[[int], Mapping[str, str]],
    ) -> None:
        """Raise or warn that the weights of the ranks differ. Collective.

        If the weights were never equal, the first call warns and the next call raises.
        """
        member, step = agreement.member, agreement.step
        is_known = member in self._were_reported
        is_error = agreement.weights.is_strict and (is_known or member in self._were_equal)
        if is_known and not is_error:
            return
        self._were_reported.add(member)
        samples = gather_distinct(comm.allgather_object, dict(sample(step)))
        whose = _first_difference([found or {} for found in samples])
        text = (
            f"replicas must be equal on every rank, but differ before step {step}: {whose}; "
            f"change weights, learning rates and optimizer state identically on all ranks, take "
            f"equally many steps, or call hvd.broadcast_parameters()"
            if member in self._were_equal
            else f"all ranks must start from the same weights, but train from different weights "
            f"at step {step}: {whose}; call hvd.broadcast_parameters(model.state_dict()) before "
            f"the first step, and after weights were loaded"
        )
        if is_error:
            raise MismatchError(
                f"{text}; for processors that round differently, set HPCTRAIN_CHECK_WEIGHTS=warn"
            )
        if comm.rank == 0:
            logs.warn_merged([[text]])


def _first_difference(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Return a text with the first parameter that differs, and its checksums by rank."""
    for name, seen in differing(of_ranks).items():
        return f"the checksums of {name} are {seen}"
    return "the ranks have compared different parameters"


def _unreached(of_ranks: Sequence[Sequence[str]]) -> str:
    """Return a warning with the parameters that backward reaches on only some ranks."""
    common = set(of_ranks[0]).intersection(*of_ranks[1:])
    own = [[name for name in names if name not in common] for names in of_ranks]
    whose = [f"{names[0]} ({len(names)} in all)" if names else None for names in own]
    return (
        "backward should reach the same parameters on all ranks, but has not reached some "
        f"parameters for {LONG} steps: {by_rank(whose)}; these ranks add zeros to the average, "
        "which is correct if their loss does not use these parameters or they have no samples; "
        "if parameters were replaced, as by load_state_dict(assign=True), make the optimizer "
        "again afterwards, on all ranks"
    )
