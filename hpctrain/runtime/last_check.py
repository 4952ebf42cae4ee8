"""Comparison of models and optimizers between the ranks at the end of a program.

Before each step the ranks compare the states after the previous step. This module compares the
states after the last step.
"""

import hashlib
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.comm.agreement import differing, gather_distinct
from hpctrain.comm.owner import Owner
from hpctrain.core import logs
from hpctrain.core.python_compat import collection

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.liveness import Gather
    from hpctrain.runtime.process_set_table import ProcessSets

Left = tuple[Sequence[int], Mapping[str, str]]
"""Ranks of an optimizer, and the state after the last step on this rank: a text for each name."""
_COLLECTION = collection()
_MAX_KEPT = 16  # maximum number of stored states of deleted models


StateOf = Callable[..., Mapping[str, str]]
"""Function that returns the state that ranks compare: a text for each name. Not collective.

The function is a method, either of a sharded model or of the object that counts the steps of an
optimizer. With the argument ``has_weights=False`` the state has only the numbers of steps.
"""


class LastStates:
    """States of models or optimizers after the last step, with the ranks that compare them.

    An optimizer or model that is deleted before the end of the program calls ``keep``.
    """

    def __init__(self) -> None:
        self._num_of = Counter[tuple[int, ...]]()
        self._registered: dict[str, tuple[tuple[int, ...], weakref.WeakMethod[StateOf]]] = {}
        self._kept: dict[str, Left] = {}
        self._owner = Owner()

    def enter(self, ranks: tuple[int, ...], state_of: StateOf) -> str:
        """Register a model or optimizer and return a name for it. Local.

        All ``ranks`` register their models and optimizers in the same order.
        """
        name = f"{ranks} {self._num_of[ranks]}"
        self._num_of[ranks] += 1
        self._registered[name] = ranks, weakref.WeakMethod(state_of)
        return name

    def keep(self, name: str, state_of: StateOf) -> None:
        """Store the state of a model or optimizer that is being deleted; keep the last 16 states.

        During a garbage collection only the numbers of steps are stored, since each rank collects
        at a different time.
        """
        if name in self._registered and self._owner.is_here:  # not in a forked child
            ranks, _ = self._registered.pop(name)
            has_weights = not _COLLECTION.is_running
            self._kept[name] = ranks, state_of(ranks, has_weights=has_weights)
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]

    def take_all(self) -> dict[str, Left]:
        """Return all states by name; called once, at the end. Not collective."""
        registered, self._registered = self._registered, {}
        found = {name: (ranks, method()) for name, (ranks, method) in registered.items()}
        states = {name: (ranks, of(ranks)) for name, (ranks, of) in found.items() if of}
        return self._kept | states


class OpenedSteps(Protocol):
    """Interface of the step protocol that the optimizers of one communicator share."""

    last_states: LastStates | None
    """State of each optimizer after its last step; None if states are not compared."""

    def take_part(self, comm: "Communicator") -> bool:
        """Take part in the next step of the other ranks, without samples. Collective.

        Returns:
            False if all ranks have joined, so that there is no next step.
        """

    def last_to_step(self, comm: "Communicator") -> Sequence[int]:
        """Return the ranks that took the most steps since all ranks had joined. Collective."""


def compare(
    sets: "ProcessSets",
    step_checks: "Mapping[Communicator, OpenedSteps]",
    last_states: LastStates,
    check_weights: str,
    gather: "Gather",
) -> str:
    """Return a message about differing states if differences are an error, else "". Collective.

    If differences are no error, rank 0 logs the message. A rank that handles an exception compares
    no states. If named operations have failed on some rank, the controllers of named operations
    are shut down on all ranks.
    """
    sets.shut_down_broken(gather)
    ranks = sets.by_number()
    mine: dict[str, Left] = {
        f"{number}.{optimizer}": (ranks[number], values)
        for number, comm in sets.communicators().items()
        if comm in step_checks and (states := step_checks[comm].last_states)
        for optimizer, (_, values) in states.take_all().items()
    }
    mine |= last_states.take_all()
    if sys.exc_info()[0] is not None:
        mine = {}
    is_strict = check_weights == "error"
    fault, is_error = _difference(gather, mine, is_strict=is_strict)
    if fault and not is_error and sets.everyone.rank == 0:
        logs.warn_merged([[fault]])
    return fault if is_error else ""


def _difference(
    gather: "Gather", mine: Mapping[str, Left], *, is_strict: bool
) -> tuple[str, bool]:
    """Return a message about differing states, and True if differences are an error. Collective.

    The message is empty if no states differ. Differences are an error if ``is_strict`` is true on
    any rank.

    The comparison skips an optimizer, or a name in its state, that is missing on some rank of the
    optimizer. If all states are equal, each rank sends one small message. Otherwise a few distinct
    states are also sent, each by only one of the ranks that have the state.
    """
    digests = {one: hashlib.sha256(_packed(left)).hexdigest()[:16] for one, left in mine.items()}

    def exchange(value: object) -> list[Any]:
        return [json.loads(text) for text in gather(_packed(value))]

    received = exchange([is_strict, digests])
    is_error, by_rank = any(strict for strict, _ in received), [digests for _, digests in received]
    optimizers = sorted({one for digests in by_rank for one in digests})
    suspects = [o for o in optimizers if len({digests.get(o) for digests in by_rank} - {None}) > 1]
    if not suspects:
        return "", is_error
    for stream in (sys.stdout, sys.stderr):  # an error may end all ranks at once
        if stream is not None:
            stream.flush()
    own = {one: left for one, left in mine.items() if one in suspects}
    every = gather_distinct(exchange, own)
    found: dict[str, str] = {}
    for one in suspects:
        having = {rank for rank, digests in enumerate(by_rank) if one in digests}
        found = found or _differing([(states or {}).get(one) for states in every], having)
    if not found:
        return "", is_error
    name, which = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    fault = (
        f"all ranks must be equal after the last step, but differ: {name} ({which}){others}; take "
        f"the same number of steps on all ranks, and change weights, gradients and settings of "
        f"the optimizer identically on all ranks; HPCTRAIN_CHECK_WEIGHTS=warn only warns"
    )
    return fault, is_error


def _differing(of_ranks: Sequence[Left | None], having: set[int]) -> dict[str, str]:
    """Return the differing values of one optimizer by name, with the ranks of each value.

    Args:
        of_ranks: states by rank; None for a state that was not sent.
        having: ranks that have a state of the optimizer.
    """
    sent = [left for left in of_ranks if left]
    if not sent or set(sent[0][0]) != having:
        return {}
    common = set.intersection(*(set(values) for _, values in sent))
    return differing(
        [{n: v for n, v in (left[1] if left else {}).items() if n in common} for left in of_ranks]
    )


def _packed(value: object) -> bytes:
    return json.dumps(value).encode()
