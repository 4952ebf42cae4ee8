"""Laws of the harness itself: each test here runs pytest on several ranks of a tiny test file."""

import json
import re
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.launch import mpiexec
from tests.harness import features, preload

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.launches


@dataclass
class Session:
    """What one launch of a test file left behind."""

    code: int
    text: str
    report: dict
    seconds: float

    def outcomes(self) -> dict[str, str]:
        return {test["test"].split("::")[1]: test["outcome"] for test in self.report["tests"]}


@pytest.fixture
def launch(tmp_path):
    def run(body: str, *, ranks: int = 2, **environ: str) -> Session:
        file = tmp_path / "test_tiny.py"
        file.write_text(f"import os, time\nimport pytest\n\n{textwrap.dedent(body)}")
        argv = [*preload.python(), "-m", "pytest", "-q", "--color=no"]
        argv += [
            "-c",
            str(ROOT / "setup.cfg"),
            "-p",
            "tests.harness.plugin",
            "--rootdir",
            str(tmp_path),
            str(file),
        ]
        argv += ["--report", str(tmp_path / "report.json")]
        start = time.monotonic()
        done = subprocess.run(
            mpiexec.command(argv, num_ranks=ranks),
            env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)} | environ,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=50,
        )
        path = tmp_path / "report.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return Session(done.returncode, done.stdout, found, time.monotonic() - start)

    return run


def test_a_pass_on_all_ranks_is_a_pass(launch):
    done = launch("""
        @pytest.mark.ranks(3)
        def test_sum(world):
            assert world.allreduce(world.rank) == 3
    """, ranks=3)  # fmt: skip
    assert done.code == 0, done.text
    assert done.outcomes() == {"test_sum": "passed"}
    assert done.report["ranks"] == 3


def test_a_test_runs_on_the_ranks_it_names_and_else_on_one(launch):
    done = launch("""
        def test_one(): pass

        @pytest.mark.ranks(2, 4)
        def test_two_or_four(): pass

        @pytest.mark.ranks(3)
        def test_three(): pass
    """)  # fmt: skip
    assert done.outcomes() == {"test_two_or_four": "passed"}


@pytest.mark.parametrize("options", ["", "-m conformance"])
def test_a_long_test_runs_only_if_it_is_asked_for(launch, options):
    done = launch("""
        @pytest.mark.conformance
        @pytest.mark.ranks(2)
        def test_long(): pass

        @pytest.mark.ranks(2)
        def test_short(): pass
    """, PYTEST_ADDOPTS=options)  # fmt: skip
    assert done.outcomes() == {"test_long" if options else "test_short": "passed"}


def test_a_failure_on_one_rank_fails_all_and_names_it(launch):
    done = launch("""
        @pytest.mark.ranks(2)
        def test_bad(world):
            assert world.rank != 1, "rank one is odd"

        @pytest.mark.ranks(2)
        def test_good(world):
            world.barrier()
    """)  # fmt: skip
    assert done.code != 0
    assert done.outcomes() == {"test_bad": "failed", "test_good": "passed"}
    reason = done.report["tests"][0]["reason"]
    assert "failed on some ranks only: rank 1: AssertionError: rank one is odd" in reason
    assert "[rank 1]" in done.text


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fixture_failing_on_one_rank_hangs_nobody(launch, when):
    fail = (
        """if os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK")) == "1": raise OSError(5)"""
    )
    done = launch(f"""
        @pytest.fixture
        def disk():
            {fail if when == "before" else "pass"}
            yield
            {fail if when == "after" else "pass"}

        @pytest.mark.ranks(2)
        def test_first(disk, world):
            world.barrier()

        @pytest.mark.ranks(2)
        def test_second(world):
            world.barrier()
    """, HPCTRAIN_TEST_HANG_S="20")  # fmt: skip
    assert done.code != 0
    assert done.outcomes() == {"test_first": "failed", "test_second": "passed"}
    assert "[rank 1] test_tiny.py::test_first failed" in done.text


def test_a_skip_on_all_ranks_is_a_skip_and_on_one_rank_a_failure(launch):
    done = launch("""
        @pytest.mark.ranks(2)
        def test_all(world):
            pytest.skip("no disk")

        @pytest.mark.ranks(2)
        def test_some(world):
            if world.rank == 0:
                pytest.skip("no disk")
    """)  # fmt: skip
    assert done.code != 0
    assert done.outcomes() == {"test_all": "skipped", "test_some": "failed"}
    assert done.report["tests"][0]["reason"] == "no disk"
    assert "skipped on some ranks only: rank 0" in done.report["tests"][1]["reason"]


