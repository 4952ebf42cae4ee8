"""pytest hooks that combine the sessions of all ranks into one."""

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
from tests.harness.hang import Roll, Watchdog, limit_of, watched
from tests.harness.journal import Journal, JournalWriter
from tests.harness.pace import slowness
from tests.harness.selection import mark_sweeps, names_ranks, selected, sizes_of
from tests.harness.verdict import Verdict, Voice, disagreement

MOST_S = 0.004
"""Longest sleep, which exceeds the time of a rank between two barriers of a small test."""

TOGETHER = {
    "hpctrain.comm.node.shared_memory:SharedMemory": ("barrier",),
    "hpctrain.comm.rail.rail:Rail": ("allreduce_by",),
    "hpctrain.comm.mpi:MpiCommunicator": ("barrier", "broadcast_", "allgather_object", "agree"),
    "hpctrain.comm.hierarchical:HierarchicalCommunicator": ("allreduce_",),
}
"""Methods that synchronize ranks, by class. Given as names, so that tests that only launch
programs import neither these classes nor torch, which takes two seconds of CPU time per rank."""


class Jitter:
    """Random sleeps before and after calls, with probability 1/3, different on every rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self._numbers = random.Random(f"{seed} {rank}")
        self.num_sleeps = 0

    def sleep(self) -> None:
        """Sleep with probability 1/3."""
        if self._numbers.random() < 1 / 3:
            self.num_sleeps += 1
            time.sleep(self._numbers.uniform(0.0, MOST_S))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped in two calls of ``sleep``."""

        @functools.wraps(function)
        def late(*args: Any, **options: Any) -> Any:
            self.sleep()
            try:
                return function(*args, **options)
            finally:
                self.sleep()

        return late

    def start(self, patch: pytest.MonkeyPatch) -> None:
        """Add sleeps to all methods in ``TOGETHER`` on this rank."""
        for place, names in TOGETHER.items():
            owner = pkgutil.resolve_name(place)
            for name in names:
                patch.setattr(owner, name, self.around(getattr(owner, name)))


# Verdicts need their own communicator, because a test may leave a collective unfinished.
VERDICTS = MPI.COMM_WORLD.Dup()
RANK, SIZE = VERDICTS.rank, VERDICTS.size
VENDOR = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")

ROLL = Roll(VERDICTS)

WORLD = pytest.StashKey[MPI.Intracomm]()
VOICE = pytest.StashKey[Voice]()
WATCHDOG = pytest.StashKey[Watchdog]()

