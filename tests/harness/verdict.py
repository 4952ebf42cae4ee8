"""Verdict of one phase of a test, and the comparison of the verdicts of all ranks."""

import os
from dataclasses import dataclass
from typing import TextIO

import pytest


@dataclass(frozen=True)
class Verdict:
    """Outcome of one phase of a test on one rank."""

    outcome: str
    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> "Verdict":
        if error is None:
            return cls("passed", "")
        outcome = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
        return cls(outcome, f"{type(error).__name__}: {error}")


def disagreement(verdicts: list[Verdict]) -> str:
    """Return a text with the ranks that failed or skipped; "" if all have the same outcome."""
    for outcome in ("failed", "skipped"):
        mine = {rank: v.text for rank, v in enumerate(verdicts) if v.outcome == outcome}
        if mine:
            which = "; ".join(f"rank {rank}: {text}" for rank, text in mine.items())
            return "" if len(mine) == len(verdicts) else f"{outcome} on some ranks only: {which}"
    return ""


class Voice:
    """Write to the real stderr, with the rank before each line."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream: TextIO = os.fdopen(os.dup(2), "w")

    def say(self, *parts: str) -> None:
        """Write all lines with one call, so that output of several ranks is not interleaved."""
        lines = "\n".join(part.rstrip("\n") for part in parts).splitlines()
        self.stream.write("".join(f"[rank {self.rank}] {line}\n" for line in lines))
        self.stream.flush()
