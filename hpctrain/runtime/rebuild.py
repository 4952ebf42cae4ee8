"""Registry of the objects that depend on the ranks, in the order of rebuilding and closing.

Objects get communicators from the current world and do not store communicators. Other state may
depend on the ranks, for example the number of ranks, operations in flight and shares of data. An
object with such state registers here. When the ranks change, or operations in flight are
cancelled, all registered objects are rebuilt in one order; at the end they are closed in the
reverse order.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple


class RebuildStage(enum.IntEnum):
    """Order of rebuilding: an object may use objects of earlier stages."""

    RECORDS = 0  # timelines
    SETS = 1  # process sets and the controllers of their named operations
    HOLDERS = 2  # optimizers, samplers, loaders


class _Registered(NamedTuple):
    stage: RebuildStage
    renew: Callable[[], object] | None
    close: Callable[[], object] | None
    move: Callable[[], object] | None


class Rebuild:
    """Registry of the objects of one world that must be rebuilt, moved or closed."""

    def __init__(self) -> None:
        self._holders: list[_Registered] = []
        self._left_behind: list[_Registered] = []  # objects of the previous world, to be moved

    def register(
        self,
        stage: RebuildStage,
        *,
        renew: Callable[[], object] | None = None,
        close: Callable[[], object] | None = None,
        move: Callable[[], object] | None = None,
    ) -> None:
        """Add an object. All ranks add objects in the same order: functions may be collective.

        Args:
            stage: stage of rebuilding; objects of one stage are rebuilt in the order of
                registration.
            renew: function that rebuilds the object; None if the object does not depend on the
                ranks.
            close: function that closes the object; None if no action is needed.
            move: function that rebuilds the object in a world of other ranks and registers it
                there; None if the object ends with this world.
        """
        self._holders.append(_Registered(stage, renew, close, move))
        self._holders.sort(key=lambda holder: holder.stage)  # stable

    def renew(self) -> None:
        """Rebuild all objects, the first stage first. Collective."""
        for holder in self._holders:
            if holder.renew is not None:
                holder.renew()

    @property
    def all_move(self) -> bool:
        """Whether all objects of the stage ``HOLDERS`` can move to another world."""
        return all(
            one.move is not None for one in self._holders if one.stage is RebuildStage.HOLDERS
        )

    def leave(self) -> list[_Registered]:
        """Remove and return all objects, including objects that were not moved. Not collective."""
        left, self._holders, self._left_behind = [*self._holders, *self._left_behind], [], []
        return left

    def follow(self, left: list[_Registered]) -> None:
        """Store the objects that the previous world's ``leave`` returned, for ``move``. Local."""
        self._left_behind = left

    def move(self) -> None:
        """Move the objects of the previous world into this world. Collective.

        After an error, the remaining objects are kept for the next attempt or world.
        """
        while self._left_behind:
            if (move := self._left_behind[0].move) is not None:
                move()
            del self._left_behind[0]

    def close(self) -> None:
        """Close all objects, the last stage first. Collective."""
        while self._holders:
            holder = self._holders.pop()
            if holder.close is not None:
                holder.close()
