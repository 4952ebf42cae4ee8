"""Training of one part of a run: from one start or resume to the next stop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hpctrain.checkpoint.manager import Manager
from hpctrain.cluster.env import job_id
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.mpi_library import version
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NotFiniteError,
    ReplicaError,
)
from hpctrain.core.logs import logger
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import tomllib
from hpctrain.core.records import read
from hpctrain.launch.lease import Lease
from hpctrain.launch.slurm.scheduler import restart_count
from hpctrain.runtime import world
from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.boundary import Boundary
from hpctrain.train.console import Progress
from hpctrain.train.evaluation import evaluate
from hpctrain.train.loggers import Loggers
from hpctrain.train.loop import Outcome, Stopped, TrainingLoop, skipped_text
from hpctrain.train.metrics import Metrics
from hpctrain.train.profiler import Profiler
from hpctrain.train.resume import given_arguments
from hpctrain.train.run_directory import RunDirectory, environment
from hpctrain.train.run_state import RunState
from hpctrain.train.task import Task

KILLED = "killed"
"""Reason if a part ended without a last record: after a crash, a lost node or a time limit."""

FAILED = "an error"
"""Reason if an exception or a loss that is not finite ended a part."""

FINISHED = "finished"  # reason if a part reached the last step of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """Description of one part of a run, stored in the part's first record.

    Each start and each resume begins a part.
    """

    part: int = 1
    """Index of the part, from 1, over all jobs; parts without a checkpoint are included."""
    ended_by: str | None = None
    """Reason why the previous part ended, such as ``killed``; None for the first part."""
    job: str = ""  # job id of the scheduler; empty outside a job
    restarts: int = 0  # number of restarts of this job by Slurm

    @classmethod
    def after(cls, records: Sequence[dict[str, Any]]) -> "RunPart":
        """Return the part that the current job begins, after a run with these ``records``."""
        job, restarts = job_id(), restart_count()
        parts = [r.get("part", 1) for r in records if r["event"] in ("started", "resumed")]
        if not parts:
            return cls(job=job, restarts=restarts)
        last = records[-1]
        stopped = last.get("reason", KILLED)
        known = {"stopped": stopped, "failed": FAILED, "finished": FINISHED}
        ended_by = known.get(last["event"], KILLED)
        return cls(part=parts[-1] + 1, ended_by=ended_by, job=job, restarts=restarts)

    def describe(self) -> str:
        """Return a one-line description of this part."""
        job = f" in job {self.job}" if self.job else ""
        again = f", restart {self.restarts}" if self.restarts else ""
        known = {KILLED: "ended without a last record", FINISHED: FINISHED}
        how = known.get(str(self.ended_by), f"was stopped by {self.ended_by}")
        return f"part {self.part} of the run{job}{again}: the previous part {how}"


class RunInDirectory:
    """Trains one part of a run, and writes records and checkpoints into the run directory.

    Args:
        task: model, data and exchange to train.
        directory: directory of the run.
        console: displays the progress on rank 0.
        lease: lock of the directory, on rank 0; None on other ranks.
        modules: folder from which the modules that the configuration names are imported, stored
            in the records. Default is the current directory.
    """

    def __init__(
        self,
        task: Task,
        directory: RunDirectory,
        console: Console,
        lease: Lease | None = None,
        modules: Path | None = None,
    ) -> None:
        self._modules = str(modules or absolute(""))
        self._task, self._comm = task, task.comm
        self._directory, self._console, self._lease = directory, console, lease
        self._state = RunState(task=task)

    @property
    def step(self) -> int:
        """Number of finished steps of the run."""
        return self._state.step

    def carry_out(
        self, config_text: str, requests: StopRequests, *, continues: bool
    ) -> Outcome | Stopped:
        """Train until the end or a stop request. Collective.

        Args:
            config_text: configuration in TOML, to be stored.
            requests: requests to stop.
            continues: whether to continue from the last checkpoint.

        Returns:
            The result of the finished run, or the reason why the run stopped; on all ranks.

        Raises:
            MismatchError: the run directory cannot be written, or no checkpoint can be read; on
                all ranks.
            NotFiniteError: loss, gradients or parameters are not finite; on all ranks.
            ReplicaError: the replicas differ; on all ranks.
        """
        here, comm, directory = world.current(), self._comm, self._directory
        plan = {
            "topology": dict(here.topology.describe()),
            **StoredPlan.of(here.topology, here.plan).as_dict(),
        }
        with agreed(comm):
            manager = self._manager()
        if continues:
            with agreed(comm):
                self._load(manager)

        def begin() -> RunPart:
            self._check_lease()
            path, state = directory.metrics, self._state
            # Read first: directory.resume() removes the records after the checkpoint.
            part = RunPart.after(read(path) if path.exists() else ())
            if part.ended_by:
                self._console.print(part.describe())
            if continues:
                directory.resume(config_text, plan, num_records=state.num_records, step=state.step)
            else:
                directory.create(config_text, self._environment(), plan)
            return part

        part = on_root(comm, begin)
        with self._metrics(config_text) as metrics:
            facts = self._facts()
            hosts = dict(zip(here.topology.hosts, here.topology.nodes, strict=True))
            about = {"num_steps": self._task.num_steps, "hosts": hosts, "modules": self._modules}
            about["tested"] = self._task.tested
            self._record_start(metrics, {**asdict(part), **facts, **about})
            facts |= {"configuration": config_text, "plan": plan}
            facts["dataset"] = self._task.train.dataset.uuid
            boundary = Boundary(comm, requests, manager, metrics, facts, self._lease)
            with self._record_failure(metrics, manager):
                outcome = self._train(metrics, boundary)
            self._close(manager)
            boundary.check_lease()  # without the lease, rank 0 wrote no last record
            self._task.exchange.close()
            metrics.sync()
        comm.barrier()  # a launcher may kill rank 0 once another rank exits
        return outcome

    def _record_start(self, metrics: Metrics, facts: Mapping[str, Any]) -> None:
        state = self._state
        if state.num_records:
            place = {"step": state.step, "epoch": state.epochs_done}
            metrics.write("resumed", **place, **facts, environment=self._environment())
        else:
            metrics.write("started", **facts)

    def _environment(self) -> dict[str, Any]:
        # On a single rank MPI is not loaded, so there is no version to record.
        return environment(version() if self._comm.size > 1 else None)

    def _manager(self) -> Manager:
        table = self._task.config.checkpoint
        return Manager(
            self._directory.checkpoints,
            self._comm,
            every=table.every,
            keep=table.keep,
            keep_best=self._task.config.keep_best,
            mtbf=table.mtbf or None,
            background=table.background,
            guard=self._check_lease,
            files=table.files,
        )

    def _metrics(self, config_text: str) -> Metrics:
        if self._comm.rank:
            return Metrics(None)
        names, folder = self._task.config.log.to, self._directory.path
        loggers = Loggers(names, folder, tomllib.loads(config_text))
        may_write = (lambda: True) if self._lease is None else self._lease.is_held
        return Metrics(self._directory.metrics, may_write, loggers)

    def _check_lease(self) -> None:
        """Raise ``CheckpointError`` on rank 0 if another job has taken the run directory."""
        if self._lease is not None:
            self._lease.check()

    def _load(self, manager: Manager) -> None:
        loaded = manager.load_latest(into=self._task.exchange.wanted(manager.latest))
        if loaded is None:
            self._console.print("there is no checkpoint yet: the run starts again from step 0")
            return
        ranks, comm = len(loaded.private), self._comm
        layouts = [loaded.state.get("layout"), self._task.exchange.layout]
        is_same = ranks == comm.size and layouts[0] == layouts[1]
        own = loaded.private.get(comm.rank) if is_same else None
        if loaded.step > self._task.num_steps:
            raise ConfigError(
                f"train.epochs must not end a run before its checkpoint, but train.epochs = "
                f"{self._task.config.train.epochs} gives {self._task.num_steps} steps and the "
                f"checkpoint was saved after step {loaded.step}; use more epochs, or choose "
                f"another output_dir"
            )
        configured = [dict(group) for group in self._task.optimizer.param_groups]
        self._state.restore(loaded.state, own)
        # Restoring the optimizer has replaced its arguments with the saved arguments.
        given = given_arguments(self._directory, self._task.config)
        for group, fresh in zip(self._task.optimizer.param_groups, configured, strict=True):
            group.update({name: fresh[name] for name in given if name in fresh})
        self._console.print(f"continuing after step {loaded.step} of {self._task.num_steps}")
        if layouts[0] != layouts[1]:
            before, now = (layout or "whole models" for layout in layouts)
            self._console.print(f"the checkpoint was saved with {before}, this run has {now}")
        if ranks != comm.size:
            differ = "random numbers and the order of sums change"
            if self._task.exchange.takes_own_steps:
                differ = (
                    "each rank continues from the mean of the replicas, with other random numbers"
                )
            self._console.print(
                f"the checkpoint was saved by {ranks} ranks, this run has {comm.size}: "
                f"{'results do not change' if self._task.exchange.is_reproducible else differ}"
            )

    def _train(self, metrics: Metrics, boundary: Boundary) -> Outcome | Stopped:
        """Run the training loop, and write the last record of the part."""
        task, state = self._task, self._state
        epochs, metric = task.config.train.epochs, f"{task.tested} {task.metric_name}"
        with (
            Progress(self._console, task.num_steps, epochs, metric) as progress,
            Profiler(task.config.log, self._directory.profile, self._comm.rank) as profiler,
        ):
            outcome = TrainingLoop(state, metrics, progress, boundary, profiler).train()
        if isinstance(outcome, Stopped):
            metrics.write("stopped", step=outcome.step, reason=outcome.reason)
            return outcome
        if task.held_out is not None:
            outcome = replace(outcome, scores=evaluate(replace(task, test=task.held_out)))
        metrics.write(
            "finished",
            step=state.step,
            **self._facts(),
            **asdict(outcome.scores),
            metric_name=task.metric_name,
            training_s=outcome.training_s,
            samples_per_s=outcome.num_samples / outcome.training_s,
            best=outcome.best,
            **task.exchange.figures,
            **({"skipped": state.num_skipped} if state.num_skipped else {}),
            state_hash=task.exchange.hash(),
        )
        if state.num_skipped:
            self._console.print(skipped_text(state.num_skipped))
        return outcome

    @contextmanager
    def _record_failure(self, metrics: Metrics, manager: Manager) -> Iterator[None]:
        """Write a record ``failed`` for a ``NotFiniteError`` or ``ReplicaError``. Collective."""
        try:
            yield
        except (NotFiniteError, ReplicaError) as error:
            self._close(manager)
            reason = str(error).partition("\n")[0]
            metrics.write("failed", step=self._state.step, reason=reason)
            metrics.sync()
            self._comm.barrier()
            if isinstance(error, NotFiniteError):
                raise NotFiniteError(f"{error}\n{_resume_hint(manager)}") from error
            raise
        except CheckpointError as error:  # the final state could not be saved
            self._close(manager)
            raise MismatchError(f"{error}\n{_resume_hint(manager)}") from error

    def _close(self, manager: Manager) -> None:
        try:
            manager.close()
        except CheckpointError as error:  # training itself succeeded
            if self._comm.rank == 0:
                logger.warning(f"the last checkpoint is incomplete: {error}")

    def _facts(self) -> dict[str, Any]:
        here = world.current()
        return {
            "world_size": here.topology.size,
            "nodes": here.topology.num_nodes,
            "path": here.plan.node_memory,
            "rails": here.plan.num_rails,
            "parameters": self._task.exchange.num_parameters,
            **({"device": self._task.device_reason} if self._task.device_reason else {}),
            **self._task.exchange.facts,
        }


def _resume_hint(manager: Manager) -> str:
    """Return a line about the checkpoint from which ``--resume`` continues. Collective."""
    newest = None
    with suppress(CheckpointError):
        newest = manager.latest()
    where = "start again" if newest is None else f"continue from {newest.name}"
    return f"then {where} with --resume"
