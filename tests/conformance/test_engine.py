"""Check that the laws of training and of the runtime hold with Horovod's operations."""

import os
import re
import sys
from pathlib import Path

import pytest

from hpctrain.launch import mpiexec
from tests.harness.journal import Journal
from tests.processes import ended

ROOT = Path(__file__).parents[2]
LAWS = ("tests/comm", "tests/compress", "tests/runtime", "tests/gradients", "tests/train")
BY_RANKS = {1: ("tests/runtime/test_failures.py",), 2: LAWS, 4: LAWS}

OF_ENGINE = {
    "tests/gradients/test_gradients.py::"
    "test_gradients_beyond_float16_stay_finite_in_a_node_with_and_without_predivision[one node]": (
        "Horovod sums numbers of 16 bits as such, inside a node too"
    ),
    "tests/gradients/test_reducer.py::"
    "test_bucket_of_a_world_that_was_shut_down_is_rejected[one node]": (
        "Horovod has no buckets in node memory"
    ),
}
EXCEPTIONS = {
    1: {
        "tests/runtime/test_failures.py::"
        "test_idle_ranks_use_less_than_one_percent_of_a_core_and_may_finish_early"
        "[1]": ("Horovod's thread asks the other ranks for work a thousand times a second"),
    },
    2: OF_ENGINE,
    4: OF_ENGINE,
}
"""Tests that fail, and why, by the number of ranks; each must still fail."""

NEEDS_NODE_MEMORY = re.compile(r"ConfigError: .* share (the )?memory")
"""Error of ``shard="node"`` and Hogwild, which Horovod's engine does not support."""

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.launches,
    pytest.mark.requires("horovod"),
    pytest.mark.limit(2400),
]


@pytest.mark.parametrize("ranks", BY_RANKS)
def test_all_laws_but_the_listed_ones_hold_with_horovod(ranks: int, tmp_path: Path) -> None:
    launch = ["-m", "hpctrain", "launch", "-n", str(ranks), "--", sys.executable]
    report = tmp_path / "report.jsonl"
    line = [
        *(sys.executable, *(launch if ranks > 1 else ())),
        *("-m", "pytest", "-q", "--report", str(report), *BY_RANKS[ranks]),
    ]
    environ = mpiexec.environment(os.environ | {"HPCTRAIN_ENGINE": "horovod"})
    done = ended(line, cwd=ROOT, env=environ, timeout=2300)
    journal = Journal.read(report)
    assert journal.is_finished, done.stdout[-4000:] + done.stderr[-4000:]
    failed = {
        test["test"]
        for test in journal.tests
        if test["outcome"] == "failed" and not NEEDS_NODE_MEMORY.search(test["reason"])
    }
    passed = {test["test"] for test in journal.tests if test["outcome"] == "passed"}
    assert len(passed) > 10
    assert failed == {*EXCEPTIONS[ranks]}, done.stdout[-8000:]
