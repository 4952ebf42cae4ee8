"""Between operations that wait for long and what is reported of them."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hpctrain.negotiation.stall import HANG
from hpctrain.negotiation.stall_report import Answer, Question

if TYPE_CHECKING:
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.stall import StallWatch
    from hpctrain.negotiation.whereabouts import LastCall

_LOG = logging.getLogger(__name__)


class Stalls:
    """Asks and answers by a ``StallWatch``, and tells what comes of it; silent without one."""

    def __init__(
        self,
        watch: "StallWatch | None" = None,
        last_call: "LastCall | None" = None,
        end: Callable[[int], object] | None = None,
    ) -> None:
        """Take a watch.

        Args:
            watch: of this process set.
            last_call: is told of every operation.
            end: ends all ranks with an exit code.
        """
        self._watch, self._last_call, self._end = watch, last_call, end

    def enter(self) -> None:
        """Remember that this thread communicates."""
        if self._last_call is not None:
            self._last_call.enter()

    def note(self, handle: "Handle") -> None:
        """Remember an operation that is over."""
        if self._last_call is not None:
            self._last_call.note(handle.request.kind.value, handle.name)

    def due(self, oldest: Mapping[str, float]) -> Question | None:
        """Return what is to be asked now, and report what was found out."""
        if self._watch is None:
            return None
        now = time.monotonic()
        self._report(now)
        return self._watch.due(now, oldest)

    def answer(
        self, question: object, oldest: Mapping[str, float], *, joined: bool
    ) -> Answer | None:
        """Answer a question of another rank."""
        if self._watch is None or not isinstance(question, Question):
            return None
        return self._watch.heard(time.monotonic(), question, oldest, joined=joined)

    def take(self, number: int, answer: object) -> None:
        """Hear the answer of a rank; on the root."""
        if self._watch is not None and isinstance(answer, Answer):
            self._watch.take(number, answer)
            self._report(time.monotonic())

    def _report(self, now: float) -> None:
        assert self._watch is not None
        for report in self._watch.reports(now):
            self._tell(report.text, is_final=report.is_final)

    def _tell(self, text: str, *, is_final: bool) -> None:
        _LOG.log(logging.ERROR if is_final else logging.WARNING, "%s", text)
        if is_final and self._end is not None:
            self._end(HANG)
