"""Build Horovod and install it: the steps in their order."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import distinct, libmpi_of
from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod import cache
from hpctrain.launch.horovod.build_environment import Workshop
from hpctrain.launch.horovod.compiling import compile_wheel, unpack
from hpctrain.launch.horovod.log import Log, telling
from hpctrain.launch.horovod.missing import BuildPlan, Missing, jobs_of, missing, refusal
from hpctrain.launch.horovod.mpi import Mpi
from hpctrain.launch.horovod.sdist import VERSION, patch
from hpctrain.launch.horovod.target import Target, target_of
from hpctrain.launch.horovod.tools import Tools, find_mpi, look, torch_version
from hpctrain.launch.pmi import TIMEOUT_S
from hpctrain.launch.program import ask

_IMPORT = """
import json
import horovod.torch as hvd
print(json.dumps([bool(hvd.mpi_built()), open("/proc/self/maps").read().splitlines()]))
"""


class BuildListener(Protocol):
    """Whoever shows how far it is."""

    def step(self, what: str) -> None:
        """A step begins; the one before has ended."""

    def say(self, line: str) -> None:
        """Something that stays to be read."""

    def percent(self, done: int) -> None:
        """How much of the step is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What came of it."""

    wheel: Path
    is_cached: bool
    """Whether it was there before."""
    library: Path | None = None
    """The MPI library that the installed Horovod loads; None where it was not installed."""


def build(
    plan: BuildPlan, listener: BuildListener, *, wheel_dir: Path | None = None, force: bool = False
) -> Built:
    """Build a wheel for the installed torch and MPI, or take one built before, and install it.

    Not collective: one process does it.

    Args:
        plan: how.
        listener: is told what happens.
        wheel_dir: where wheels are kept, in a folder for each set of versions; None for the cache.
        force: build although there is a wheel.

    Raises:
        LaunchError: something is missing, which is said before anything is compiled; it does not
            compile; or the installed package does not import, or loads another MPI.
    """
    found = launched()
    if found is not None and found.size > 1:
        raise LaunchError(
            f"one process builds Horovod, this is rank {found.rank} of {found.size}; run "
            "`hpctrain horovod build` without a launcher"
        )
    mpi, _ = find_mpi()
    torch = torch_version()
    if mpi is None or not torch:
        raise refusal(missing(look(), plan))
    target = target_of(torch, mpi, plan.gpu)
    folder = ((wheel_dir or cache.root()) / target.key).absolute()
    listener.say(f"Horovod {VERSION} for {target.python}, torch {torch}, {mpi} ({mpi.library})")
    wheel = cache.wheel_in(folder)
    if wheel is not None and not force and not os.access(folder, os.W_OK):
        return _finish(wheel, plan, mpi, listener, is_cached=True)  # a site's own wheels
    with _ended_by_sigterm(), cache.locked(folder, listener.say):
        wheel = cache.wheel_in(folder)  # another build may have made it meanwhile
        is_cached = wheel is not None and not force
        if wheel is None or force:
            wheel = _make(plan, target, folder, listener)
        return _finish(wheel, plan, mpi, listener, is_cached=is_cached)


def _make(plan: BuildPlan, target: Target, folder: Path, listener: BuildListener) -> Path:
    listener.step("looking for compilers and MPI")
    tools = look()
    absent = missing(tools, plan)
    with (
        tempfile.TemporaryDirectory(prefix="hpctrain-horovod-") as scratch,
        Log(folder / cache.LOG) as log,
    ):
        workshop = Workshop(Path(scratch))
        if tools.has_pip:
            listener.step("fetching sources and tools")
            absent += workshop.fetch(tools, log)
        if absent:
            raise refusal(absent)
        sources = unpack(workshop.folder)
        for change in patch(sources, tools.standard):
            listener.say(f"changed {change}")
        listener.say(_how(tools, jobs_of(tools, plan), log.path))
        listener.step("compiling")
        wheel = compile_wheel(workshop, tools, target, jobs_of(tools, plan), log, listener.percent)
        return cache.store(wheel, folder)


def _how(tools: Tools, jobs: int, log: Path) -> str:
    assert tools.compiler is not None
    cmake = tools.cmake or "cmake of a package, for this build only"
    return (
        f"with {tools.compiler.path}, {cmake}, {tools.mpicxx}, {jobs} "
        f"job{'s' * (jobs != 1)}; all output: {log}"
    )


def _finish(
    wheel: Path, plan: BuildPlan, mpi: Mpi, listener: BuildListener, *, is_cached: bool
) -> Built:
    if not plan.install:
        return Built(wheel=wheel, is_cached=is_cached)
    listener.step("installing")
    _install(wheel)
    listener.step("trying it")
    return Built(wheel=wheel, is_cached=is_cached, library=check_import(mpi))


def _install(wheel: Path) -> None:
    """Install the wheel in place of any other, then what it needs to run."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    for words in (["--force-reinstall", "--no-deps", wheel], [wheel]):
        done = subprocess.run(  # noqa: S603 - this Python's pip
            [*pip, *words],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            lines = telling(done.stdout.splitlines())
            if "No module named pip" in done.stdout:
                what = "pip installs the wheel, this environment has no pip"
                raise refusal([Missing(what, "python -m ensurepip, or `uv pip install pip`")])
            raise LaunchError(
                f"{wheel} must be installed into {sys.prefix}, pip says:\n" + "\n".join(lines)
            )


def check_import(mpi: Mpi) -> Path:
    """Import the installed package in a process of its own; return the MPI library it loads.

    Raises:
        LaunchError: it does not import, or it loads another MPI than mpi4py.
    """
    done = ask([sys.executable, "-P", "-c", _IMPORT], timeout_s=4 * TIMEOUT_S)
    again = "`hpctrain horovod build --force` builds it anew"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LaunchError(f"horovod.torch must import in {sys.prefix}, it says: {said}; {again}")
    is_built, maps = json.loads(done.stdout.strip().splitlines()[-1])
    libraries = [path.resolve() for path in distinct(libmpi_of(maps))]
    if not is_built or mpi.library not in libraries:
        named = ", ".join(map(str, libraries)) or "none"
        raise LaunchError(
            f"Horovod must use the MPI library that ranks load, {mpi.library}; it loads {named}: "
            f"take that out of LD_LIBRARY_PATH and LD_PRELOAD, or {again}"
        )
    return mpi.library


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that it leaves no compiler and no folder."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
