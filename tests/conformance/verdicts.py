"""What the records of all ranks say about each test."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.recorder import FINISHED

LOST = "a rank ended in it, or near it, without a word; see the log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a test: ``passed``, ``failed`` or ``skipped``."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


Record = dict[str, Outcome]
"""Last word of one rank about each test; ``started`` where it did not get further."""


def read(file: Path) -> Record:
    """Read the record of one rank; empty where there is none."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {line.pop("test"): Outcome(**line) for line in lines}


def have_finished(records: Sequence[Record]) -> bool:
    """Say whether every rank came to the end of its tests."""
    return all("" in record and record[""].outcome == FINISHED for record in records)


def decide(records: Sequence[Record]) -> Record:
    """Return the verdicts of one launch; tests that other ranks cut short have none.

    A test fails if it failed on any rank. Where ranks ended without a failure, the first test
    that some of them left open is to blame.
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
    # Some tests are skipped by the ranks that have no part in them.
    return max(found, key=lambda each: (each.outcome == "passed", each.seconds))
