"""Run torch's own tests over gloo and over hpctrain: a test that passes over gloo must pass.

    python -m tests.conformance.torch_suite [TORCH_SRC] [--ranks 2 3 4] [-k EXPRESSION]

The suite has the tests in torch's wheel. With TORCH_SRC, a checkout of PyTorch, it also has the
tests in ``test/distributed`` that start processes and need no accelerator. The checkout must have
the version of the installed torch, and is not changed:

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.conformance.launches import ROOT, TORCH_BACKEND, Record, Suite

WHEEL = ROOT / "tests/conformance/torch_wheel.py"
FOLDER = "test/distributed"
FILES = (
    "test_c10d_common.py",
    "test_c10d_functional_native.py",
    "test_c10d_gloo.py",
    "test_c10d_object_collectives.py",
    "test_device_mesh.py",
    "test_functional_api.py",
    "_composable/*.py",
    "_composable/fsdp/test_*.py",
    "_composable/test_composability/test_*.py",
    "algorithms/**/test_*.py",
    "checkpoint/**/test_*.py",
    "fsdp/test_*.py",
    "optim/test_*.py",
    "pipelining/test_*.py",
    "tensor/**/test_*.py",
)
"""Of the checkout: what uses ``torch.distributed``, not what tests NCCL or a store."""

EXCLUDED = {
    "test_get_backend": "asks whether the backend is called gloo",
}
"""Tests that pass over gloo and must fail over hpctrain, and why."""

RANKS = (1, 2, 3, 4, 6, 8)  # numbers of processes of the tests
HOW_TO_GET_IT = (
    "Torch's own tests: those in its wheel; the others need a checkout of PyTorch {0}.\n"
    "  git clone --depth 1 --branch v{0} https://github.com/pytorch/pytorch DIR\n"
    "  make conformance TORCH_SRC=DIR\n"
)


def compare(gloo: Record, ours: Record) -> Iterator[str]:
    """Yield a description of each test that passes over gloo but not over hpctrain."""
    for test, with_gloo in gloo.items():
        if with_gloo.outcome != "passed":
            continue
        found, reason = ours.get(test), EXCLUDED.get(test.rpartition("::")[2])
        has_passed = found is not None and found.outcome == "passed"
        if has_passed and reason:
            yield f"{test} passed, and is excluded: it {reason}"
        elif not has_passed and not reason:
            yield f"{test} failed: {found.reason if found else 'no verdict'}"


class Runs:
    """Run files on ranks, and print a line of the table for each."""

    def __init__(self, logs: Path, select: str, test_limit_s: float) -> None:
        self._logs, self._select, self._test_limit_s = logs, select, test_limit_s
        self.wrong: list[str] = []
        self.lines: list[str] = []

    def of(self, file: Path, name: str, ranks: int) -> None:
        """Run a file over gloo and, if a test passes, over hpctrain."""
        gloo = self.run(file, name, ranks, "gloo")
        passed = {test for test, found in gloo.items() if found.outcome == "passed"}
        if not passed:
            if reason := next((each.reason for each in gloo.values() if each.reason), ""):
                sys.stdout.write(f"{name:60} {ranks:>5} {0:>6}      - {reason[:60]}\n")
            return
        ours = self.run(file, name, ranks, "hpctrain")
        both = sum(ours[test].outcome == "passed" for test in passed & ours.keys())
        self.wrong += [f"{ranks} ranks: {text}" for text in compare(gloo, ours)]
        self.lines.append(f"{name:60} {ranks:>5} {len(passed):>6} {both:>6}")
        sys.stdout.write(self.lines[-1] + "\n")
        sys.stdout.flush()

    def run(self, file: Path, name: str, ranks: int, backend: str) -> Record:
        """Run a file over one backend."""
        suite = Suite(
            options=("--noconftest", "-p", "tests.conformance.torch_ranks"),
            environ={
                TORCH_BACKEND: backend,
                "PYTHONPATH": f"{ROOT}:{file.parent}",  # for modules next to the file
            },
            select=self._select,
            test_limit_s=self._test_limit_s,
        )
        stem = name.removesuffix(".py").replace("/", "-")
        return suite.run(file, ranks, self._logs / f"{stem}-{ranks}-{backend}.log")


def main(arguments: list[str]) -> int:
    """Run the files and print the table; return 1 if a test passes only over gloo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", help="a checkout of PyTorch")
    parser.add_argument("--files", nargs="+", help=f"only these patterns, in {FOLDER}")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--logs", type=Path, default=ROOT / "build/reports/torch")
    parser.add_argument("--test-limit", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("-k", dest="select", default="", help="tests to run, as pytest has it")
    options = parser.parse_args(arguments)
    files = {} if options.files else {WHEEL: "torch's wheel"}
    if options.source is None:
        sys.stdout.write(HOW_TO_GET_IT.format(torch.__version__.partition("+")[0]))
    else:
        folder = options.source.resolve() / FOLDER
        patterns = options.files or FILES
        found = sorted({file for pattern in patterns for file in folder.glob(pattern)})
        if not found:
            parser.error(f"{folder} has no file {' or '.join(patterns)}")
        files |= {file: str(file.relative_to(folder)) for file in found}
    runs = Runs(options.logs, options.select, options.test_limit)
    sys.stdout.write(f"{'passed':60} {'ranks':>5} {'gloo':>6} {'ours':>6}\n")
    for file, name in files.items():
        for ranks in options.ranks:
            runs.of(file, name, ranks)
    sys.stdout.write("".join(f"{text}\n" for text in runs.wrong))
    return int(bool(runs.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
