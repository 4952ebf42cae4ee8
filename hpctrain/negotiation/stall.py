"""Stall inspector: named operations that some rank does not submit, and what it does instead.

A rank that has waited for long asks all ranks, by way of the root, which collects the answers and
reports.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.core.config import Settings
from hpctrain.negotiation.stall_report import (
    Answer,
    Inquiry,
    Question,
    SetMember,
    describe,
    unanswered,
)
from hpctrain.negotiation.whereabouts import LastCall, main_stack

if TYPE_CHECKING:
    from hpctrain.negotiation.handle import Handle

_LOG = logging.getLogger(__name__)

HANG = 86
"""Exit code of ranks that are ended because one of them keeps the others waiting."""

ANSWER_S = 4.0
"""How long the root waits for answers, and a second for each level of a tree of the ranks: those
that have nothing to do look for messages once a second."""

MAX_NAMES = 50
"""Operations that one question asks about; those that have waited longest."""

_OTHERS = 3


class StallReport(NamedTuple):
    """What the root has found out."""

    text: str
    is_final: bool
    """Whether all ranks are to end now, with code ``HANG``."""


class StallWatch:
    """Asks, answers and, on the root, reports. Not thread-safe.

    Pure: it is told the time, and somebody else carries questions and answers between the ranks.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        members: Sequence[SetMember],
        last_call: LastCall,
    ) -> None:
        """Take what is needed to speak of ranks.

        Args:
            settings: ``stall_s`` and ``stall_abort_s``.
            number: of this rank in its process set; 0 is the root.
            members: rank in the world and host of each rank of the set.
            last_call: what the last collective of this rank was.
        """
        self.answer_s = ANSWER_S + len(members).bit_length()
        """How long the root waits for answers."""
        self._abort_s = settings.stall_abort_s
        self._first_s = min(settings.stall_s, settings.stall_abort_s)
        self._number, self._members, self._last_call = number, members, last_call
        self._asked: dict[str, tuple[float, float]] = {}
        """When each was submitted, and from what age on it is to be asked about."""
        self._num_questions = 0
        self._unheard: dict[tuple[int, int], tuple[Question, float]] = {}
        self._inquiries: dict[tuple[int, int], Inquiry] = {}

    def due(self, now: float, oldest: Mapping[str, float]) -> Question | None:
        """Return a question if there is one to ask; to be called every second or so.

        A question is asked again whenever the wait has become twice as long.

        Args:
            now: on the clock of ``oldest``.
            oldest: when this rank has submitted each operation that is not decided.
        """
        self._asked = {
            name: asked for name, asked in self._asked.items() if oldest.get(name) == asked[0]
        }
        late = {
            name: now - since for name, since in oldest.items() if self._is_due(name, now - since)
        }
        if not late:
            return None
        eldest = sorted(late, key=late.__getitem__, reverse=True)[:MAX_NAMES]
        ages_s = {name: late[name] for name in eldest}
        self._mark(ages_s, oldest)
        self._num_questions += 1
        is_final = max(ages_s.values()) >= self._abort_s
        question = Question((self._number, self._num_questions), ages_s, is_final)
        self._unheard[question.key] = (question, now + self.answer_s)
        return question

    def heard(
        self, now: float, question: Question, oldest: Mapping[str, float], *, joined: bool = False
    ) -> Answer:
        """Answer a question, this rank's own too; it need not be asked by another rank now.

        Args:
            now: on the clock of ``oldest``.
            question: what has come.
            oldest: when this rank has submitted each operation that is not decided.
            joined: whether this rank takes part in everything with nothing.
        """
        self._mark(question.ages_s, oldest)
        self._unheard.pop(question.key, None)
        names = question.ages_s
        if self._number == 0 and not self._is_known(question):
            self._inquiries[question.key] = Inquiry(
                names, until=now + self.answer_s, is_final=question.is_final
            )
        last, last_ago_s = self._last_call.describe()
        lacking = () if joined else tuple(name for name in names if name not in oldest)
        return Answer(
            key=question.key,
            waiting=tuple(name for name in names if name in oldest),
            lacking=lacking,
            others=tuple(name for name in oldest if name not in names)[:_OTHERS],
            last=last,
            last_ago_s=last_ago_s,
            stack=main_stack() if lacking else "",
        )

    def take(self, number: int, answer: Answer) -> None:
        """Note the answer of a rank of the set; on the root."""
        if answer.key in self._inquiries:
            self._inquiries[answer.key].answers[number] = answer

    def reports(self, now: float) -> list[StallReport]:
        """Return what has been found out.

        On the root once all have answered, or time is over; on a rank whose question has not come
        back from the root, that.
        """
        lost = [question for question, until in self._unheard.values() if now >= until]
        for question in lost:
            del self._unheard[question.key]
        over = [
            key
            for key, inquiry in self._inquiries.items()
            if len(inquiry.answers) == len(self._members) or now >= inquiry.until
        ]
        inquiries = [self._inquiries.pop(key) for key in over]
        texts = [(unanswered(each, self._number, self._members), each.is_final) for each in lost]
        texts += [(describe(each, self._members), each.is_final) for each in inquiries]
        return [StallReport(text, is_final) for text, is_final in texts if text]

    def _is_due(self, name: str, age_s: float) -> bool:
        return age_s >= (self._asked[name][1] if name in self._asked else self._first_s)

    def _mark(self, ages_s: Mapping[str, float], oldest: Mapping[str, float]) -> None:
        for name, age_s in ages_s.items():
            if name in oldest:
                again_s = 2 * age_s if age_s >= self._abort_s else min(2 * age_s, self._abort_s)
                self._asked[name] = (oldest[name], again_s)

    def _is_known(self, question: Question) -> bool:
        return not question.is_final and any(
            question.ages_s.keys() <= inquiry.ages_s.keys() for inquiry in self._inquiries.values()
        )


class Stalls:
    """Asks and answers by a ``StallWatch``, and tells what comes of it; silent without one."""

    def __init__(
        self,
        watch: StallWatch | None = None,
        last_call: LastCall | None = None,
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
            _LOG.log(logging.ERROR if report.is_final else logging.WARNING, "%s", report.text)
            if report.is_final and self._end is not None:
                self._end(HANG)
