"""Stall inspector, which reports operations that some ranks have not submitted.

A rank that has waited for long sends a question to all ranks through the root. The root collects
the answers and logs a report with the stacks of the ranks that are missing.
"""

import logging
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

import hpctrain
from hpctrain.comm.flight_recorder import FlightRecorder, is_collective
from hpctrain.core.config import Settings
from hpctrain.core.units import format_ranks

_LOG = logging.getLogger(__name__)

MAX_LINES = 8  # maximum number of operations, and of groups of ranks, in a report

_SILENT = "stopped, or in code that holds the GIL"


class Question(NamedTuple):
    """A question to all ranks whether they have submitted the operations in ``ages_s``."""

    key: tuple[int, int]  # asking rank, and number of its question
    ages_s: dict[str, float]  # seconds for which that rank has waited, by operation
    is_final: bool  # whether all ranks end after the report


class Answer(NamedTuple):
    """Answer of a rank to a question."""

    key: tuple[int, int]
    waiting: tuple[str, ...]
    """Operations of the question that this rank has submitted and waits for."""
    lacking: tuple[str, ...]  # operations of the question that it has not submitted
    others: tuple[str, ...]  # some other operations that it has submitted
    last: str  # last collective of the rank
    last_ago_s: float | None  # age of that collective; None without one
    stack: str  # stack of its main thread; empty if ``lacking`` is


class SetMember(NamedTuple):
    """A rank of a process set."""

    rank: int  # in the world
    host: str


@dataclass(slots=True)
class Inquiry:
    """A question, with the answers received so far by rank in the process set."""

    question: Question
    until: float  # deadline of the answers
    answers: dict[int, Answer] = field(default_factory=dict)


def describe(inquiry: Inquiry, members: Sequence[SetMember], abort_s: float = math.inf) -> str:
    """Return the report: stalled operations, the ranks that lack them, and their stacks.

    The report is empty if no operation is stalled any more. ``abort_s`` is the age of an operation
    after which all ranks end.
    """
    silent = [number for number in range(len(members)) if number not in inquiry.answers]
    lines = _operations(inquiry, members, silent)
    if not lines:
        return ""
    by_activity: dict[Hashable, list[int]] = {}
    for number, answer in sorted(inquiry.answers.items()):
        if answer.lacking:
            by_activity.setdefault((answer.last, answer.others, answer.stack), []).append(number)
    groups = list(by_activity.values())
    for numbers in groups[:MAX_LINES]:
        lines += _activity(numbers, inquiry.answers, members)
    if rest := list(chain.from_iterable(groups[MAX_LINES:])):
        lines.append(f"  {_on_hosts(rest, members)}: at other places, which are not shown")
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
        f"{_on_hosts([number], members)}; "
        f'the ranks that have not submitted "{eldest}" are unknown, because '
        f"{_on_hosts([0], members)}, or a rank between the two in the tree of ranks, does not "
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


def _operations(inquiry: Inquiry, members: Sequence[SetMember], silent: list[int]) -> list[str]:
    """Return a line for each operation that some ranks wait for and other ranks did not submit."""
    lines = []
    for name, age_s in inquiry.question.ages_s.items():
        waiting = [n for n, answer in inquiry.answers.items() if name in answer.waiting]
        lacking = [n for n, answer in inquiry.answers.items() if name in answer.lacking] + silent
        if waiting and lacking:
            lines.append(
                f'"{name}" has waited {age_s:.0f} s: submitted by '
                f"{_ranks(waiting, members)}, not by {_on_hosts(lacking, members)}"
            )
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more operations"]
    return lines


def _activity(
    numbers: Sequence[int], answers: Mapping[int, Answer], members: Sequence[SetMember]
) -> list[str]:
    """Return the lines about a group of ranks with the same stack."""
    answer = answers[numbers[0]]
    text = f"  {_on_hosts(numbers, members)}: last collective: {answer.last}"
    if answer.last_ago_s is not None:
        text += f", {answer.last_ago_s:.0f} s ago"
    if answer.others:
        text += f"; waits for {', '.join(answer.others)}"
    return [
        f"{text}; its main thread is at",
        *(f"    {line}" for line in answer.stack.splitlines()),
    ]


def _ranks(numbers: Iterable[int], members: Sequence[SetMember]) -> str:
    return format_ranks(sorted(members[number].rank for number in numbers))


def _on_hosts(numbers: Sequence[int], members: Sequence[SetMember]) -> str:
    hosts = sorted({members[number].host for number in numbers})
    where = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
    return f"{_ranks(numbers, members)} on {where}"


MAX_FRAMES = 10  # maximum number of lines of a stack, innermost kept

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
        # The line of the user already names the function of hpctrain that it calls.
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
"""Longest wait of the root for answers, plus a second for each level of the tree of ranks: idle
ranks check for messages once a second."""

