"""The report about a named operation that some rank does not submit, in words."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from hpctrain.core.units import format_ranks

MAX_LINES = 8
"""Operations that are named, and groups of ranks that are told of."""

_SILENT = "stopped, or in code that keeps Python's lock"


class Question(NamedTuple):
    """Who has not submitted these operations?"""

    key: tuple[int, int]
    """Number of the asking rank, and of its question."""
    ages_s: dict[str, float]
    """How long that rank has waited for each."""
    is_final: bool
    """Whether all ranks are to end once it is known."""


class Answer(NamedTuple):
    """What a rank says to a question."""

    key: tuple[int, int]
    waiting: tuple[str, ...]
    """Of the operations asked about, those that this rank has submitted and waits for."""
    lacking: tuple[str, ...]
    """Those that it has not submitted."""
    others: tuple[str, ...]
    """Some that it has submitted and nobody asked about."""
    last: str
    """Its last collective."""
    last_ago_s: float | None
    """How long ago that was."""
    stack: str
    """Where its main thread is; empty if it lacks nothing."""


class SetMember(NamedTuple):
    """A rank of a process set."""

    rank: int
    """In the world."""
    host: str


@dataclass(slots=True)
class Inquiry:
    """A question and the answers so far, by numbers of ranks in the process set."""

    ages_s: Mapping[str, float]
    until: float
    """When answers are not waited for any more."""
    is_final: bool
    answers: "dict[int, Answer]" = field(default_factory=dict)


def describe(inquiry: Inquiry, members: Sequence[SetMember]) -> str:
    """Return the report: which operations, which ranks lack them, and what these do.

    Empty if everything has turned out well meanwhile.
    """
    silent = [number for number in range(len(members)) if number not in inquiry.answers]
    lines = _operations(inquiry, members, silent)
    if not lines:
        return ""
    doing: dict[Hashable, list[int]] = {}
    for number, answer in sorted(inquiry.answers.items()):
        if answer.lacking:
            doing.setdefault((answer.last, answer.others, answer.stack), []).append(number)
    groups = list(doing.values())
    for numbers in groups[:MAX_LINES]:
        lines += _doing(numbers, inquiry.answers, members)
    if rest := list(chain.from_iterable(groups[MAX_LINES:])):
        lines.append(f"  {_who(rest, members)}: something else again")
    if silent:
        lines.append(f"  {_who(silent, members)}: no answer; {_SILENT}")
    lines.append(_outlook(is_final=inquiry.is_final))
    return "\n".join(lines)


def unanswered(question: "Question", number: int, members: Sequence[SetMember]) -> str:
    """Return the report of a rank whose question the root has not passed on."""
    eldest = max(question.ages_s, key=question.ages_s.__getitem__)
    return (
        f'"{eldest}" has waited {question.ages_s[eldest]:.0f} s on {_who([number], members)}; who '
        f"lacks it is not known, for {_who([0], members)}, or a rank on the way to it, does not "
        f"answer: {_SILENT}\n{_outlook(is_final=question.is_final)}"
    )


def _outlook(*, is_final: bool) -> str:
    if is_final:
        return "all ranks end now, as HPCTRAIN_STALL_ABORT_S asks"
    return (
        "they are waited for; HPCTRAIN_STALL_ABORT_S=SECONDS ends such a run, "
        "HPCTRAIN_STALL_S=SECONDS reports it later"
    )


def _operations(inquiry: Inquiry, members: Sequence[SetMember], silent: list[int]) -> list[str]:
    """A line for each operation that somebody waits for and somebody lacks."""
    lines = []
    for name, age_s in inquiry.ages_s.items():
        waiting = [n for n, answer in inquiry.answers.items() if name in answer.waiting]
        lacking = [n for n, answer in inquiry.answers.items() if name in answer.lacking] + silent
        if waiting and lacking:
            lines.append(
                f'"{name}" has waited {age_s:.0f} s: submitted by '
                f"{_ranks(waiting, members)}, not by {_who(lacking, members)}"
            )
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more operations"]
    return lines


def _doing(
    numbers: Sequence[int], answers: "Mapping[int, Answer]", members: Sequence[SetMember]
) -> list[str]:
    """Lines about ranks that are at the same place."""
    answer = answers[numbers[0]]
    text = f"  {_who(numbers, members)}: last collective: {answer.last}"
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


def _who(numbers: Sequence[int], members: Sequence[SetMember]) -> str:
    hosts = sorted({members[number].host for number in numbers})
    where = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
    return f"{_ranks(numbers, members)} on {where}"
