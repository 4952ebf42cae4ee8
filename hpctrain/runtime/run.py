"""``hpctrain.run``: call a function on several ranks, from a notebook or a script."""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from hpctrain.core.errors import HpctrainError, LaunchError
from hpctrain.core.pickles import unpickled
from hpctrain.launch import mpiexec
from hpctrain.launch.supervise import TIMED_OUT, supervise

T = TypeVar("T")

CALL = "call.pkl"
OUTCOME = "outcome-{rank}.pkl"
_WORKER = "from hpctrain.runtime.run import work; work()"


class RankError(HpctrainError):
    """A function raised on a rank; the exception itself is the cause, where it could travel."""

    def __init__(self, rank: int, summary: str, remote_traceback: str):
        super().__init__(f"rank {rank}: {summary}\n\n{remote_traceback.rstrip()}")
        self.rank = rank
        self.remote_traceback = remote_traceback


class Failure(NamedTuple):
    """An exception on its way from a rank to the caller."""

    rank: int
    when_s: float  # wall-clock time: the first failure is the cause of the others
    summary: str
    traceback: str
    exception: bytes  # pickled; empty if that was not possible


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 4,
    *,
    nodes: int | None = None,
    timeout_s: float | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks of this host and wait for them.

    Each rank is a process started by ``mpirun`` that calls ``hpctrain.init()`` first. Function
    and arguments travel by cloudpickle, so functions of a notebook or script do as well;
    what the ranks print appears here. Not collective: one process calls it.

    Args:
        fn: the function; what it returns must be picklable.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments.
        np: number of ranks.
        nodes: declare so many nodes on this host.
        timeout_s: end the ranks after so many seconds.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: the function raised; names the first rank that did, with its traceback.
        LaunchError: the ranks could not be started, ran past ``timeout_s`` or died.
        KeyboardInterrupt: Ctrl-C came, the ranks have ended.

    Source: the call is Horovod's ``horovod.run``.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-run-") as name:
        folder = Path(name)
        worker = write_call(folder, fn, args, kwargs or {})
        environ = environment_of_ranks()
        line = mpiexec.command(worker, num_ranks=np, nodes=nodes)
        code, _ = supervise(line, environ=environ, timeout_s=timeout_s)
        results = results_in(folder, np)
        if code == TIMED_OUT:
            raise LaunchError(f"{np} ranks did not finish in {timeout_s:g} s; raise timeout_s")
        _require_all([str(rank) for rank in range(np) if rank not in results], code)
        return [*results.values()]


def write_call(
    folder: Path, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Write a call into a folder, and return the command of a rank that makes it."""
    (folder / CALL).write_bytes(cloudpickle.dumps((fn, tuple(args), dict(kwargs))))
    return [sys.executable, "-c", _WORKER, str(folder)]


def environment_of_ranks() -> dict[str, str]:
    """Return an environment in which ranks import what this process can, beside a notebook too."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return mpiexec.environment() | {"PYTHONPATH": path}


def results_in(folder: Path, num_ranks: int) -> dict[int, Any]:
    """Return what ranks have left in a folder, by rank; some may have left nothing.

    Raises ``RankError``: the function raised on one; the first failure is told.
    """
    files = {rank: _outcome(folder, rank) for rank in range(num_ranks)}
    results = {rank: unpickled(file.read_bytes()) for rank, file in files.items() if file.exists()}
    failures = [result for result in results.values() if isinstance(result, Failure)]
    if failures:  # says more than the exit code
        first = min(failures, key=lambda failure: failure.when_s)
        raise RankError(first.rank, first.summary, first.traceback) from _exception(first)
    return results


def _require_all(missing: list[str], code: int) -> None:
    if missing or code:
        raise LaunchError(
            f"every rank must return from the function, mpirun ended with code {code} and "
            f"{'no result of rank ' + ', '.join(missing) if missing else 'all results'}; "
            "see the output above"
        )


def _exception(failure: Failure) -> BaseException | None:
    """Unpickle the exception; one that cannot be built again here is described well enough."""
    try:
        exception = unpickled(failure.exception)
    except Exception:  # its class may raise anything
        return None
    return exception if isinstance(exception, BaseException) else None


def _outcome(folder: Path, rank: int) -> Path:
    return folder / OUTCOME.format(rank=rank)


def work() -> None:
    """Be one rank of ``run``: call the function and leave its result, or its failure.

    Both lie in the folder that the command line names.
    """
    from hpctrain.runtime import initialization, world  # noqa: PLC0415 - who calls run() needs no torch

    folder = Path(sys.argv[1])
    initialization.init()
    rank = world.rank()
    _outcome(folder, rank).unlink(missing_ok=True)  # of a job that is queued again
    try:
        fn, args, kwargs = unpickled((folder / CALL).read_bytes())
        result = cloudpickle.dumps(fn(*args, **kwargs))
    except BaseException as error:
        _write(_outcome(folder, rank), cloudpickle.dumps(_describe(rank, error)))
        raise  # the hook of init ends the other ranks
    _write(_outcome(folder, rank), result)


def _describe(rank: int, error: BaseException) -> Failure:
    exception = b""
    with contextlib.suppress(Exception):  # an exception may hold what cannot be pickled
        exception = cloudpickle.dumps(error)
    return Failure(
        rank=rank,
        when_s=time.time(),
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        exception=exception,
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: this rank may be killed any moment."""
    half = path.with_suffix(".half")
    half.write_bytes(content)
    half.replace(path)