def test_a_hang_prints_the_stacks_of_all_ranks_and_ends(launch):
    done = launch("""
        import hpctrain

        hpctrain.init()  # before the clock starts

        @pytest.mark.limit(1)
        @pytest.mark.ranks(2)
        def test_stuck(world):
            if world.rank == 1:
                raise KeyError("lost key")
            world.barrier()
    """)  # fmt: skip
    assert done.code != 0
    assert done.seconds < 30
    assert "KeyError: 'lost key'" in done.text
    for rank in range(2):
        assert f"[rank {rank}] test_tiny.py::test_stuck still runs after 1 s" in done.text
    assert "[rank 0]   File" in done.text
    assert "in test_stuck" in done.text
    assert done.report == {}


def test_a_hang_with_the_interpreter_locked_ends_too(launch):
    done = launch("""
        import ctypes

        @pytest.mark.ranks(2)
        def test_locked(world):
            if world.rank == 0:
                ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL
            time.sleep(60)
    """, HPCTRAIN_TEST_HANG_S="1")  # fmt: skip
    assert done.code != 0
    assert done.seconds < 30
    assert "test_locked" in done.text


def test_a_rank_that_is_late_to_print_is_waited_for(launch):
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
        assert f"[rank {rank}] test_tiny.py::test_late still runs after 1 s" in done.text


def test_a_dead_rank_is_a_failed_launch_without_report(launch):
    done = launch("""
        @pytest.mark.ranks(2)
        def test_dies(world):
            if world.rank == 1:
                os._exit(7)
            world.barrier()
    """)  # fmt: skip
    assert done.code != 0
    assert done.report == {}


def test_different_tests_on_the_ranks_stop_all(launch):
    done = launch("""
        rank = os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK"))

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("n", range(int(rank) + 1))
        def test_n(n): pass
    """)  # fmt: skip
    assert done.code != 0
    assert "the ranks collected different tests (rank 0: 1 tests" in done.text


def test_tests_may_initialise_the_library(launch):
    done = launch("""
        import hpctrain

        @pytest.mark.ranks(2)
        def test_init(world):
            hpctrain.init()
            assert hpctrain.size() == 2

        @pytest.mark.ranks(2)
        def test_fails_after_it(world):
            assert world.rank
    """)  # fmt: skip
    assert done.code != 0
    assert done.outcomes() == {"test_init": "passed", "test_fails_after_it": "failed"}
    assert "1 failed, 1 passed" in done.text


@pytest.mark.parametrize(("require", "outcome"), [("", "skipped"), ("slurm", "failed")])
def test_a_missing_feature_skips_unless_it_is_required(launch, require, outcome):
    done = launch("""
        @pytest.mark.requires("slurm")
        def test_submit(): pass
    """, ranks=1, HPCTRAIN_REQUIRE=require, PATH="/nowhere")  # fmt: skip
    assert done.outcomes() == {"test_submit": outcome}


def test_a_feature_is_looked_for_before_any_fixture_is_made(launch):
    done = launch("""
        pytestmark = pytest.mark.requires("slurm")

        @pytest.fixture(scope="session")
        def cluster():
            raise OSError("no slurmctld")

        def test_first(cluster): pass

        @pytest.mark.requires("root")
        def test_second(cluster): pass
    """, ranks=1, HPCTRAIN_REQUIRE="", PATH="/nowhere")  # fmt: skip
    assert done.outcomes() == {"test_first": "skipped", "test_second": "skipped"}


SKIPS = re.compile(r"pytest\.(skip|importorskip)\(|mark\.skipif")
KNOWN_SKIPS = {"tests/harness/features.py", "tests/test_harness.py"} | {
    "tests/conformance/test_verdicts.py"  # in programs that are tests themselves
}


def test_every_skip_goes_through_requires():
    here = Path(__file__)
    found = {
        path.relative_to(here.parents[1]).as_posix()
        for path in here.parent.rglob("*.py")
        if SKIPS.search(path.read_text())
    }
    assert found <= KNOWN_SKIPS


def test_an_unknown_feature_is_refused(launch):
    done = launch("def test_one(): pass", ranks=1, HPCTRAIN_REQUIRE="abacus")
    assert done.code != 0
    known = ", ".join(features.FEATURES)
    assert f"HPCTRAIN_REQUIRE names abacus, known are {known}" in done.text
