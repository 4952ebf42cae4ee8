"""Stall inspector, which reports operations that some ranks have not submitted.

A rank that has waited for long sends a question to all ranks through the root. Each rank of the
tree merges the answers of the ranks below it, so that the root receives a few messages from any
number of ranks. The root logs a report with the stacks of the ranks that are missing.
"""

import logging
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

import hpctrain
from hpctrain.comm.flight_recorder import FlightRecorder, is_collective
from hpctrain.core.config import Settings
from hpctrain.core.units import format_ranks, shortened
from hpctrain.negotiation.messages import slots_of

_LOG = logging.getLogger(__name__)

MAX_LINES = 8  # maximum number of operations, and of groups of ranks, in a report

_SILENT = "stopped, or in code that holds the GIL"


class Question(NamedTuple):
    """A question to all ranks whether they have submitted the operations in ``ages_s``."""

    key: tuple[int, int]  # asking rank, and number of its question
    ages_s: dict[str, float]  # seconds for which that rank has waited, by operation
    is_final: bool  # whether all ranks end after the report

    @property
    def kind(self) -> str:
        """Kind of the question; one question of each kind is answered at a time."""
        return "final question" if self.is_final else "question"

    def without(self, other: "Question") -> "Question | None":
        """Return a question about the operations that ``other`` lacks; None if it lacks none."""
        ages_s = {name: age_s for name, age_s in self.ages_s.items() if name not in other.ages_s}
        return self._replace(ages_s=ages_s) if ages_s else None

    def merged(self, other: "Question") -> "Question":
        """Return a question about the operations of both questions, at most ``MAX_NAMES``."""
        ages_s = {**other.ages_s, **self.ages_s}
        if len(ages_s) > MAX_NAMES:
            ages_s = {name: ages_s[name] for name in _eldest(ages_s)}
        return self._replace(ages_s=ages_s)


class RankActivity(NamedTuple):
    """Activity of a rank that has not submitted an operation."""

    last: str  # last collective of the rank
    others: tuple[str, ...]  # some operations that the rank has submitted
    stack: str  # stack of its main thread


@dataclass(slots=True)
class Answers:
    """Merged answers of ranks to a question; a set of ranks is an integer with a bit per rank."""

    key: tuple[int, int]
    ranks: int  # ranks that have answered
    waiting: dict[str, int]
    """By name of an operation, the ranks that have submitted the operation and wait."""
    lacking: dict[str, int]  # by name of an operation, the ranks that have not submitted it
    places: dict[RankActivity, tuple[int, float]]
    """For each of the first ``MAX_LINES`` activities, the ranks with this activity and the age of
    their last collective in seconds; the age is -1 if there was none."""
    elsewhere: int = 0  # ranks with other activities
    is_complete: bool = False  # whether the subtree of the sender sends no further answers

    def add(self, other: "Answers") -> None:
        """Add the answers of other ranks."""
        self.ranks |= other.ranks
        self.elsewhere |= other.elsewhere
        for mine, theirs in ((self.waiting, other.waiting), (self.lacking, other.lacking)):
            for name, ranks in theirs.items():
                mine[name] = mine.get(name, 0) | ranks
        for place, (ranks, ago_s) in other.places.items():
            if place in self.places or len(self.places) < MAX_LINES:
                known, known_ago_s = self.places.get(place, (0, -1.0))
                self.places[place] = known | ranks, max(known_ago_s, ago_s)
            else:
                self.elsewhere |= ranks


class SetMember(NamedTuple):
    """A rank of a process set."""

    rank: int  # in the world
    host: str


@dataclass(slots=True)
class Inquiry:
    """A question, and the merged answers of this rank and the ranks below it."""

    question: Question
    until: float  # deadline of the answers, as ``time.monotonic()``
    answers: Answers
    """On the root, all answers; on other ranks, the answers not yet sent to the parent."""
    num_missing: int  # number of children whose subtrees have not answered completely


def describe(inquiry: Inquiry, members: Sequence[SetMember], abort_s: float = math.inf) -> str:
    """Return the report: stalled operations, the ranks that lack them, and their stacks.

    The report is empty if no operation is stalled any more. ``abort_s`` is the age of an operation
    after which all ranks end.
    """
    answers = inquiry.answers
    silent = ((1 << len(members)) - 1) & ~answers.ranks
    lines = _operations(inquiry, members, silent)
    if not lines:
        return ""
    places = sorted(answers.places.items(), key=lambda place: slots_of(place[1][0])[0])
    for place, (ranks, ago_s) in places:
        lines += _activity(place, ago_s, _on_hosts(ranks, members))
    if answers.elsewhere:
        lines.append(
            f"  {_on_hosts(answers.elsewhere, members)}: at other places, which are not shown"
        )
    if silent:
        lines.append(f"  {_on_hosts(silent, members)}: no answer; {_SILENT}")
    lines.append(_consequence(inquiry.question, abort_s))
    return "\n".join(lines)


