"""The outcome of each test as one line of JSON, written as soon as the test has finished.

Lines of a session, in this order:

- ``{"mpi", "ranks", "python"}``: the environment of the session;
- ``{"collected"}``: the number of collected tests;
- ``{"started"}``: a test starts;
- ``{"test", "outcome", "reason", "seconds"}``: a test has finished;
- ``{"ended", "rank", "reason"}``: the test that ended the session, and the rank that reports it;
- ``{"finished"}``: the exit code of a session that ran to its end.

A session that continues after an "ended" line appends its lines to the same file.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpctrain.core.python_compat import Self


@dataclass
class Outcome:
    """The outcome of one test, over all its phases."""

    test: str
    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Journal:
    """The content of a journal file."""

    facts: dict[str, Any] = field(default_factory=dict)
    tests: list[dict[str, Any]] = field(default_factory=list)
    num_collected: int = 0  # set by the first session
    running: list[str] = field(default_factory=list)
    """Tests that have started and have not finished."""
    endings: list[str] = field(default_factory=list)
    """Why the tests in ``running`` ended the session."""
    is_finished: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a journal, and ignore a last line that was cut off."""
        found, running = cls(), dict.fromkeys(())
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.is_finished = "finished" in entry
            if "mpi" in entry:
                found.facts = entry
            elif "collected" in entry:
                found.num_collected = found.num_collected or entry["collected"]
            elif "started" in entry:
                running[entry["started"]] = None
            elif "test" in entry:
                found.tests.append(entry)
                running.pop(entry["test"], None)
                found.endings = []
            elif "ended" in entry:
                found.endings.append(f"rank {entry['rank']}: {entry['reason']}")
        found.running = list(running)
        return found

    @property
    def num_not_run(self) -> int:
        """Number of collected tests without an outcome."""
        return max(self.num_collected - len({test["test"] for test in self.tests}), 0)


def append(path: Path, *entries: dict[str, Any]) -> None:
    """Append lines to a journal in one write, so that several processes may append."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))


class JournalWriter:
    """Plugin of rank 0 that writes the journal; all ranks agree on each verdict."""

    def __init__(self, path: Path, *, mpi: str, ranks: int) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        self._num_collected = 0
        append(path, {"mpi": mpi, "ranks": ranks, "python": sys.version.split()[0]})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the number of tests, except in the controller of pytest-xdist."""
        self._collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Record the number of tests that a worker of pytest-xdist has collected."""
        self._collected(ids)

    def _collected(self, tests: Iterable[str]) -> None:
        number = len(list(tests))
        if number and not self._num_collected:
            self._num_collected = number
            append(self.path, {"collected": number})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the start of a test."""
        append(self.path, {"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report of one phase of a test."""
        self._add(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that pytest could not collect."""
        if not report.passed:
            self._add(report, 0.0)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the outcome of a test."""
        if outcome := self.outcomes.pop(nodeid, None):
            append(self.path, asdict(outcome))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Record the exit code, and outcomes without a logfinish event, such as import errors."""
        rest = [asdict(outcome) for outcome in self.outcomes.values()]
        append(self.path, *rest, {"finished": int(exitstatus)})

    def _add(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        mine = self.outcomes.setdefault(report.nodeid, Outcome(report.nodeid))
        mine.seconds += seconds
        if report.outcome == "passed" or mine.outcome == "failed":
            return
        mine.outcome = report.outcome
        mine.reason = reason_of(report)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip or failure as one line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if expected := getattr(report, "wasxfail", ""):
        return f"expected failure: {expected}"
    crash = getattr(report.longrepr, "reprcrash", None)
    return next(iter((crash.message if crash else report.longreprtext).splitlines()), "no reason")
