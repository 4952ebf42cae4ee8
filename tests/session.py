"""Run pytest, and start it again after a test that ended its session.

    python -m tests.session REPORT COMMAND ...

COMMAND runs pytest, on one or more ranks. The program adds ``--report=REPORT`` as one word,
because pytest would treat a separate word with an existing file as a path of tests. If a rank
dies, a test hangs, or a test fails on only one rank, the whole session ends: this test has failed,
and the next session continues with the tests after it.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.journal import Journal, append

MOST_SESSIONS = 12
"""A machine on which every test hangs must end, too."""

EXIT_NOTHING_RAN = 5


def run(report: Path, command: Sequence[str]) -> int:
    """Run sessions until one completes; return 0 if all tests passed."""
    options: tuple[str, ...] = ()
    for number in range(MOST_SESSIONS):
        code = subprocess.run([*command, f"--report={report}", *options], check=False).returncode
        journal = Journal.read(report)
        if journal.is_finished and number and code == EXIT_NOTHING_RAN:
            code = 0  # the test that ended the session was the last one
        if journal.is_finished or not journal.running:
            break
        reason = "; ".join(journal.endings) or f"no rank reported an error, exit code {code}"
        for test in journal.running:
            sys.stdout.write(f"\n== {test} ended its session: {reason}\n")
            outcome = {"outcome": "failed", "reason": f"ended its session: {reason}"}
            append(report, {"test": test, **outcome, "seconds": 0.0})
        sys.stdout.flush()
        options = ("--continue",)
    failed = any(test["outcome"] == "failed" for test in Journal.read(report).tests)
    return code or int(failed)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