def unanswered(
    question: Question, number: int, members: Sequence[SetMember], abort_s: float = math.inf
) -> str:
    """Return the report of a rank whose question the root has not forwarded."""
    eldest = max(question.ages_s, key=question.ages_s.__getitem__)
    return (
        f'"{eldest}" has waited {question.ages_s[eldest]:.0f} s on '
        f"{_on_hosts(1 << number, members)}; "
        f'the ranks that have not submitted "{eldest}" are unknown, because '
        f"{_on_hosts(1, members)}, or a rank between the two in the tree of ranks, does not "
        f"answer: {_SILENT}\n{_consequence(question, abort_s)}"
    )


def _consequence(question: Question, abort_s: float) -> str:
    if question.is_final:
        return "all ranks end now, because of HPCTRAIN_STALL_ABORT_S"
    left_s = abort_s - max(question.ages_s.values())
    ends = "HPCTRAIN_STALL_ABORT_S=SECONDS ends such a run"
    if math.isfinite(abort_s):
        ends = f"in {left_s:.0f} s all ranks end, because of HPCTRAIN_STALL_ABORT_S={abort_s:g}"
    return f"the ranks continue to wait; {ends}; HPCTRAIN_STALL_S=SECONDS delays this report"


def _operations(inquiry: Inquiry, members: Sequence[SetMember], silent: int) -> list[str]:
    """Return a line for each operation that some ranks wait for and other ranks did not submit."""
    lines = []
    for name, age_s in inquiry.question.ages_s.items():
        waiting = inquiry.answers.waiting.get(name, 0)
        lacking = inquiry.answers.lacking.get(name, 0) | silent
        if waiting and lacking:
            lines.append(
                f'"{name}" has waited {age_s:.0f} s: submitted by '
                f"{_ranks(waiting, members)}, not by {_on_hosts(lacking, members)}"
            )
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more operations"]
    return lines


def _activity(place: RankActivity, ago_s: float, where: str) -> list[str]:
    """Return the lines about the ranks ``where``, which have the same activity."""
    text = f"  {where}: last collective: {place.last}"
    if ago_s >= 0:
        text += f", {ago_s:.0f} s ago"
    if place.others:
        text += f"; waits for {', '.join(place.others)}"
    return [
        f"{text}; its main thread is at",
        *(f"    {line}" for line in place.stack.splitlines()),
    ]


def _eldest(ages_s: Mapping[str, float]) -> list[str]:
    """Return the names of the oldest operations, the oldest first."""
    return sorted(ages_s, key=ages_s.__getitem__, reverse=True)[:MAX_NAMES]


def _ranks(ranks: int, members: Sequence[SetMember]) -> str:
    return format_ranks(members[number].rank for number in slots_of(ranks))


def _on_hosts(ranks: int, members: Sequence[SetMember]) -> str:
    hosts = sorted({members[number].host for number in slots_of(ranks)})
    return f"{_ranks(ranks, members)} on {shortened(hosts, 4)}"


MAX_FRAMES = 10  # maximum number of frames that a report shows of a stack, the innermost

_OURS = str(Path(hpctrain.__file__).parent)
_INSTALLED = ("stdlib", "platstdlib", "scripts")
_LIBRARIES = ("<frozen", _OURS, *map(sysconfig.get_path, _INSTALLED))
_PACKAGES = {"site-packages", "dist-packages"}


class LastCall:
    """Stores the last collective of this process, and the threads that called collectives."""

    __slots__ = ("_noted", "_threads")

    def __init__(self) -> None:
        self._noted: tuple[str, str, float] | None = None
        self._threads: set[int] = set()

    def enter(self) -> None:
        """Record that the current thread communicates."""
        self._threads.add(get_ident())

    def note(self, what: str, name: str = "") -> None:
        """Record a complete collective, such as ``note("allreduce", "allreduce.loss")``."""
        self._noted = (what, name, time.monotonic())
        self.enter()

    def was_on(self, thread: int | None) -> bool:
        """Return True if the thread with this identifier has communicated."""
        return thread in self._threads

    def describe(self) -> tuple[str, float | None]:
        """Return the name of the last collective, and its age in seconds or None."""
        if self._noted is None:
            return "none so far", None
        what, name, when = self._noted
        text = name if name.startswith(what) else f"{what} {name}".rstrip()
        return text, time.monotonic() - when


