"""Run Horovod's own tests against hpctrain and print what became of each.

    python -m tests.conformance.suite HOROVOD_SRC [--ranks 1 2 3 4] [-k EXPRESSION]

HOROVOD_SRC is a checkout of Horovod 0.28.1, which is read and not changed:

    git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod

``--horovod PYTHON`` runs them with the Horovod of that Python instead, for comparison.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.conformance.expected import EXPECTED
from tests.conformance.launches import ROOT, Suite
from tests.conformance.verdicts import Outcome, Record

FILES = (
    "test/parallel/test_torch.py",
    "test/parallel/test_adasum_pytorch.py",
    "test/parallel/test_timeline.py",
)
ALONE = "test/single/test_torch_elastic.py"
"""What it counts is right for one rank only."""
HOW_TO_GET_IT = (
    "Horovod's own tests were not run: they need a checkout of Horovod 0.28.1.\n"
    "  git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod DIR\n"
    "  make conformance HOROVOD_SRC=DIR\n"
)


def main(arguments: list[str]) -> int:
    """Run the files, print the table; 1 if a test failed that should not have, or the reverse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", help="a checkout of Horovod")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--horovod", type=Path, help="test the Horovod of this Python instead")
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
    suite = Suite(horovod=options.horovod, select=options.select, test_limit_s=options.test_limit)
    found: dict[int, Record] = {}
    for ranks in options.ranks:
        found[ranks] = {}
        for file in (source / name for name in (FILES if ranks > 1 else [ALONE])):
            log = options.logs / f"{file.stem}-{ranks}.log"
            found[ranks] |= suite.run(file, ranks, log)
            sys.stdout.write(f"{file.name} on {ranks} ranks is done; its log is {log}\n")
            sys.stdout.flush()
    sys.stdout.write("\n".join(table(found)) + "\n")
    return int(any(word_of(t, o) in WRONG for record in found.values() for t, o in record.items()))


WRONG = ("FAILED", "PASSED, EXPECTED TO FAIL")


def word_of(test: str, outcome: Outcome) -> str:
    """Return what the table says about a test: as expected, or in capitals."""
    if test not in EXPECTED:
        return outcome.outcome.upper() if outcome.outcome == "failed" else outcome.outcome
    return {"failed": "expected", "passed": WRONG[1]}.get(outcome.outcome, outcome.outcome)


def table(found: dict[int, Record]) -> list[str]:
    """Make a line for each test, a column for each number of ranks; then reasons and sums."""
    tests = list(dict.fromkeys(test for record in found.values() for test in record))
    width = max((len(test) for test in tests), default=0)
    lines = ["", f"{'':{width}}" + "".join(f"{ranks:>9} ranks" for ranks in found)]
    for test in tests:
        words = [word_of(test, r[test]) if test in r else "not run" for r in found.values()]
        lines.append(f"{test:{width}}" + "".join(f"{word:>15}" for word in words))
    lines += ["", *_reasons(found)]
    for ranks, record in found.items():
        sums = Counter(word_of(test, outcome) for test, outcome in record.items())
        counted = ", ".join(f"{count} {word}" for word, count in sorted(sums.items()))
        lines.append(f"{ranks} ranks: {counted}")
    return lines


def _reasons(found: dict[int, Record]) -> list[str]:
    lines = []
    for ranks, record in found.items():
        for test, outcome in record.items():
            if outcome.outcome == "failed":
                why = EXPECTED.get(test, outcome.reason)
                lines.append(f"{word_of(test, outcome)}, {ranks} ranks: {test}: {why}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