# Every rank must draw the same examples, so no rank may shrink an example alone.
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
    parser.addoption(
        "--report", type=Path, help="write the outcome of each test as a line of JSON (rank 0)"
    )
    parser.addoption(
        "--continue",
        action="store_true",
        help="append to the report, and leave out the tests that it contains",
    )
    parser.addoption(
        "--spread", action="store_true", help="run each case of a sweep on one of its sizes only"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let only rank 0 report results, and keep the real stderr for urgent messages."""
    config.stash[VOICE] = Voice(RANK)
    features.required()
    config.pluginmanager.register(features, "hpctrain-features")
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        silent = pytest.TerminalReporter(config, nowhere)
        config.pluginmanager.register(silent, "terminalreporter")
    elif (report := config.getoption("--report")) and not hasattr(config, "workerinput"):
        if not config.getoption("--continue"):
            report.unlink(missing_ok=True)
        writer = JournalWriter(report, mpi=VENDOR, ranks=SIZE)
        config.pluginmanager.register(writer, "journal")


def pytest_report_header() -> str:
    """Return a line with the MPI library, the number of ranks and package versions."""
    names = ("torch", "mpi4py", "numpy", "h5py")
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"mpi: {VENDOR}, {SIZE} rank{'s' * (SIZE > 1)}; {versions}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during the collection of tests, then freeze all objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files that have no tests on several ranks, which saves the time of their imports."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if SIZE > 1 and is_test and not names_ranks(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for this number of ranks, and the conformance tests only on request."""
    for item in items if SIZE == 1 else ():
        if sizes_of(item) != (1,) and not names_ranks(item.path):
            raise pytest.UsageError(
                "a file with tests on several ranks must contain `ranks(` or a decorator in "
                f"capitals, but the file of {item.nodeid} ({sizes_of(item)} ranks) has neither; "
                "add one, because launches on several ranks skip other files"
            )
    mark_sweeps(items)
    asked = "conformance" in config.option.markexpr
    keep = selected(items, SIZE, long_ones=asked, spread=config.getoption("--spread"))
    if config.getoption("--continue"):
        tests = Journal.read(config.getoption("--report")).tests if RANK == 0 else []
        done = VERDICTS.bcast({test["test"] for test in tests})
        keep = [item for item in keep if item.nodeid not in done]
    kept = set(keep)
    if drop := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=drop)
    items[:] = keep


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop all ranks if they collected different tests: they exchange verdicts in order."""
    found = VERDICTS.allgather(([item.nodeid for item in session.items], session.testsfailed))
    if any(mine != found[0] for mine in found):
        counts = "; ".join(
            f"rank {rank}: {len(tests)} tests, {errors} errors"
            for rank, (tests, errors) in enumerate(found)
        )
        pytest.exit(f"the ranks collected different tests ({counts})", returncode=1)


def pytest_unconfigure() -> None:
    """Wait for rank 0, which mpirun would kill if another rank exits earlier with an error."""
    VERDICTS.Barrier()


def pytest_internalerror(excrepr: object) -> None:
    """Abort all ranks, because the other ranks would wait forever for this rank."""
    if SIZE > 1:
        Voice(RANK).say(str(excrepr))
        VERDICTS.Abort(3)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test and its fixtures under a watchdog."""
    if limit_s := limit_of(item):
        report = item.config.getoption("--report")
        watchdog = Watchdog(item.nodeid, limit_s, item.config.stash[VOICE], ROLL, report)
        item.stash[WATCHDOG] = watchdog
        with watched(watchdog):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Create the communicator of the test, then run its fixtures."""
    # Before the fixtures: one that fails on one rank would leave the other ranks in Dup.
    if "world" in getattr(item, "fixturenames", ()):
        item.stash[WORLD] = MPI.COMM_WORLD.Dup()
    return (yield from agree(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test and agree on the verdict."""
    return (yield from agree(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Tear down the fixtures, then free the communicator of the test."""
    try:
        return (yield from agree(item))
    finally:
        if comm := item.stash.get(WORLD, None):
            free(comm)  # does nothing if the test has left operations pending


def agree(item: pytest.Item) -> Generator[None, object, object]:
    """Run one phase and agree on the verdict.

    Every rank fails if one rank fails, or if only some ranks skip the test.
    """
    error: BaseException | None = None
    result: object = None
    try:
        result = yield
    except BaseException as caught:  # skips included: every rank must reach the allgather
        error = caught
    mine = Verdict.of(error)
    if error is not None and mine.outcome == "failed" and SIZE > 1:
        # Report before the allgather: other ranks may wait for this one until their watchdogs
        # fire.
        voice = item.config.stash[VOICE]
        story = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
        voice.say(f"{item.nodeid} failed", str(story))
        if watchdog := item.stash.get(WATCHDOG, None):
            watchdog.record(mine.text)
        ROLL.set_failed(True)
    dispute = disagreement(VERDICTS.allgather(mine))
    ROLL.set_failed(False)
    if error is not None and not (dispute and mine.outcome == "skipped"):
        raise error
    if dispute:
        pytest.fail(dispute, pytrace=False)
    return result


@pytest.fixture
def world(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """Communicator of this test only, so that its messages cannot reach the next test."""
    comm: MPI.Intracomm = request.node.stash[WORLD]
    return comm


@pytest.fixture
def jitter() -> Generator[Callable[[], Jitter]]:
    """Function that adds random sleeps on this rank until the test ends."""
    with pytest.MonkeyPatch.context() as patch:

        def start(seed: int = 0) -> Jitter:
            jitter = Jitter(seed, RANK)
            jitter.start(patch)
            return jitter

        yield start


@pytest.fixture
def patience(world: MPI.Intracomm) -> Callable[[float], float]:
    """Function that multiplies a time limit by the slowness of the machine. Collective.

    The factor is measured once, is identical on all ranks, and is 1 on an idle machine.
    """
    factor: float = world.allreduce(slowness(), MPI.MAX)
    return lambda limit_s: limit_s * factor