def main_stack() -> str:
    """Return the stack of the main thread, outermost frame first.

    Frames in libraries are omitted, except for the innermost one.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    if frame is None:
        return "the main thread has ended"
    return _shown(list(traceback.StackSummary.extract(traceback.walk_stack(frame)))[::-1])


def _shown(stack: Sequence[traceback.FrameSummary]) -> str:
    users = [place for place, each in enumerate(stack) if not _is_library(each.filename)]
    kept = [stack[place] for place in users] or list(stack)
    if users:
        # The user's line of code already names the function of hpctrain that the line calls.
        inside = [each for each in stack[users[-1] + 1 :] if not each.filename.startswith(_OURS)]
        kept += inside[-1:]
    hidden = ["..."] if len(kept) > MAX_FRAMES else []
    return "\n".join([*hidden, *map(_line, kept[-MAX_FRAMES:])])


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or not _PACKAGES.isdisjoint(Path(file).parts)


def _line(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{code}"


HANG = 86  # exit code of ranks that end because an operation is stalled

ANSWER_S = 4.0
"""Longest wait of the root for answers, without the second that is added for each level of the
tree of ranks because idle ranks check for messages once a second."""

MAX_NAMES = 50  # maximum number of operations in a question, oldest first

_OTHERS = 3


class StallWatch:
    """Creates questions and answers about stalled operations, and reports on the root.

    Not thread-safe. This class does not communicate: the caller passes the time, and transfers
    questions and answers between the ranks.

    Args:
        settings: intervals of the reports, and log directory.
        number: rank of this process in the process set; 0 is the root.
        members: ranks of the process set.
        last_call: stores the last collective; the caller updates it for every operation.
        end: function that ends all ranks with the given exit code.
        recorder: records unnamed collectives, whose stalls are reported, too.
    """

    num_children = 0
    """Children of this rank in the tree of ranks; set before the first question arrives."""

    def __init__(
        self,
        settings: Settings,
        number: int,
        members: Sequence[SetMember],
        last_call: LastCall,
        end: Callable[[int], object] | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.last_call = last_call
        self.world_rank = members[number].rank
        self.answer_s = ANSWER_S + len(members).bit_length()  # longest wait for answers
        self._abort_s = settings.stall_abort_s
        self._first_s = min(settings.stall_s, settings.stall_abort_s)
        self._number, self._members, self._end = number, members, end
        self._recorder, self._log_dir = recorder or FlightRecorder(), settings.log_dir
        self._asked: dict[str, tuple[float, float]] = {}
        """Time of submission of each operation, and its age at the next question."""
        self._num_questions = 0
        self._unanswered: tuple[Question, float] | None = None
        """Question of this rank that the root has not answered, and its deadline."""
        self._inquiries: dict[tuple[int, int], Inquiry] = {}
        self._finished: list[Question] = []

    def due(self, now: float, oldest: Mapping[str, float]) -> Question | None:
        """Return a question if operations have waited for long, else None.

        The caller calls this method about once a second. A question about an operation is repeated
        when the operation has waited twice as long and the time for the answers is over, but not
        shortly before the age at which all ranks end.

        Args:
            now: ``time.monotonic()``.
            oldest: time of submission of each undecided operation of this rank.
        """
        oldest = {**oldest, **self._recorder.waiting()}
        self._asked = {
            name: asked for name, asked in self._asked.items() if oldest.get(name) == asked[0]
        }
        late = {
            name: now - since for name, since in oldest.items() if self._is_due(name, now - since)
        }
        if not late:
            return None
        ages_s = {name: late[name] for name in _eldest(late)}
        self._mark(now, ages_s, oldest)
        self._num_questions += 1
        is_final = max(ages_s.values()) >= self._abort_s
        question = Question((self._number, self._num_questions), ages_s, is_final)
        if self._unanswered is None or is_final > self._unanswered[0].is_final:
            # The root may first collect the answers to another question.
            self._unanswered = question, now + 2 * self.answer_s
        return question

    def answer_to(
        self, now: float, question: Question, oldest: Mapping[str, float], *, joined: bool = False
    ) -> None:
        """Store this rank's answer to a question, which another rank or this rank has asked.

        This rank then asks no question about the same operations for some time. With ``joined``,
        no named operation counts as missing on this rank: the rank contributes neutral values.
        """
        oldest = {**oldest, **self._recorder.waiting()}
        self._mark(now, question.ages_s, oldest)
        self._unanswered = None  # the root answers
        names, own = question.ages_s, 1 << self._number
        lacks = self._recorder.lacks
        lacking = {
            name: own
            for name in names
            if name not in oldest and (lacks(name) if is_collective(name) else not joined)
        }
        if any(map(is_collective, names)):
            self._write_calls()
        last, ago_s = self._last()
        others = tuple(name for name in oldest if name not in names)[:_OTHERS]
        answers = Answers(
            key=question.key,
            ranks=own,
            waiting={name: own for name in names if name in oldest},
            lacking=lacking,
            places={RankActivity(last, others, main_stack()): (own, ago_s)} if lacking else {},
        )
        until = now + self.answer_s
        self._inquiries[question.key] = Inquiry(question, until, answers, self.num_children)

    def _last(self) -> tuple[str, float]:
        """Return the last collective, named or unnamed, and its age in seconds, or -1."""
        named, recorded = self.last_call.describe(), self._recorder.last()
        ages_s = [math.inf if ago_s is None else ago_s for _, ago_s in (named, recorded)]
        last, ago_s = recorded if ages_s[1] < ages_s[0] else named
        return last, -1.0 if ago_s is None else ago_s

    def _write_calls(self) -> None:
        """Write the last collectives of this rank to the log directory."""
        if self._log_dir is not None:
            rank = self._members[self._number].rank
            with suppress(OSError):
                file = self._log_dir / f"collectives-{rank}.txt"
                file.write_text(self._recorder.report(), encoding="utf-8")

    def take(self, answers: Answers) -> None:
        """Add the answers of a child, and of ranks below it."""
        inquiry = self._inquiries.get(answers.key)
        if inquiry is not None:
            inquiry.answers.add(answers)
            inquiry.num_missing -= answers.is_complete

    def for_parent(self, now: float, *, partial: bool = False) -> list[Answers]:
        """Remove and return the answers to send to the parent.

        Answers are sent when all ranks below have answered, and, with ``partial``, also when some
        have. The caller passes ``partial`` about once a second.
        """
        found = []
        for key, inquiry in [*self._inquiries.items()] if self._number else ():
            answers = inquiry.answers
            answers.is_complete = not inquiry.num_missing
            if answers.is_complete or (partial and answers.ranks):
                found.append(answers)
                inquiry.answers = Answers(key, 0, {}, {}, {})
            if answers.is_complete or now >= inquiry.until:
                del self._inquiries[key]
        return found

    def take_finished(self) -> list[Question]:
        """Remove and return the questions that ``reports`` has reported on the root."""
        finished, self._finished = self._finished, []
        return finished

    def log_reports(self, now: float) -> None:
        """Log the finished reports; after a final report, end all ranks."""
        for text, is_final in self.reports(now):
            _LOG.log(logging.ERROR if is_final else logging.WARNING, "%s", text)
            if is_final and self._end is not None:
                self._end(HANG)

    def reports(self, now: float) -> list[tuple[str, bool]]:
        """Return the finished reports, each with True if all ranks must end.

        On the root, a report is finished when all ranks have answered or the time for answers is
        over. On any rank, a question that the root has not forwarded in time gives a report.
        """
        members, abort_s, texts = self._members, self._abort_s, []
        if self._unanswered is not None and now >= self._unanswered[1]:
            (lost, _), self._unanswered = self._unanswered, None
            texts.append((unanswered(lost, self._number, members, abort_s), lost.is_final))
        for key, inquiry in [*self._inquiries.items()] if self._number == 0 else ():
            if inquiry.answers.ranks.bit_count() == len(members) or now >= inquiry.until:
                del self._inquiries[key]
                self._finished.append(inquiry.question)
                text = describe(inquiry, members, abort_s)
                texts.append((text, inquiry.question.is_final))
        return [(text, is_final) for text, is_final in texts if text]

    def _is_due(self, name: str, age_s: float) -> bool:
        return age_s >= (self._asked[name][1] if name in self._asked else self._first_s)

    def _mark(self, now: float, ages_s: Mapping[str, float], oldest: Mapping[str, float]) -> None:
        """Postpone the next question of this rank about each operation in ``ages_s``."""
        for name in ages_s:
            if name in oldest:
                age_s = max(ages_s[name], now - oldest[name])
                again_s = max(2 * age_s, age_s + 2 * self.answer_s)
                # Instead of a question shortly before the final one, only the final one is sent.
                is_last = age_s < self._abort_s < max(3 * age_s, again_s)
                self._asked[name] = (oldest[name], self._abort_s if is_last else again_s)
