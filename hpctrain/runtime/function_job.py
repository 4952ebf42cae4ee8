"""``hpctrain.submit``: call a function in a job of Slurm, from a notebook or a script."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.cluster.env import EXIT_CODE_FILE
from hpctrain.core.errors import LaunchError
from hpctrain.core.paths import absolute
from hpctrain.launch.slurm import batch_script, scheduler
from hpctrain.launch.slurm.batch_script import BatchSettings
from hpctrain.runtime.run import environment_of_ranks, results_in, write_call

POLL_S = 1.0  # between two questions to Slurm, of a program that waits for a job

VISIBLE_S = 10.0  # time in which what a node has written appears here, on a shared file system

_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""States that a job does not leave by itself."""


class Job:
    """A function in the queue of Slurm, at work, or done; ``hpctrain.submit`` makes it.

    The names are submitit's. Every question is one to Slurm, or to files that all nodes see.
    """

    def __init__(self, number: int, folder: Path, num_ranks: int) -> None:
        """Take the job's number, its folder, and how many ranks leave a result there."""
        self.id, self.folder = number, absolute(folder)
        self._num_ranks = num_ranks

    def __repr__(self) -> str:
        """Name it."""
        return f"Job({self.id}, {self.folder})"

    @property
    def state(self) -> str:
        """State as Slurm calls it: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ...

        Of a job that Slurm has forgotten, what its batch script has left tells. Raises
        ``LaunchError``: Slurm does not answer.
        """
        if said := scheduler.state_of(self.id):
            return said
        try:
            code = int((self.folder / EXIT_CODE_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return "UNKNOWN"
        return "FAILED" if code else "COMPLETED"

    def done(self) -> bool:
        """Say whether it has ended, well or not."""
        return self.state in (*_ENDS, "UNKNOWN")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for its end, through all requeues.

        Raises ``TimeoutError``: it has not ended in ``timeout_s`` seconds.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if give_up is not None and time.monotonic() > give_up:
                raise TimeoutError(f"job {self.id} is {self.state} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def result(self, timeout_s: float | None = None) -> Any:
        """Return what the function has returned on rank 0; raises as ``results``."""
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the end; return what the function has returned, by rank.

        Raises ``RankError``: it raised; holds the traceback of the first rank that did, with the
        exception itself as its cause. ``LaunchError``: the job ended without all results.
        ``TimeoutError``: it has not ended in ``timeout_s`` seconds.
        """
        self.wait(timeout_s)
        give_up = time.monotonic() + (VISIBLE_S if self.state == "COMPLETED" else POLL_S)
        while len(found := results_in(self.folder, self._num_ranks)) < self._num_ranks:
            if time.monotonic() > give_up:
                last = "\n".join(self.stdout().splitlines()[-20:])
                raise LaunchError(
                    f"every rank must return from the function, job {self.id} is {self.state} "
                    f"with {len(found)} of {self._num_ranks} results; its output ends:\n{last}"
                )
            time.sleep(POLL_S)
        return [found[rank] for rank in range(self._num_ranks)]

    def stdout(self) -> str:
        """Return what all ranks have printed so far, standard error included."""
        file = self.folder / f"slurm-{self.id}.out"
        return file.read_text("utf-8", "replace") if file.exists() else ""

    def cancel(self) -> None:
        """End it, or take it from the queue."""
        scheduler.cancel(self.id)


def submit(  # noqa: PLR0913 - options of a job
    fn: Callable[..., Any],
    /,
    *args: Any,
    nodes: int = 1,
    tasks: int = 1,
    time: str = "1h",
    cpus: int | None = None,
    gpus: int | None = None,
    partition: str | None = None,
    account: str | None = None,
    requeue: bool | None = None,
    options: Sequence[str] = (),
    folder: Path | str | None = None,
    **kwargs: Any,
) -> Job:
    """Call ``fn(*args, **kwargs)`` on every rank of a new job of Slurm, and return at once.

    Not collective: a program on the login node calls it, which needs neither torch nor MPI. Each
    rank calls ``hpctrain.init()`` first. Function and arguments travel by cloudpickle; a keyword
    argument of one of the names below is given by ``functools.partial``.

    Args:
        fn: the function; what it returns must be picklable.
        args: its positional arguments, the same on every rank.
        nodes: how many nodes.
        tasks: ranks on each node.
        time: time limit, such as ``"90min"`` or ``"01:30:00"``.
        cpus: cores of each rank.
        gpus: GPUs of each node.
        partition: where; the site's default.
        account: whom to charge.
        requeue: whether the job is queued again when it ends with code 85 or loses a node.
        options: further options of sbatch, such as ``"--qos=high"``.
        folder: of the call, its results and its output, seen by all nodes; by default a new one
            in ``runs``.
        kwargs: its keyword arguments.

    Raises:
        ConfigError: an option is not valid, or the folder cannot be written.
        LaunchError: there is no Slurm, or it refuses the job; holds Slurm's own words.

    Source: the names of ``Job`` are submitit's.
    """
    settings = BatchSettings(
        job_name=getattr(fn, "__name__", "function").strip("<>"),
        partition=partition,
        account=account,
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
        time=scheduler.sbatch_time(time),
        gpus_per_node=gpus,
        requeue=requeue,
        extra=tuple(options),
    )
    where = _new_folder(settings.job_name or "") if folder is None else folder
    return _sent(settings, absolute(where), fn, args, kwargs)


def _sent(
    settings: BatchSettings,
    folder: Path,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Job:
    """Write the call and its script into a folder, and hand it over to Slurm."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = replace(
        settings,
        output=f"{folder}/slurm-%j.out",
        program=tuple(write_call(folder, fn, args, kwargs)),
        directory=str(folder),
    )
    script = batch_script.script("requeue" if settings.requeue else "multi_node", settings)
    number = scheduler.submit_in(folder, script, environment_of_ranks())
    return Job(number, folder, (settings.nodes or 1) * (settings.ntasks_per_node or 1))


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"{name}-{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6}")
