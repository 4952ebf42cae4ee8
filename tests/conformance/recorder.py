"""Record verdicts of one rank as they occur (pytest plugin).

The ranks synchronize only in the tests themselves, as in Horovod's own runs. After a failure,
ranks may run different tests, so the rank that failed exits, and ``mpirun`` ends the other ranks.
The next launch continues with the tests without a verdict. If a test hangs, every rank prints its
stacks, and the test has failed. The plugin does not import hpctrain, because the tests also run
with Horovod itself.
"""

import faulthandler
import json
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.harness.journal import reason_of

GRACE_S = 2.0
"""For the other ranks' verdicts and stacks, before the first rank to end takes them along."""

DONE, FINISHED = "done.txt", "finished"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, required=True, help="folder of the verdicts")
    parser.addoption("--limit", type=float, default=120.0, help="seconds that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK", "0")
    recorder = Recorder(config.getoption("--records"), rank, config.getoption("--limit"))
    config.pluginmanager.register(recorder, "recorder")


class Recorder:
    """Write one line for each start and each end of a test."""

    def __init__(self, folder: Path, rank: str, limit_s: float) -> None:
        done = folder / DONE
        self._done = set(done.read_text().splitlines()) if done.exists() else set()
        self._file = (folder / f"{rank}.jsonl").open("w", buffering=1)
        self._stderr = os.fdopen(os.dup(2), "w", buffering=1)  # pytest captures the original
        self._rank, self._limit_s = rank, limit_s

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect tests that have a verdict from an earlier launch."""
        items[:] = [item for item in items if item.nodeid not in self._done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Print the stacks of a test that exceeds its limit."""
        self._write(item.nodeid, "started")
        faulthandler.dump_traceback_later(self._limit_s, file=self._stderr)
        timer = threading.Timer(self._limit_s + GRACE_S, self._give_up, (item.nodeid,))
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the end of a test; the last line about a test counts."""
        if report.failed:
            text = f"[rank {self._rank}] {report.nodeid} failed\n{report.longreprtext}\n"
            self._fail(report.nodeid, reason_of(report), text)
        elif report.skipped:
            self._write(report.nodeid, "skipped", reason_of(report))
        elif report.when == "call":
            self._write(report.nodeid, "passed", seconds=report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as a failure."""
        if report.failed:
            self._fail(report.nodeid, reason_of(report), report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        """Record that no tests are left."""
        self._write("", FINISHED)

    def _give_up(self, test: str) -> None:
        self._fail(test, f"still ran after {self._limit_s:g} s; its stacks are in the log", "")

    def _fail(self, test: str, reason: str, text: str) -> None:
        self._write(test, "failed", reason)
        self._stderr.write(text)
        time.sleep(GRACE_S)
        os._exit(1)

    def _write(self, test: str, outcome: str, reason: str = "", seconds: float = 0.0) -> None:
        line = {"test": test, "outcome": outcome, "reason": reason, "seconds": seconds}
        self._file.write(json.dumps(line) + "\n")
