"""How one phase of a test ended, and what it means for all ranks when they differ."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
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


@dataclass
class Outcome:
    """What became of one test, all phases together."""

    test: str
    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0


class JsonReport:
    """Writes what became of each test; the verdicts are agreed, so rank 0 speaks for all."""

    def __init__(self, path: Path, *, mpi: str, ranks: int) -> None:
        self.path = path
        self.facts = {"mpi": mpi, "ranks": ranks, "python": sys.version.split()[0]}
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        self._add(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Add a file that could not be collected."""
        if not report.passed:
            self._add(report, 0.0)

    def _add(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        mine = self.outcomes.setdefault(report.nodeid, Outcome(report.nodeid))
        mine.seconds += seconds
        if report.outcome == "passed" or mine.outcome == "failed":
            return
        mine.outcome = report.outcome
        mine.reason = reason_of(report)

    def pytest_sessionfinish(self) -> None:
        """Write the report; a launch without one has failed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tests = [asdict(outcome) for outcome in self.outcomes.values()]
        self.path.write_text(json.dumps(self.facts | {"tests": tests}, indent=1) + "\n")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Say in one line why a test was skipped or failed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if expected := getattr(report, "wasxfail", ""):
        return f"expected failure: {expected}"
    crash = getattr(report.longrepr, "reprcrash", None)
    return next(iter((crash.message if crash else report.longreprtext).splitlines()), "no reason")
