"""Check that verdicts of the ranks are complete and assigned to the right tests."""

import pytest

from tests.conformance.expected import expected_failures
from tests.conformance.launches import LOST, Outcome, Suite, decide, have_finished, read
from tests.conformance.suite import HOW_TO_GET_IT, Table, main
from tests.harness.pace import scaled

PASSED, STARTED, SKIPPED = Outcome("passed", "", 1.0), Outcome("started"), Outcome("skipped", "no")
FAILED, FINISHED = Outcome("failed", "wrong"), Outcome("finished")

FAKE = """
import os
import time

import pytest

import horovod.torch as hvd
from common import temppath

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])

def test_is_hpctrain():
    assert hvd.init.__module__.startswith("hpctrain")

def test_fails_on_one_rank():
    assert RANK == 0

def test_is_skipped():
    pytest.skip("no reason")

def test_hangs():
    time.sleep(100)

def test_ends_without_a_word():
    if RANK == 1:
        os._exit(7)
    time.sleep(100)

def test_comes_last():
    with temppath() as path:
        assert path
"""
COMMON = """
import mock
from contextlib import nullcontext
from horovod.runner.util.threads import in_thread
from horovod.common.util import env

def temppath():
    in_thread(target=lambda: None).join()
    return nullcontext("path")
"""


@pytest.mark.parametrize(
    ("records", "verdicts"),
    [
        # it passes if it passed on all ranks that took part
        ([{"a": PASSED, "b": SKIPPED}, {"a": PASSED, "b": PASSED}], {"a": PASSED, "b": PASSED}),
        ([{"c": SKIPPED}, {"c": SKIPPED}], {"c": SKIPPED}),
        # it fails if it failed on any rank, and interrupted tests stay open
        (
            [{"a": PASSED, "b": FAILED}, {"a": PASSED, "b": PASSED, "c": STARTED}],
            {"a": PASSED, "b": Outcome("failed", "rank 0: wrong")},
        ),
        ([{"b": FAILED}, {"b": FAILED}], {"b": Outcome("failed", "on every rank: wrong")}),
        # if ranks ended without a record, the first open test fails
        ([{"a": PASSED, "b": STARTED}, {"a": STARTED}], {"a": Outcome("failed", LOST)}),
        ([{}, {}], {}),
        ([{"a": PASSED, "": FINISHED}, {"a": PASSED, "": FINISHED}], {"a": PASSED}),
    ],
)
def test_verdict_depends_on_all_ranks(records, verdicts):
    assert decide(records) == verdicts


def test_a_launch_has_finished_when_every_rank_has():
    assert not have_finished([{"a": PASSED, "": FINISHED}, {"a": PASSED}])
    assert have_finished([{"a": PASSED, "": FINISHED}, {"": FINISHED}])


def test_truncated_line_is_ignored(tmp_path):
    file = tmp_path / "0.jsonl"
    assert read(file) == {}
    file.write_text(
        '{"test": "a", "outcome": "started", "reason": "", "seconds": 0.0}\n'
        '{"test": "a", "outcome": "passed", "reason": "", "seconds": 1.0}\n{"test": "b", "outc'
    )
    assert read(file) == {"a": PASSED}


def test_an_expected_failure_that_passes_is_as_wrong_as_a_failure():
    for outcome, word, is_wrong in [
        (FAILED, "expected", False),
        (SKIPPED, "skipped", False),
        (PASSED, "NOT EXPECTED", True),
    ]:
        table = Table({2: {"a": outcome}}, {2: {"a": "why"}})
        assert (table.word(2, "a"), table.is_wrong()) == (word, is_wrong)


def test_table_has_every_test_with_reasons_of_failures():
    found = {2: {"a": PASSED, "b": FAILED, "c": FAILED}, 3: {"a": PASSED}}
    table = Table(found, {2: {"c": "why"}, 3: {"c": "why"}})
    assert table.is_wrong()
    text = "\n".join(table.lines())
    assert "FAILED, 2 ranks: b: wrong" in text
    assert "expected, 2 ranks: c: why" in text
    assert "2 ranks: 1 FAILED, 1 expected, 1 passed" in text
    assert "3 ranks: 1 passed" in text


def test_failures_of_horovod_itself_are_expected_of_hpctrain():
    for ranks in (2, 3, 4):
        with_horovod = expected_failures(ranks, horovod=True)
        assert with_horovod.items() < expected_failures(ranks, horovod=False).items()


def test_missing_checkout_raises_with_the_command_to_get_one(capsys, tmp_path):
    assert main([]) == 0
    assert capsys.readouterr().out == HOW_TO_GET_IT
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "is no checkout of Horovod" in capsys.readouterr().err


@pytest.mark.conformance
@pytest.mark.limit(300)
@pytest.mark.launches
def test_every_test_gets_a_verdict_for_any_behaviour_of_ranks(tmp_path):
    file, log = tmp_path / "test_fake.py", tmp_path / "logs/log"
    file.write_text(FAKE)
    (tmp_path / "common.py").write_text(COMMON)
    limit_s = round(scaled(4))
    found = Suite(test_limit_s=limit_s).run(file, 2, log)
    reasons = {
        test.partition("::test_")[2]: (outcome.outcome, outcome.reason.rpartition(": ")[2])
        for test, outcome in found.items()
    }
    assert reasons == {
        "is_hpctrain": ("passed", ""),
        "fails_on_one_rank": ("failed", "assert 1 == 0"),
        "is_skipped": ("skipped", "no reason"),
        "hangs": ("failed", f"still ran after {limit_s} s; its stacks are in the log"),
        "ends_without_a_word": ("failed", LOST),
        "comes_last": ("passed", ""),
    }
    assert log.read_text().count("in test_hangs") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "common.py",
        "logs",
        "test_fake.py",
    ]
