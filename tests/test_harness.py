"""Check the harness: each test runs pytest on several ranks of a small test file."""

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.launch import mpiexec
from tests.harness import features, preload
from tests.harness.journal import Journal
from tests.harness.pace import slowness

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.launches


@dataclass
class Session:
    """Hold the results of one launch of a test file."""

    code: int
    text: str
    journal: Journal

    def outcomes(self) -> dict[str, str]:
        return {test["test"].split("::")[1]: test["outcome"] for test in self.journal.tests}


def launched(
    folder: Path, body: str, ranks: int, *, continued: bool = False, **environ: str
) -> Session:
    """Run a test file on one or more ranks; a single rank needs no launcher."""
    file, report = folder / "tests/test_tiny.py", folder / "report.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.with_name("conftest.py").write_text('pytest_plugins = ["tests.harness.plugin"]\n')
    file.write_text(f"import os, time\nimport pytest\n\n{textwrap.dedent(body)}")
    argv = [*preload.python(), "-m", "pytest", "-q", "--color=no", "-c", str(ROOT / "setup.cfg")]
    argv += ["--rootdir", str(folder)]
    argv += [] if continued else [f"--report={report}"]
    line = argv if ranks == 1 else mpiexec.command(argv, num_ranks=ranks)
    runner = [sys.executable, "-m", "tests.session", str(report)] * continued
    done = subprocess.run(
        [*runner, *line],
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)} | environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=50 * slowness(),
    )
    return Session(done.returncode, done.stdout, Journal.read(report))


@pytest.fixture
def launch(tmp_path):
    def run(body: str, *, ranks: int = 2, continued: bool = False, **environ: str) -> Session:
        return launched(tmp_path, body, ranks, continued=continued, **environ)

    return run


GENTLE = """
    import hpctrain

    RANK = os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK"))

    def test_one(): pass

    @pytest.mark.ranks(3, 5)
    def test_three_or_five(): pass

    @pytest.mark.ranks(2)
    def test_two(): pass

    @pytest.mark.conformance
    @pytest.mark.ranks(3)
    def test_long(): pass

    @pytest.mark.ranks(3)
    def test_sum(world):
        assert world.allreduce(world.rank) == 3

    @pytest.mark.ranks(3)
    def test_bad(world):
        assert world.rank != 1, "rank one is odd"

    @pytest.fixture
    def before():
        if RANK == "1":
            raise OSError(5)

    @pytest.fixture
    def after():
        yield
        if RANK == "1":
            raise OSError(5)

    @pytest.mark.ranks(3)
    def test_before(before, world):
        world.barrier()

    @pytest.mark.ranks(3)
    def test_after(after, world):
        world.barrier()

    @pytest.mark.ranks(3)
    def test_skipped(world):
        pytest.skip("no disk")

    @pytest.mark.ranks(3)
    def test_skipped_by_some(world):
        if world.rank == 0:
            pytest.skip("no disk")

    @pytest.mark.ranks(3)
    def test_init(world):
        hpctrain.init()
        assert hpctrain.size() == 3

    @pytest.mark.ranks(3)
    def test_fails_after_init(world):
        assert world.rank

    @pytest.mark.ranks(3)
    def test_last(world):
        world.barrier()
"""
"""Tests of which none ends the session: what one does must not reach the next."""


@pytest.fixture(scope="module")
def gentle(tmp_path_factory) -> Session:
    return launched(tmp_path_factory.mktemp("gentle"), GENTLE, 3, TEST_HANG_S="20")


def reason_of(session: Session, name: str) -> str:
    return next(t["reason"] for t in session.journal.tests if t["test"].endswith(f"::{name}"))


def test_all_ranks_have_one_verdict_on_the_tests_that_name_their_number(gentle):
    assert gentle.code != 0
    assert gentle.journal.facts["ranks"] == 3
    assert gentle.outcomes() == {
        "test_three_or_five": "passed",
        "test_sum": "passed",
        "test_bad": "failed",
        "test_before": "failed",
        "test_after": "failed",
        "test_skipped": "skipped",
        "test_skipped_by_some": "failed",
        "test_init": "passed",
        "test_fails_after_init": "failed",
        "test_last": "passed",
    }
    assert "1 skipped" in gentle.text