MAX_NAMES = 50  # maximum number of operations in a question, oldest first

_OTHERS = 3


class StallWatch:
    """Creates questions and answers about stalled operations, and reports on the root.

    Not thread-safe. This class does not communicate: the caller passes the time, and transfers
    questions and answers between the ranks.

    Args:
        settings: intervals of the reports, and log directory.
        number: this rank in the process set; 0 is the root.
        members: ranks of the process set.
        last_call: stores the last collective; the caller updates it for every operation.
        end: ends all ranks with an exit code.
        recorder: records unnamed collectives, whose stalls are reported, too.
    """

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
        self._unanswered: dict[tuple[int, int], tuple[Question, float]] = {}
        self._inquiries: dict[tuple[int, int], Inquiry] = {}

    def due(self, now: float, oldest: Mapping[str, float]) -> Question | None:
        """Return a question if operations have waited for long, else None.

        The caller calls this method about once a second. A question is repeated when the wait has
        doubled, but not shortly before the age at which all ranks end.

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
        eldest = sorted(late, key=late.__getitem__, reverse=True)[:MAX_NAMES]
        ages_s = {name: late[name] for name in eldest}
        self._mark(ages_s, oldest)
        self._num_questions += 1
        is_final = max(ages_s.values()) >= self._abort_s
        question = Question((self._number, self._num_questions), ages_s, is_final)
        self._unanswered[question.key] = (question, now + self.answer_s)
        return question

    def answer_to(
        self, now: float, question: Question, oldest: Mapping[str, float], *, joined: bool = False
    ) -> Answer:
        """Return the answer to a question, also to this rank's own question.

        Questions of this rank about the same operations are postponed. A rank that has
        ``joined`` contributes to every named operation, so no named operation is missing.
        """
        oldest = {**oldest, **self._recorder.waiting()}
        self._mark(question.ages_s, oldest)
        self._unanswered.pop(question.key, None)
        names = question.ages_s
        if self._number == 0 and not self._is_known(question):
            self._inquiries[question.key] = Inquiry(question, until=now + self.answer_s)
        last, last_ago_s = self._last()
        lacks = self._recorder.lacks
        lacking = tuple(
            name
            for name in names
            if name not in oldest and (lacks(name) if is_collective(name) else not joined)
        )
        if any(map(is_collective, names)):
            self._write_calls()
        return Answer(
            key=question.key,
            waiting=tuple(name for name in names if name in oldest),
            lacking=lacking,
            others=tuple(name for name in oldest if name not in names)[:_OTHERS],
            last=last,
            last_ago_s=last_ago_s,
            stack=main_stack() if lacking else "",
        )

    def _last(self) -> tuple[str, float | None]:
        """Return the last collective, named or unnamed, and its age in seconds."""
        named, recorded = self.last_call.describe(), self._recorder.last()
        ages_s = [math.inf if ago_s is None else ago_s for _, ago_s in (named, recorded)]
        return recorded if ages_s[1] < ages_s[0] else named

    def _write_calls(self) -> None:
        """Write the last collectives of this rank to the log directory."""
        if self._log_dir is not None:
            rank = self._members[self._number].rank
            with suppress(OSError):
                file = self._log_dir / f"collectives-{rank}.txt"
                file.write_text(self._recorder.report(), encoding="utf-8")

    def take(self, number: int, answer: Answer) -> None:
        """On the root, store the answer of rank ``number``."""
        if answer.key in self._inquiries:
            self._inquiries[answer.key].answers[number] = answer

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
        lost = [question for question, until in self._unanswered.values() if now >= until]
        for question in lost:
            del self._unanswered[question.key]
        over = [
            key
            for key, inquiry in self._inquiries.items()
            if len(inquiry.answers) == len(self._members) or now >= inquiry.until
        ]
        inquiries = [self._inquiries.pop(key) for key in over]
        members, abort_s = self._members, self._abort_s
        texts = [(unanswered(e, self._number, members, abort_s), e.is_final) for e in lost]
        texts += [(describe(e, members, abort_s), e.question.is_final) for e in inquiries]
        return [(text, is_final) for text, is_final in texts if text]

    def _is_due(self, name: str, age_s: float) -> bool:
        return age_s >= (self._asked[name][1] if name in self._asked else self._first_s)

    def _mark(self, ages_s: Mapping[str, float], oldest: Mapping[str, float]) -> None:
        for name, age_s in ages_s.items():
            if name in oldest:
                is_last = age_s < self._abort_s < 3 * age_s  # the next question is the final one
                again_s = self._abort_s if is_last else 2 * age_s
                self._asked[name] = (oldest[name], again_s)

    def _is_known(self, question: Question) -> bool:
        return not question.is_final and any(
            question.ages_s.keys() <= inquiry.question.ages_s.keys()
            for inquiry in self._inquiries.values()
        )
