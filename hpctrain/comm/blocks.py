"""Blocks of the program that all ranks leave together, and the errors if a rank does not."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpctrain.comm.reports import AT_END, BROKE_OFF, Reports
from hpctrain.core.errors import RankLostError

BREAK_S = 2.0
"""How long ranks wait for the program to end after a rank has left a block by an error."""
_WORLD = 0  # number of the block that every rank is always in


class Block(NamedTuple):
    """A block of the program that all ranks leave together."""

    name: str  # for messages
    count_steps: Callable[[], int]  # steps that this rank has begun in it


class Blocks:
    """The blocks that one rank is in, by number, and the reports of other ranks about theirs.

    No method is collective, but all ranks must enter the same blocks in the same order.
    """

    def __init__(self, rank: int, reports: Reports) -> None:
        self._rank, self._reports = rank, reports
        self._num_entered = 0
        self._within = {_WORLD: Block("the program", lambda: 0)}
        self._broken: dict[int, tuple[float, str]] = {}
        """By block: when another rank reported that it left by an error, and the error."""
        self._ending: tuple[int, float] | None = None
        """Block at whose end this rank waits, and since when; infinite after this was reported."""
        self._ends: dict[int, tuple[float, int, int]] = {}
        """By block: when a rank reported that it waits at the end, that rank, and its steps."""
        self._ended: dict[int, int] = {}  # steps after which all ranks ended a block
        self._broke_off_s = -math.inf  # when this rank has left a block by an error

    @property
    def innermost(self) -> str:
        """Name of the innermost block that this rank is in; empty if none."""
        return self._within[max(self._within)].name if len(self._within) > 1 else ""

    def is_apart(self, since_s: float) -> bool:
        """Return True if this rank has left a block by an error since, or waits at its end."""
        return self._broke_off_s > since_s or self._ending is not None

    def enter(self, block: Block) -> int:
        """Enter a block and return its number."""
        self._num_entered += 1
        self._within[self._num_entered] = block
        return self._num_entered

    @contextmanager
    def at_end(self, number: int) -> Iterator[None]:
        """Report inside this context, after a while, that this rank waits at the end of a block.

        A block that has ended may continue, and end again after more steps.
        """
        self._ending = number, time.monotonic()
        try:
            yield
            self._ended[number] = self._within[number].count_steps()
        finally:
            self._ending = None

    def leave(self, number: int, error: BaseException | None) -> None:
        """Leave a block; report an error to the ranks that are still in it.

        A ``RankLostError`` is reported to all ranks: a rank whose wait has failed is out of step
        with ranks outside the block too.
        """
        name = self._within.pop(number).name
        if error is None or not self._reports.may_send:
            return
        self._broke_off_s = time.perf_counter()
        reason = f"rank {self._rank} has left a block of {name} by {type(error).__name__}: {error}"
        block = _WORLD if isinstance(error, RankLostError) else number
        self._reports.send(BROKE_OFF, f"{block} {reason}")

    def hear_of_error(self, text: str) -> None:
        """Store the report of another rank that it has left a block by an error."""
        number, reason = text.split(" ", 1)
        self._broken.setdefault(int(number), (time.monotonic(), reason))

    def hear_of_end(self, rank: int, text: str) -> None:
        """Store the report of another rank that it waits at the end of a block."""
        number, steps = map(int, text.split())
        self._ends[number] = time.monotonic(), rank, steps

    def check(self) -> None:
        """Report a long wait at the end of a block; check the reports of other ranks.

        Raises:
            RankLostError: a rank left by an error a block that this rank is in, or waits at the
                end of the block after fewer steps.
        """
        now = time.monotonic()
        if self._ending is not None and now - self._ending[1] >= BREAK_S:
            number = self._ending[0]
            self._ending = number, math.inf
            self._reports.send(AT_END, f"{number} {self._within[number].count_steps()}")
        for number, (since, reason) in list(self._broken.items()):
            # An error that the program does not catch ends all ranks meanwhile, with more detail.
            if number in self._within and now - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must leave a block together, but {reason}, and rank {self._rank} "
                    f"waits in {self._within[number].name}; catch errors inside the block, or end "
                    f"the program"
                )
        for number, (since, rank, steps) in list(self._ends.items()):
            block = self._within.get(number)
            if block is None or steps <= self._ended.get(number, -1):
                continue
            mine = block.count_steps()
            if mine > steps and now - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must take the same number of steps in a block of {block.name}, "
                    f"but rank {rank} waits at its end after {steps} steps and rank {self._rank} "
                    f"is in step {mine}; call skip_step() on a rank that has no batch for a step"
                )
