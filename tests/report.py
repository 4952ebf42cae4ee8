"""Print the closing table of ``make test``: results, reasons of skips, the slowest tests."""

import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.python_compat import Self
from tests.harness.journal import Journal

SLOWEST = 20
LAST_LINES = 15
EXIT_NOTHING_RAN = 5
_HEAD = re.compile(r"still runs after|\] \S+::\S+ failed$|Fatal Python error|signal \d|Signal:")
"""How a rank says that its test hangs, fails or ends the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Hold the results of a launch of the suite; ``openmpi-3`` means Open MPI on three ranks."""

    name: str
    problem: str
    skipped: str
    tests: list[dict[str, Any]]
    num_not_run: int = 0
    last_words: tuple[str, ...] = ()
    """Of a launch with a problem: what ranks reported, and its last lines."""

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Read the report, the exit code and the reason of a skipped launch."""
        skipped = _text(folder / f"{name}.skipped")
        if skipped:
            feature, _, _ = name.partition("-")
            required = feature in os.environ.get("HPCTRAIN_REQUIRE", "").split(",")
            problem = f"required, but {skipped}" if required else ""
            return cls(name=name, problem=problem, skipped=skipped, tests=[])
        journal = Journal.read(folder / f"{name}.jsonl")
        problem = _problem(name, journal.facts, _text(folder / f"{name}.rc") or "none")
        return cls(
            name=name,
            problem=problem,
            skipped="",
            tests=journal.tests,
            num_not_run=journal.num_not_run,
            last_words=_last_words(folder / f"{name}.log") if problem else (),
        )

    @property
    def row(self) -> str:
        """Return one line: the counts, then the fault of the launch as a whole."""
        counts = Counter(test["outcome"] for test in self.tests)
        seconds = sum(test["seconds"] for test in self.tests)
        numbers = [counts[outcome] for outcome in ("passed", "failed", "skipped")]
        numbers.append(self.num_not_run)
        text = "".join(f"{number:9d}" for number in numbers) + f"{seconds:9.1f} s"
        return f"{self.name:12}{text}  {self.problem or self.skipped}".rstrip()


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _last_words(path: Path) -> tuple[str, ...]:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    heads = [line for line in lines if _HEAD.search(line)]
    return (*heads[-LAST_LINES:], "...", *lines[-LAST_LINES:]) if lines else ()


def _problem(name: str, facts: dict[str, Any], code: str) -> str:
    vendor, ranks = name.split("-")
    found = str(facts.get("mpi", "")).replace(" ", "").lower()
    if not facts:
        return f"no report, exit code {code}"
    if facts["ranks"] != int(ranks) or vendor not in found:
        return f"ran on {facts['ranks']} ranks of {facts['mpi']}"
    if code == str(EXIT_NOTHING_RAN):
        return "no test for this number of ranks"
    return "" if code == "0" else f"exit code {code}"


def table(launches: list[Launch]) -> list[str]:
    """Return the lines of the closing table; the last one contains only the sums."""
    lines = [f"{'launch':12}{'passed':>9}{'failed':>9}{'skipped':>9}{'not run':>9}{'time':>11}"]
    lines += [launch.row for launch in launches]
    tests = [(launch.name, test) for launch in launches for test in launch.tests]
    lines += _reasons("skipped", tests)
    slowest = sorted(tests, key=lambda test: -test[1]["seconds"])[:SLOWEST]
    lines += ["", f"slowest {len(slowest)}"]
    lines += [f"{test['seconds']:8.2f} s  {name:12}{test['test']}" for name, test in slowest]
    # Failures come last, because readers look at the end of a long output.
    lines += _reasons("failed", tests)
    broken = [
        launch
        for launch in launches
        if launch.num_not_run or (launch.problem and not _told(launch))
    ]
    for launch in broken:
        if launch.last_words:
            lines += ["", f"{launch.name}: {launch.problem}"]
            lines += [f"  {line}" for line in launch.last_words]
    sums = Counter(test["outcome"] for _, test in tests)
    # A launch that failed outside of its tests counts as a failure, a skipped launch as a skip.
    sums["failed"] += len(broken)
    sums["skipped"] += sum(bool(launch.skipped) and not launch.problem for launch in launches)
    last = ", ".join(f"{sums[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return [*lines, "", last]


def _told(launch: Launch) -> bool:
    """Return True if failed tests explain the fault of the launch."""
    return any(test["outcome"] == "failed" for test in launch.tests)


def _reasons(outcome: str, tests: list[tuple[str, dict[str, Any]]]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, test in tests:
        if test["outcome"] == outcome:
            places[f"{test['test']}: {test['reason']}"].append(name)
    return ["", outcome, *(f"  {what} [{', '.join(at)}]" for what, at in places.items())] * bool(
        places
    )


def main(folder: str, *names: str) -> int:
    """Print the table; return 1 if any launch failed."""
    launches = [Launch.read(Path(folder), name) for name in names]
    sys.stdout.write("\n".join(table(launches)) + "\n")
    return int(any(each.problem or each.num_not_run or _told(each) for each in launches))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
