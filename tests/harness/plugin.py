"""The hooks of pytest that make one session out of the ranks."""

import functools
import gc
import importlib.metadata
import os
import pkgutil
import random
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from mpi4py import MPI

from hpctrain.comm.requests import free
from tests.harness import features
from tests.harness.hang import Roll, limit_of, watched
from tests.harness.selection import names_ranks, selected, sizes_of
from tests.harness.verdict import JsonReport, Verdict, Voice, disagreement

MOST_S = 0.004
"""Longest sleep; what a rank does between two barriers of a small test takes far less."""

TOGETHER = {
    "hpctrain.comm.node.shared_memory:SharedMemory": ("barrier",),
    "hpctrain.comm.rail.rail:Rail": ("allreduce_by",),
    "hpctrain.comm.mpi:MpiCommunicator": ("barrier", "broadcast_", "allgather_object", "agree"),
    "hpctrain.comm.hierarchical:HierarchicalCommunicator": ("allreduce_",),
}
"""Methods in which ranks wait for each other, where each of them ends up. By name: most launches
of tests need neither these nor torch, which takes two seconds of a core on every rank."""


class Jitter:
    """Sleeps of one rank: a third of the calls is late, by other times on every rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self._numbers = random.Random(f"{seed} {rank}")
        self.num_sleeps = 0

    def sleep(self) -> None:
        """Sleep now, or do not."""
        if self._numbers.random() < 1 / 3:
            self.num_sleeps += 1
            time.sleep(self._numbers.uniform(0.0, MOST_S))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, with sleeps before and after it."""

        @functools.wraps(function)
        def late(*args: Any, **options: Any) -> Any:
            self.sleep()
            try:
                return function(*args, **options)
            finally:
                self.sleep()

        return late

    def start(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process be late wherever its ranks wait for each other."""
        for place, names in TOGETHER.items():
            owner = pkgutil.resolve_name(place)
            for name in names:
                patch.setattr(owner, name, self.around(getattr(owner, name)))


# A communicator of our own: a verdict must not meet a collective that a test left half done.
VERDICTS = MPI.COMM_WORLD.Dup()
RANK, SIZE = VERDICTS.rank, VERDICTS.size
VENDOR = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")

ROLL = Roll(VERDICTS)

WORLD = pytest.StashKey[MPI.Intracomm]()
VOICE = pytest.StashKey[Voice]()

# Every rank must draw the same examples, and none may shrink while the others go on.
EVERY_PHASE = tuple(hypothesis.Phase)
DRAW_ONLY = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    deadline=None,
    database=None,
    phases=EVERY_PHASE if SIZE == 1 else DRAW_ONLY,
)
hypothesis.settings.load_profile("ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="write the outcome of each test as JSON (rank 0)")
    parser.addoption(
        "--spread", action="store_true", help="run each case of a sweep on one of its sizes alone"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 alone report, and keep the real stderr for what cannot wait."""
    config.stash[VOICE] = Voice(RANK)
    features.required()
    config.pluginmanager.register(features, "hpctrain-features")
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        silent = pytest.TerminalReporter(config, nowhere)
        config.pluginmanager.register(silent, "terminalreporter")
    elif report := config.getoption("--report"):
        config.pluginmanager.register(JsonReport(report, mpi=VENDOR, ranks=SIZE), "json-report")


def pytest_report_header() -> str:
    """Name the MPI library, the ranks and the versions."""
    names = ("torch", "mpi4py", "numpy", "h5py")
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"mpi: {VENDOR}, {SIZE} rank{'s' * (SIZE > 1)}; {versions}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look at what imports and pytest keep to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files without a test of several ranks: to import them takes long."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if SIZE > 1 and is_test and not names_ranks(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests whose declared world sizes include ours, the long ones only if asked for."""
    for item in items if SIZE == 1 else ():
        if sizes_of(item) != (1,) and not names_ranks(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} runs on {sizes_of(item)} ranks, but nothing in its file says so: "
                "write `ranks(` or a mark in capitals as decorator, else several ranks skip it"
            )
    asked = "conformance" in config.option.markexpr
    keep = selected(items, SIZE, long_ones=asked, spread=config.getoption("--spread"))
    kept = set(keep)
    if drop := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=drop)
    items[:] = keep


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop all ranks when they found different tests: their verdicts would not pair."""
    found = VERDICTS.allgather(([item.nodeid for item in session.items], session.testsfailed))
    if any(mine != found[0] for mine in found):
        counts = "; ".join(
            f"rank {rank}: {len(tests)} tests, {errors} errors"
            for rank, (tests, errors) in enumerate(found)
        )
        pytest.exit(f"the ranks collected different tests ({counts})", returncode=1)


def pytest_unconfigure() -> None:
    """Wait for the report of rank 0: mpirun kills it once another rank ends with an error."""
    VERDICTS.Barrier()


def pytest_internalerror(excrepr: object) -> None:
    """End all ranks at once: the others would wait for this one for ever."""
    if SIZE > 1:
        Voice(RANK).say(str(excrepr))
        VERDICTS.Abort(3)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch over the test and its fixtures."""
    if limit_s := limit_of(item):
        with watched(item.nodeid, limit_s, item.config.stash[VOICE], ROLL):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Make the communicator of the test, then its fixtures."""
    # Before any fixture: one that fails on one rank must not leave the others in a Dup.
    if "world" in getattr(item, "fixturenames", ()):
        item.stash[WORLD] = MPI.COMM_WORLD.Dup()
    return (yield from agree(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test."""
    return (yield from agree(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """End the fixtures, then the communicator of the test."""
    try:
        return (yield from agree(item))
    finally:
        if comm := item.stash.get(WORLD, None):
            free(comm)  # unless the test has left operations pending


def agree(item: pytest.Item) -> Generator[None, object, object]:
    """Run one phase; every rank fails if any failed, or if only some of them skipped."""
    error: BaseException | None = None
    result: object = None
    try:
        result = yield
    except BaseException as caught:  # a skip too: every rank must reach the allgather
        error = caught
    mine = Verdict.of(error)
    if error is not None and mine.outcome == "failed" and SIZE > 1:
        # At once: the other ranks may be stuck, and then nobody gets to report this failure.
        voice = item.config.stash[VOICE]
        story = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
        voice.say(f"{item.nodeid} failed", str(story))
    dispute = disagreement(VERDICTS.allgather(mine))
    if error is not None and not (dispute and mine.outcome == "skipped"):
        raise error
    if dispute:
        pytest.fail(dispute, pytrace=False)
    return result


@pytest.fixture
def world(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """Give a communicator of this test alone: a stray message cannot leak into the next one."""
    comm: MPI.Intracomm = request.node.stash[WORLD]
    return comm


@pytest.fixture
def jitter() -> Generator[Callable[[], Jitter]]:
    """Give a function that lets this rank come late from then on, until the test ends."""
    with pytest.MonkeyPatch.context() as patch:

        def start(seed: int = 0) -> Jitter:
            jitter = Jitter(seed, RANK)
            jitter.start(patch)
            return jitter

        yield start
