"""Rebuild: who holds state about the ranks, and in what order it is made anew and let go.

Communicators are reached through the world of the moment and kept by nobody. What else depends on
who the ranks are registers here: numbers of ranks, operations under way, shares of data. When the
ranks change, or what they have under way must be given up, all of it is made anew in one order;
at the end it is let go in the reverse one.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple


class Stage(enum.IntEnum):
    """What comes before what: a holder may use what the stages before its own have made."""

    RECORDS = 0  # what writes down what this rank does: timelines
    SETS = 1  # process sets and the controllers of their named operations
    HOLDERS = 2  # what is built upon them: optimizers, samplers, loaders


class _Registered(NamedTuple):
    stage: Stage
    renew: Callable[[], object] | None
    close: Callable[[], object] | None
    move: Callable[[], object] | None


class Rebuild:
    """The holders of one world."""

    def __init__(self) -> None:
        """Start with none."""
        self._holders: list[_Registered] = []
        self._left_behind: list[_Registered] = []  # of a world before, until they move

    def register(
        self,
        stage: Stage,
        *,
        renew: Callable[[], object] | None = None,
        close: Callable[[], object] | None = None,
        move: Callable[[], object] | None = None,
    ) -> None:
        """Take one more; in the same order on every rank, as both functions may be collective.

        ``stage`` says when its turn is, those of one stage take turns as they came; ``renew``
        makes anew what it holds, None where nothing of it depends on the ranks; ``close`` lets go
        of it, None where nothing has to be done; ``move`` makes it anew in a world of other
        ranks, where it registers again, None for what ends with this world.
        """
        self._holders.append(_Registered(stage, renew, close, move))
        self._holders.sort(key=lambda holder: holder.stage)  # stable

    def renew(self) -> None:
        """Make everything anew, the first stage first. Collective."""
        for holder in self._holders:
            if holder.renew is not None:
                holder.renew()

    @property
    def all_move(self) -> bool:
        """Whether nothing ends with this world that was built upon it."""
        return all(one.move is not None for one in self._holders if one.stage is Stage.HOLDERS)

    def leave(self) -> list[_Registered]:
        """Give up what has registered or not moved yet: its world is over. Not collective."""
        left, self._holders, self._left_behind = [*self._holders, *self._left_behind], [], []
        return left

    def follow(self, left: list[_Registered]) -> None:
        """Take over what the world before has left, until it moves. Not collective."""
        self._left_behind = left

    def move(self) -> None:
        """Let what outlives the world before go into this one, and register here. Collective.

        What has not moved when an error is raised is still there for another try, or world.
        """
        while self._left_behind:
            if (move := self._left_behind[0].move) is not None:
                move()
            del self._left_behind[0]

    def close(self) -> None:
        """Let go of everything, the last stage first. Collective."""
        while self._holders:
            holder = self._holders.pop()
            if holder.close is not None:
                holder.close()
