"""``hpctrain.submit``: call a function in a job of Slurm, from a notebook or a script."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.cluster.env import EXIT_CODE_FILE
from hpctrain.core.atomic import explained_writes, make_folder
from hpctrain.core.checks import CheckedFields, Count, Number, Texts
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.paths import absolute
from hpctrain.launch.slurm import batch_script, scheduler
from hpctrain.launch.slurm.batch_script import BatchSettings
from hpctrain.runtime.run import environment_of_ranks, results_in, write_call

POLL_S = 1.0  # time between two queries of Slurm while a program waits for a job

VISIBLE_S = 10.0  # longest delay until a file of another node is visible here

_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""States in which a job has ended."""


class Job:
    """Function call in a Slurm job, created by ``hpctrain.submit``.

    The methods have the same names as in submitit. Every method queries Slurm, or reads files in
    a folder that all nodes share.

    Args:
        number: Slurm's ID of the job.
        folder: folder of the call and its results.
        num_ranks: number of ranks that write results.
    """

    def __init__(self, number: int, folder: Path, num_ranks: int) -> None:
        self.id, self.folder = number, absolute(folder)
        self._num_ranks = num_ranks

    def __repr__(self) -> str:
        """Return the ID and the folder of the job."""
        return f"Job({self.id}, {self.folder})"

    @property
    def state(self) -> str:
        """State of the job as named by Slurm: ``PENDING``, ``RUNNING``, ``COMPLETED``, ...

        For a job that Slurm no longer knows, the state is derived from the exit code that the
        batch script of the job wrote. Raises ``LaunchError``: Slurm does not answer.
        """
        if state := scheduler.state_of(self.id):
            return state
        try:
            code = int((self.folder / EXIT_CODE_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return "UNKNOWN"
        return "FAILED" if code else "COMPLETED"

    def done(self) -> bool:
        """Return True if the job has ended, whatever its result."""
        return self.state in (*_ENDS, "UNKNOWN")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the job, including all requeues.

        Raises ``TimeoutError``: the job has not ended after ``timeout_s`` seconds.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if end_s is not None and time.monotonic() > end_s:
                raise TimeoutError(
                    f"job {self.id} must end within {timeout_s:g} s, but is {self.state}; pass a "
                    f"larger timeout_s"
                )
            time.sleep(POLL_S)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the job; return the function's result on rank 0. See ``results``."""
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the end of the job; return the function's results by rank.

        Raises ``RankError``: the function raised; the message has the traceback of the first rank
        that raised, and ``__cause__`` is the exception of that rank. ``LaunchError``: the job
        ended, but results are missing. ``TimeoutError``: the job has not ended after ``timeout_s``
        seconds.
        """
        self.wait(timeout_s)
        end_s = time.monotonic() + (VISIBLE_S if self.state == "COMPLETED" else POLL_S)
        while len(found := results_in(self.folder, self._num_ranks)) < self._num_ranks:
            if time.monotonic() > end_s:
                last = "\n".join(self.stdout().splitlines()[-20:])
                raise LaunchError(
                    f"every rank must return from the function, but job {self.id} is {self.state} "
                    f"with {len(found)} of {self._num_ranks} results; its output ends:\n{last}"
                )
            time.sleep(POLL_S)
        return [found[rank] for rank in range(self._num_ranks)]

    def stdout(self) -> str:
        """Return the output of all ranks so far, standard error included."""
        file = self.folder / f"slurm-{self.id}.out"
        return file.read_text("utf-8", "replace") if file.exists() else ""

    def cancel(self) -> None:
        """End the job, or remove it from the queue."""
        scheduler.cancel(self.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources(CheckedFields):
    """Resources of a job of ``hpctrain.submit``.

    Raises ``ConfigError``: a value is not valid.
    """

    nodes: Number = 1
    tasks: Number = 1
    """Ranks on each node."""
    time: str = "1h"
    """Time limit, such as ``"90min"`` or ``"01:30:00"``."""
    cpus: Number | None = None
    """Cores of each rank."""
    gpus: Count | None = None
    """GPUs of each node."""
    partition: str | None = None
    account: str | None = None
    """Slurm account to charge."""
    requeue: bool | None = None
    """Whether Slurm queues the job again after exit code 85 or the loss of a node."""
    options: Texts = field(default_factory=list)
    """Further options of sbatch, such as ``"--qos=high"``."""
    folder: Path | str | None = None
    """Folder of the call, its results and its output; by default a new folder in ``runs``. All
    nodes must see this folder."""


def submit(fn: Callable[..., Any], resources: Resources, /, *args: Any, **kwargs: Any) -> Job:
    """Call ``fn(*args, **kwargs)`` on every rank of a new job of Slurm, and return at once.

    Not collective: a program on the login node calls this function, and needs neither torch nor
    MPI. Each rank calls ``hpctrain.init()`` before ``fn``. The function and its arguments are
    pickled by cloudpickle.

    Args:
        fn: the function; its result must be picklable.
        resources: resources of the job.
        args: positional arguments of ``fn``, the same on every rank.
        kwargs: keyword arguments of ``fn``.

    Raises:
        ConfigError: an option is not valid, or the folder cannot be written.
        LaunchError: there is no Slurm, or Slurm rejects the job; contains Slurm's message.

    Source: the methods of ``Job`` have the same names as in submitit.
    """
    if not isinstance(resources, Resources):
        raise ConfigError(
            f"the second argument of submit must be the resources of the job, got {resources!r}; "
            f"use hpctrain.submit(fn, hpctrain.Resources(nodes=1), ...)"
        )
    name = getattr(fn, "__name__", "function").strip("<>")
    folder = absolute(_new_folder(name) if resources.folder is None else resources.folder)
    with explained_writes("the folder of a job", folder, "name another with Resources.folder"):
        make_folder(folder)
        program = tuple(write_call(folder, fn, args, kwargs))
    settings = BatchSettings(
        job_name=name,
        partition=resources.partition,
        account=resources.account,
        nodes=resources.nodes,
        ntasks_per_node=resources.tasks,
        cpus_per_task=resources.cpus,
        time=scheduler.sbatch_time(resources.time),
        gpus_per_node=resources.gpus,
        requeue=resources.requeue,
        extra=tuple(resources.options),
        output=f"{folder}/slurm-%j.out",
        program=program,
        directory=str(folder),
    )
    script = batch_script.script("requeue" if settings.requeue else "multi_node", settings)
    number = scheduler.submit_in(folder, script, environment_of_ranks())
    return Job(number, folder, resources.nodes * resources.tasks)


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"{name}-{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6}")
