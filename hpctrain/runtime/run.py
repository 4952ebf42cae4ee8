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
    """The function raised on a rank; ``__cause__`` is the exception if it can be pickled."""

    def __init__(self, rank: int, summary: str, remote_traceback: str):
        super().__init__(f"rank {rank}: {summary}\n\n{remote_traceback.rstrip()}")
        self.rank = rank
        self.remote_traceback = remote_traceback


class Failure(NamedTuple):
    """Exception of a rank, as sent to the caller."""

    rank: int
    when_s: float  # wall-clock time: the first failure is the cause of the others
    summary: str
    traceback: str
    exception: bytes  # the pickled exception; empty if it cannot be pickled


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

    Not collective. Each rank is a new process, started by ``mpirun``, that calls
    ``hpctrain.init()`` before ``fn``. The function and the arguments are pickled by cloudpickle,
    which supports functions that are defined in notebooks and scripts. This process prints the
    output of the ranks.

    Args:
        fn: the function; its result must be picklable.
        args: positional arguments of ``fn``, the same on every rank.
        kwargs: keyword arguments of ``fn``.
        np: number of ranks.
        nodes: number of nodes to declare on this host.
        timeout_s: seconds after which the ranks are ended; None for no limit.

    Returns:
        The results of the function, by rank.

    Raises:
        RankError: the function raised; names the first rank that raised, with its traceback.
        LaunchError: the ranks could not be started, ran past ``timeout_s`` or died.
        KeyboardInterrupt: Ctrl-C; the ranks have ended.

    Source: the interface is Horovod's ``horovod.run``.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-run-") as name:
        folder = Path(name)
        worker = write_call(folder, fn, args, kwargs or {})
        environ = environment_of_ranks()
        line = mpiexec.command(worker, num_ranks=np, nodes=nodes)
        code, _ = supervise(line, environ=environ, timeout_s=timeout_s)
        results = results_in(folder, np)
        if code == TIMED_OUT:
            raise LaunchError(
                f"all {np} ranks must finish within {timeout_s:g} s, but some have not; pass a "
                f"larger timeout_s"
            )
        _require_all([str(rank) for rank in range(np) if rank not in results], code)
        return [*results.values()]


def write_call(
    folder: Path, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Write a function call to a folder, and return the command of a rank that executes it."""
    (folder / CALL).write_bytes(cloudpickle.dumps((fn, tuple(args), dict(kwargs))))
    return [sys.executable, "-c", _WORKER, str(folder)]


def environment_of_ranks() -> dict[str, str]:
    """Return an environment in which ranks can import the same modules as this process."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return mpiexec.environment() | {"PYTHONPATH": path}


def results_in(folder: Path, num_ranks: int) -> dict[int, Any]:
    """Return the results in a folder, by rank; ranks without a result are omitted.

    Raises ``RankError``: the function raised on a rank; reports the first failure.
    """
    files = {rank: _outcome(folder, rank) for rank in range(num_ranks)}
    results = {rank: unpickled(file.read_bytes()) for rank, file in files.items() if file.exists()}
    failures = [result for result in results.values() if isinstance(result, Failure)]
    if failures:  # more informative than the exit code
        first = min(failures, key=lambda failure: failure.when_s)
        raise RankError(first.rank, first.summary, first.traceback) from _exception(first)
    return results


def _require_all(missing: list[str], code: int) -> None:
    if missing or code:
        raise LaunchError(
            f"every rank must return from the function, but mpirun ended with code {code} and "
            f"{'no result of rank ' + ', '.join(missing) if missing else 'all results'}; "
            "see the output above"
        )


def _exception(failure: Failure) -> BaseException | None:
    """Return the exception of a failed rank; None if it cannot be unpickled."""
    try:
        exception = unpickled(failure.exception)
    except Exception:  # its class may raise anything
        return None
    return exception if isinstance(exception, BaseException) else None


def _outcome(folder: Path, rank: int) -> Path:
    return folder / OUTCOME.format(rank=rank)


def work() -> None:
    """Main function of a rank: call the function and write its result or its exception to a file.

    The first command-line argument is the folder with the call and the results.
    """
    from hpctrain.runtime import initialization, world  # noqa: PLC0415 - run() needs no torch

    folder = Path(sys.argv[1])
    initialization.init()
    rank = world.rank()
    _outcome(folder, rank).unlink(missing_ok=True)  # written before a requeue
    try:
        fn, args, kwargs = unpickled((folder / CALL).read_bytes())
        result = cloudpickle.dumps(fn(*args, **kwargs))
    except BaseException as error:
        _write(_outcome(folder, rank), cloudpickle.dumps(_describe(rank, error)))
        raise  # the hook of init ends the other ranks
    _write(_outcome(folder, rank), result)


def _describe(rank: int, error: BaseException) -> Failure:
    exception = b""
    with contextlib.suppress(Exception):  # an exception may contain objects that cannot be pickled
        exception = cloudpickle.dumps(error)
    return Failure(
        rank=rank,
        when_s=time.time(),
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        exception=exception,
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, because this rank may be killed at any time."""
    half = path.with_suffix(".half")
    half.write_bytes(content)
    half.replace(path)
