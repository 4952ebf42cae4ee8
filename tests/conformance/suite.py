"""Run Horovod's own tests against hpctrain and print the outcome of each test.

    python -m tests.conformance.suite HOROVOD_SRC [--ranks 1 2 3 4] [-k EXPRESSION]

HOROVOD_SRC is a checkout of Horovod 0.28.1, which is read and not changed:

    git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod

``--horovod PYTHON`` runs the tests with the Horovod of another Python installation, for
comparison. ``--engine horovod`` runs the tests with hpctrain on the engine of the installed
Horovod.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from hpctrain.core.config import ENGINES
from tests.conformance.expected import expected_failures
from tests.conformance.launches import ROOT, Outcome, Record, Suite

FILES = (
    "test/parallel/test_torch.py",
    "test/parallel/test_adasum_pytorch.py",
    "test/parallel/test_timeline.py",
)
ALONE = "test/single/test_torch_elastic.py"  # its counts are correct for one rank only
HOW_TO_GET_IT = (
    "Horovod's own tests were not run: they need a checkout of Horovod 0.28.1.\n"
    "  git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod DIR\n"
    "  make conformance HOROVOD_SRC=DIR\n"
)


def main(arguments: list[str]) -> int:
    """Run the files and print the table; return 1 if a test failed or passed unexpectedly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", help="a checkout of Horovod")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--horovod", type=Path, help="test the Horovod of this Python instead")
    parser.add_argument("--engine", choices=ENGINES, default="hpctrain", help="of hpctrain")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/reports/horovod")
    parser.add_argument("--test-limit", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("-k", dest="select", default="", help="tests to run, as pytest has it")
    options = parser.parse_args(arguments)
    if options.source is None:
        sys.stdout.write(HOW_TO_GET_IT)
        return 0
    source = options.source.resolve()
    if missing := [name for name in (*FILES, ALONE) if not (source / name).is_file()]:
        parser.error(f"{source} is no checkout of Horovod, it lacks {', '.join(missing)}")
    suite = Suite(
        horovod=options.horovod,
        environ={"HPCTRAIN_ENGINE": options.engine},
        select=options.select,
        test_limit_s=options.test_limit,
    )
    found: dict[int, Record] = {}
    for ranks in options.ranks:
        found[ranks] = {}
        for file in (source / name for name in (FILES if ranks > 1 else [ALONE])):
            log = options.logs / f"{file.stem}-{ranks}.log"
            found[ranks] |= suite.run(file, ranks, log)
            sys.stdout.write(f"{file.name} on {ranks} ranks is done; its log is {log}\n")
            sys.stdout.flush()
    horovod = options.horovod is not None
    table = Table(found, {n: expected_failures(n, horovod=horovod) for n in options.ranks})
    sys.stdout.write("\n".join(table.lines()) + "\n")
    return int(table.is_wrong())


class Table:
    """Hold the outcome of each test on each number of ranks."""

    def __init__(self, found: dict[int, Record], expected: dict[int, dict[str, str]]) -> None:
        self.found, self.expected = found, expected

    def is_wrong(self) -> bool:
        """Return True if a test failed unexpectedly, or passed unexpectedly."""
        return any(
            self.word(ranks, test).isupper()
            for ranks, record in self.found.items()
            for test in record
        )

    def word(self, ranks: int, test: str) -> str:
        """Return the word for a test: unexpected outcomes are in capitals."""
        outcome = self.found[ranks].get(test, Outcome("")).outcome
        if test not in self.expected[ranks]:
            return "FAILED" if outcome == "failed" else outcome
        return {"failed": "expected", "passed": "NOT EXPECTED"}.get(outcome, outcome)

    def lines(self) -> list[str]:
        """Return the table, with a line per test and a column per number of ranks."""
        tests = list(dict.fromkeys(test for record in self.found.values() for test in record))
        width = max((len(test) for test in tests), default=0)
        lines = ["", f"{'':{width}}" + "".join(f"{ranks:>8} ranks" for ranks in self.found)]
        for test in tests:
            words = [f"{self.word(ranks, test):>14}" for ranks in self.found]
            lines.append(f"{test:{width}}" + "".join(words))
        return [*lines, "", *self._reasons(), *self._sums()]

    def _reasons(self) -> list[str]:
        return [
            f"{self.word(ranks, test)}, {ranks} ranks: {test}: "
            + self.expected[ranks].get(test, outcome.reason)
            for ranks, record in self.found.items()
            for test, outcome in record.items()
            if self.word(ranks, test) not in ("passed", "skipped")
        ]

    def _sums(self) -> list[str]:
        lines = []
        for ranks, record in self.found.items():
            sums = Counter(self.word(ranks, test) for test in record)
            counted = ", ".join(f"{count} {word}" for word, count in sorted(sums.items()))
            lines.append(f"{ranks} ranks: {counted}")
        return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
