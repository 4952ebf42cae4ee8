"""Run a file of tests of another project on several ranks, in as many launches as necessary."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.launch import mpiexec
from tests.conformance import recorder
from tests.conformance.recorder import FINISHED

LOST = "a rank ended in it, or near it, without a word; see the log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the outcome of a test: ``passed``, ``failed`` or ``skipped``."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


Record = dict[str, Outcome]
"""Last word of one rank about each test; ``started`` where it did not get further."""


def read(file: Path) -> Record:
    """Read the record of one rank; empty if the rank has no record."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {line.pop("test"): Outcome(**line) for line in lines}


def have_finished(records: Sequence[Record]) -> bool:
    """Return True if every rank has completed its tests."""
    return all("" in record and record[""].outcome == FINISHED for record in records)


def decide(records: Sequence[Record]) -> Record:
    """Return the verdicts of one launch; tests that the end of other ranks interrupted have none.

    A test fails if it failed on any rank. If ranks ended without a failure, the first unfinished
    test of any rank fails.
    """
    tests = list(dict.fromkeys(test for record in records for test in record if test))
    decided = {test: found for test in tests if (found := _verdict(test, records))}
    if any(verdict.outcome == "failed" for verdict in decided.values()) or have_finished(records):
        return decided
    lost = next((test for test in tests if test not in decided), None)
    return decided | ({lost: Outcome("failed", LOST)} if lost else {})


def _verdict(test: str, records: Sequence[Record]) -> Outcome | None:
    found = [record.get(test, Outcome("started")) for record in records]
    failed = [(rank, each) for rank, each in enumerate(found) if each.outcome == "failed"]
    if failed:
        ranks = "on every rank" if len(failed) == len(found) else f"rank {failed[0][0]}"
        return Outcome("failed", f"{ranks}: {failed[0][1].reason}")
    if any(each.outcome == "started" for each in found):
        return None
    # Some tests are skipped by ranks that do not take part in them.
    return max(found, key=lambda each: (each.outcome == "passed", each.seconds))


ROOT = Path(__file__).parents[2]
TORCH_BACKEND = "TORCH_SUITE_BACKEND"
"""Variable that says which backend torch's tests ask for groups: gloo, or else hpctrain."""

NOTHING_LEFT = 5  # exit code of pytest when every test has its verdict already


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Run test files with fixed settings."""

    horovod: Path | None = None
    """A Python that has Horovod: its own is tested. Without one, hpctrain is."""
    options: tuple[str, ...] = ("-p", "tests.conformance.alias")
    """Of pytest, where hpctrain is tested."""
    environ: Mapping[str, str] = field(default_factory=dict)  # added for the ranks
    select: str = ""  # expression of pytest's ``-k``
    test_limit_s: float = 120.0  # for one test; its stacks are then in the log
    launch_limit_s: float = 900.0  # for one launch, in case no stacks can be printed

    def run(self, file: Path, ranks: int, log: Path) -> Record:
        """Return the verdict of each test of a file; write its output to ``log``."""
        verdicts: Record = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        while True:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                (folder / recorder.DONE).write_text("".join(f"{test}\n" for test in verdicts))
                code = self._launch(file, ranks, folder, log)
                records = [read(folder / f"{rank}.jsonl") for rank in range(ranks)]
            found = decide(records)
            is_news = not found.keys() <= verdicts.keys()
            verdicts |= found
            if have_finished(records) and code in (0, NOTHING_LEFT):
                return verdicts
            if not is_news or have_finished(records):
                return verdicts | {file.name: Outcome("failed", f"exit code {code}; see {log}")}

    def _launch(self, file: Path, ranks: int, folder: Path, log: Path) -> int:
        python = self.horovod or Path(sys.executable)
        mpirun = ["--mpirun", str(python.parent / "mpirun")] if self.horovod else []
        plugins = ["-p", "tests.conformance.recorder", *(() if self.horovod else self.options)]
        line = [
            *(sys.executable, "-m", "hpctrain", "launch", "-n", str(ranks), "--no-bind", *mpirun),
            *("--timeout", str(self.launch_limit_s), "--"),
            *(str(python), "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(file.parent)),
            *("-p", "no:cacheprovider", *plugins),
            *("--records", str(folder), "--limit", str(self.test_limit_s), "-k", self.select),
            str(file),
        ]
        environ = mpiexec.environment(
            os.environ
            | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HPCTRAIN_PROBE": "off"}
            | self.environ
        )
        with log.open("a") as output:
            done = subprocess.run(
                line, cwd=folder, env=environ, stdout=output, stderr=output, check=False
            )
        return done.returncode
