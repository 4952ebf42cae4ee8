"""Tells a timeline in which phase the operations of a message are."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.comm.traffic import Traffic
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.timeline.timeline import Timeline


class Phases:
    """The operations that are carried out together, from their start to their end."""

    def __init__(
        self,
        timeline: "Timeline",
        handles: Sequence["Handle"],
        traffic: "Callable[[], Traffic]",
    ) -> None:
        self._timeline = timeline
        self._traffic = traffic
        self._names = [handle.name for handle in handles]
        self._before: Traffic | None = None
        for handle in handles:
            request = handle.request
            num_bytes = sum(tensor.nbytes for tensor in request.tensors)
            timeline.start(handle.name, request.kind.name, num_bytes)
        timeline.flush()  # it may be the last that this process does

    def enter(self, phase: str) -> None:
        """Leave the phase before, if there was one, for this one."""
        self._leave()
        for name in self._names:
            self._timeline.phase_start(name, phase)
        self._before = self._traffic()

    def end(self) -> None:
        """Say that it is over."""
        self._leave()
        for name in self._names:
            self._timeline.end(name)
        self._timeline.flush()  # before anybody hears of the result

    def _leave(self) -> None:
        if self._before is not None:
            moved = self._traffic().since(self._before)
            for name in self._names:
                self._timeline.phase_end(name, moved)
        self._before = None
