"""Comparison of all ranks at the end: whether the last steps have left the same on each.

Before each step the ranks compare what the step before has left; after the last one nobody would.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hpctrain.comm.agreement import differing
from hpctrain.core import logs

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.liveness import Gather
    from hpctrain.runtime.process_set_table import ProcessSets

Left = tuple[Sequence[int], Mapping[str, str]]
"""Of an optimizer: its ranks, and what its last step has left on this one, as text by name."""


class OpenedSteps(Protocol):
    """The opening messages of steps, as a rank that has joined knows them."""

    def take_part(self, comm: "Communicator") -> bool:
        """Take part in the next step of the other ranks with nothing. Collective.

        False if all ranks do so: there is no other step.
        """

    def hand_over(self) -> Mapping[int, Mapping[str, str]]:
        """Return, by optimizer, what its last step has left here; at the end. Not collective."""

    def last_to_step(self, comm: "Communicator") -> Sequence[int]:
        """Return the ranks that have taken every step since all ranks had joined. Collective."""


def compare(
    sets: "ProcessSets",
    step_checks: "Mapping[Communicator, OpenedSteps]",
    check_weights: str,
    gather: "Gather",
) -> str:
    """Say what differs between the ranks of a world, where that is an error. Collective.

    What this rank has counts as missing while an exception is on its way here. Named operations
    that have broken down on some rank end on all, too.
    """
    sets.give_up_broken(gather)
    ranks = sets.by_number()
    mine = {
        f"{number}.{optimizer}": (ranks[number], values)
        for number, comm in sets.communicators().items()
        if comm in step_checks
        for optimizer, values in step_checks[comm].hand_over().items()
    }
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
    """Say what differs, empty for nothing, and whether a rank is strict. Collective.

    Compared is what all ranks of an optimizer have: not one that some of them lack, nor a name
    that is missing on some. One small message while all is well.
    """
    digests = {one: hashlib.sha256(_packed(left)).hexdigest()[:16] for one, left in mine.items()}
    heard = [json.loads(text) for text in gather(_packed([is_strict, digests]))]
    is_error, told = any(strict for strict, _ in heard), [digests for _, digests in heard]
    optimizers = sorted({one for digests in told for one in digests})
    suspects = [o for o in optimizers if len({digests.get(o) for digests in told} - {None}) > 1]
    if not suspects:
        return "", is_error
    for stream in (sys.stdout, sys.stderr):  # an error may end all ranks at once
        if stream is not None:
            stream.flush()
    own = {one: left for one, left in mine.items() if one in suspects}
    every = [json.loads(text) for text in gather(_packed(own))]
    parted = (_differing([of_rank.get(one) for of_rank in every]) for one in suspects)
    found = next(filter(None, parted), {})
    if not found:
        return "", is_error
    name, which = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    fault = (
        f"the ranks have parted in the last step: {name} ({which}){others}; take equally many "
        f"steps, and change weights and gradients on all ranks alike; "
        f"HPCTRAIN_CHECK_WEIGHTS=warn goes on"
    )
    return fault, is_error


def _differing(of_ranks: Sequence[Left | None]) -> dict[str, str]:
    """Return what differs of one optimizer, with the ranks."""
    having = {rank: left for rank, left in enumerate(of_ranks) if left is not None}
    members, _ = next(iter(having.values()))
    if set(having) != set(members):
        return {}
    common = set.intersection(*(set(values) for _, values in having.values()))
    return differing(
        [{n: v for n, v in (left[1] if left else {}).items() if n in common} for left in of_ranks]
    )


def _packed(value: object) -> bytes:
    return json.dumps(value).encode()
