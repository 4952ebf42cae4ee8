"""How one phase of a test ended, and what it means for all ranks when they differ."""

import os
from dataclasses import dataclass
from typing import TextIO

import pytest


@dataclass(frozen=True)
class Verdict:
    """How one phase of a test ended on one rank."""

    outcome: str
    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> "Verdict":
        if error is None:
            return cls("passed", "")
        outcome = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
        return cls(outcome, f"{type(error).__name__}: {error}")


def disagreement(verdicts: list[Verdict]) -> str:
    """Say which ranks failed or skipped where others did not; empty if all ranks ended alike."""
    for outcome in ("failed", "skipped"):
        mine = {rank: v.text for rank, v in enumerate(verdicts) if v.outcome == outcome}
        if mine:
            which = "; ".join(f"rank {rank}: {text}" for rank, text in mine.items())
            return "" if len(mine) == len(verdicts) else f"{outcome} on some ranks only: {which}"
    return ""


class Voice:
    """Writes to the real stderr, each line tagged with the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream: TextIO = os.fdopen(os.dup(2), "w")

    def say(self, *parts: str) -> None:
        """Write at once and in one piece, so that the words of many ranks stay apart."""
        lines = "\n".join(part.rstrip("\n") for part in parts).splitlines()
        self.stream.write("".join(f"[rank {self.rank}] {line}\n" for line in lines))
        self.stream.flush()