def test_failure_on_one_rank_is_reported_with_the_rank(gentle):
    expected = "failed on some ranks only: rank 1: AssertionError: rank one is odd"
    assert expected in reason_of(gentle, "test_bad")
    for name in ("bad", "before", "after"):
        assert f"[rank 1] tests/test_tiny.py::test_{name} failed" in gentle.text


def test_skip_has_a_reason_and_on_one_rank_only_is_a_failure(gentle):
    assert reason_of(gentle, "test_skipped") == "no disk"
    assert "skipped on some ranks only: rank 0" in reason_of(gentle, "test_skipped_by_some")


def test_a_long_test_runs_only_if_it_is_asked_for(launch):
    body = """
        @pytest.mark.conformance
        def test_long(): pass

        def test_short(): pass
    """
    done = launch(body, ranks=1, PYTEST_ADDOPTS="-m conformance")
    assert done.outcomes() == {"test_long": "passed"}


def test_each_of_many_cases_runs_on_one_of_its_sizes_if_it_is_asked_for(launch):
    body = """
        @pytest.mark.ranks(1, 2)
        @pytest.mark.parametrize("case", range(5))
        def test_many(case): pass

        LONG = pytest.param(1, marks=pytest.mark.conformance)

        @pytest.mark.ranks(1, 2)
        @pytest.mark.parametrize("case", [0, LONG])
        def test_few(case): pass
    """
    few, many = {"test_few[0]"}, {f"test_many[{i}]" for i in range(5)}
    one, two = (set(launch(body, ranks=n, PYTEST_ADDOPTS="--spread").outcomes()) for n in (1, 2))
    assert one & two == few
    assert one | two == few | many
    assert {len(one), len(two)} == {3, 4}
    every = launch(body, ranks=1, PYTEST_ADDOPTS="-m 'conformance or sweep'").outcomes()
    assert {*every} == {"test_few[1]"} | many


def test_a_file_that_does_not_show_its_ranks_is_an_error(launch):
    body = """
        pytestmark = getattr(pytest.mark, "ranks")(1, 2)

        def test_one(): pass
    """
    done = launch(body, ranks=1)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert "test_one ((1, 2) ranks) has neither; add one" in done.text


def test_a_hang_prints_the_stacks_of_all_ranks_and_ends(launch):
    done = launch("""
        import hpctrain

        hpctrain.init()  # before the clock starts

        @pytest.mark.limit(1)
        @pytest.mark.ranks(2)
        def test_stuck(world):
            if world.rank == 0:
                world.barrier()
            time.sleep(60)
    """)  # fmt: skip
    assert done.code != 0
    for rank in range(2):
        assert f"[rank {rank}] tests/test_tiny.py::test_stuck still runs after 1 s" in done.text
    assert "[rank 0]   File" in done.text
    assert "in test_stuck" in done.text
    assert done.journal.running == ["tests/test_tiny.py::test_stuck"]


@pytest.mark.conformance
def test_a_hang_with_the_interpreter_locked_ends_too(launch):
    done = launch("""
        import ctypes

        @pytest.mark.ranks(2)
        def test_locked(world):
            if world.rank == 0:
                ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL
            time.sleep(60)
    """, TEST_HANG_S="1")  # fmt: skip
    assert done.code != 0
    assert "test_locked" in done.text


@pytest.mark.conformance
def test_harness_waits_for_a_rank_that_prints_late(launch):
    done = launch("""
        import ctypes

        @pytest.mark.limit(1)
        @pytest.mark.ranks(2)
        def test_late(world):
            if world.rank == 0:
                ctypes.PyDLL(None).sleep(4)  # its own printing waits for the GIL
            time.sleep(60)
    """)  # fmt: skip
    assert done.code != 0
    for rank in range(2):
        assert f"[rank {rank}] tests/test_tiny.py::test_late still runs after 1 s" in done.text


def test_a_dead_rank_is_a_failed_launch_that_leaves_tests_that_did_not_run(launch):
    done = launch("""
        @pytest.mark.ranks(2)
        def test_first(world): pass

        @pytest.mark.ranks(2)
        def test_dies(world):
            if world.rank == 1:
                os._exit(7)
            world.barrier()

        @pytest.mark.ranks(2)
        def test_last(world): pass
    """)  # fmt: skip
    assert done.code != 0
    assert done.outcomes() == {"test_first": "passed"}
    assert done.journal.running == ["tests/test_tiny.py::test_dies"]
    assert not done.journal.is_finished
    assert done.journal.num_not_run == 2


BREAKERS = """
    import hpctrain

    hpctrain.init()  # before the clock starts

    @pytest.mark.ranks(2)
    def test_first(world): pass

    @pytest.mark.ranks(2)
    def test_alone(world):
        if world.rank == 1:
            raise KeyError("lost key")
        world.barrier()

    @pytest.mark.ranks(2)
    def test_dies(world):
        if world.rank == 1:
            os.kill(os.getpid(), 9)
        world.barrier()

    @pytest.mark.limit(1)
    @pytest.mark.ranks(2)
    def test_hangs(world):
        world.recv(source=1 - world.rank)

    @pytest.mark.ranks(2)
    def test_last(world): pass
"""
"""Each test between the first and the last ends its session; only one by its limit of time."""


@pytest.mark.conformance
def test_a_session_continues_after_each_test_that_ended_it(launch):
    done = launch(BREAKERS, continued=True, TEST_HANG_S="1000")
    assert done.code != 0
    assert done.outcomes() == {
        "test_first": "passed",
        "test_alone": "failed",
        "test_dies": "failed",
        "test_hangs": "failed",
        "test_last": "passed",
    }
    assert "rank 1: KeyError: 'lost key'" in reason_of(done, "test_alone")
    assert "no rank reported an error" in reason_of(done, "test_dies")
    assert "still runs after 1 s" in reason_of(done, "test_hangs")
    assert (done.journal.num_collected, done.journal.num_not_run) == (5, 0)


def test_different_tests_on_the_ranks_stop_all(launch):
    done = launch("""
        rank = os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK"))

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("n", range(int(rank) + 1))
        def test_n(n): pass
    """)  # fmt: skip
    assert done.code != 0
    assert "the ranks collected different tests (rank 0: 1 tests" in done.text


def test_feature_is_checked_before_fixtures_and_skips_unless_required(launch):
    body = """
        pytestmark = pytest.mark.requires("slurm")

        @pytest.fixture(scope="session")
        def cluster():
            raise OSError("no slurmctld")

        def test_first(cluster): pass

        @pytest.mark.requires("root")
        def test_second(cluster): pass
    """
    for require, outcome in (("", "skipped"), ("slurm", "failed")):
        done = launch(body, ranks=1, HPCTRAIN_REQUIRE=require, PATH="/nowhere")
        assert done.outcomes() == {"test_first": outcome, "test_second": outcome}, require


SKIPS = re.compile(r"pytest\.(skip|importorskip)\(|mark\.skipif")
KNOWN_SKIPS = {"tests/harness/features.py", "tests/test_harness.py"} | {
    "tests/conformance/test_verdicts.py"  # in test programs
}


def test_every_skip_goes_through_requires():
    here = Path(__file__)
    found = {
        path.relative_to(here.parents[1]).as_posix()
        for path in here.parent.rglob("*.py")
        if SKIPS.search(path.read_text())
    }
    assert found <= KNOWN_SKIPS


def test_unknown_feature_is_rejected(launch):
    done = launch("def test_one(): pass", ranks=1, HPCTRAIN_REQUIRE="abacus")
    assert done.code != 0
    known = ", ".join(features.FEATURES)
    assert f"must name known features, got abacus; use {known}" in done.text
