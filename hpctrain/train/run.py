"""Execution of a run, from its configuration to its exit code."""

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from rich.console import Console
from rich.table import Column, Table

from hpctrain.checkpoint.checkpoint_directory import CheckpointDirectory
from hpctrain.cluster.env import STOPPED
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan
from hpctrain.core.checks import seconds
from hpctrain.core.config import Settings
from hpctrain.core.errors import CheckpointError, ConfigError, NotFiniteError, ReplicaError
from hpctrain.core.keys import render
from hpctrain.core.lazy import imported
from hpctrain.core.logs import logger
from hpctrain.core.paths import absolute
from hpctrain.core.target import make_importable, resolve
from hpctrain.core.units import format_seconds
from hpctrain.data.loader import Loader
from hpctrain.data.samples import Batch
from hpctrain.launch.lease import TIMES, Holder, Lease
from hpctrain.runtime import initialization, recovery, world
from hpctrain.runtime.stopping import StopRequests, deadline, end_of_job
from hpctrain.train.attempts import RunInDirectory
from hpctrain.train.console import make_console
from hpctrain.train.evaluation import evaluate
from hpctrain.train.failure_record import FailureRecord
from hpctrain.train.finite import StepGuard
from hpctrain.train.load_config import LoadedData
from hpctrain.train.loggers import check as check_loggers
from hpctrain.train.loop import Outcome, Stopped, train_step
from hpctrain.train.metrics import Metrics, result
from hpctrain.train.resume import check_same, continues_run, finished, plan_to_keep, settled
from hpctrain.train.run_config import RunConfig, located
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.run_status import last_record
from hpctrain.train.task import Task, build

_DIVIDED_RULE = (
    "a run with [parallel] must end when it loses a rank, because groups of torch.distributed "
    "keep their ranks; continue it with --resume, or start it with hpctrain launch --restart N"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a command that runs a configuration."""

    dry_run: bool = False  # build, describe and rehearse; write and keep nothing
    look: bool = False  # with dry_run: build everything, read one batch, compute nothing
    resume: bool = False  # continue the run in its directory
    changed: bool = False  # with resume: accept changes of the configuration that affect results
    force: bool = False  # take the run directory from another job, even if that job is running
    verbose: bool = False  # print topology and plan in full, as a dry run does


def run(loaded: LoadedData, environment_settings: Mapping[str, Any], how: RunOptions) -> int:
    """Train from the start or from the last checkpoint. Collective over all launched ranks.

    Args:
        loaded: configuration of the run.
        environment_settings: values of ``HPCTRAIN_*`` variables, by attribute of ``Settings``.
        how: options of the command.

    Returns:
        Exit code: 0 if the run finished, 85 if it stopped and can be resumed.

    Raises:
        MismatchError: the configuration or the run directory is invalid; on all ranks.
        LaunchError: the ranks cannot be connected.
    """
    return _Run(loaded, how).carry_out(environment_settings)


class _Run:
    def __init__(self, loaded: LoadedData, how: RunOptions) -> None:
        self._started = time.time()
        self._loaded, self._how = loaded, how
        self._directory = RunDirectory(absolute(loaded.config.directory))
        self._start = absolute("")  # modules of the run may change the working directory later
        self._in_directory: RunInDirectory | None = None

    def carry_out(self, given: Mapping[str, Any]) -> int:
        """Connect the ranks and train; if ranks are lost, resume with the others. Collective."""
        config, directory, how = self._loaded.config, self._directory, self._how
        continues = not how.dry_run and continues_run(config, directory, asked=how.resume)
        if not how.dry_run:
            directory.make_log_folder()
        settings = self._settings(given)
        kept = plan_to_keep(directory, config, settings.engine) if continues else None
        initialization.join(replace(settings, plan=settings.plan or kept))
        if config.parallel.divides:
            with recovery.ends_with_losses(_DIVIDED_RULE):
                return self._train_with_lease()
        if not recovery.is_on():
            return self._train_with_lease()
        while True:
            code: int | None
            code, _, error = recovery.attempt(self._train_or_resume, moves=False)
            if code is not None:
                return code
            if error is not None:
                # Release the objects that belong to the communicators before the loss.
                traceback.clear_frames(error.__traceback__)

    def _train_or_resume(self) -> int:
        """Train on the current ranks; resume the run if ranks were lost before. Collective."""
        if not world.current().is_first:
            begun = on_root(world.current().comm, self._directory.has_begun)
            self._how = replace(self._how, resume=self._how.resume or begun)
        return self._train_with_lease()

    def _train_with_lease(self) -> int:
        """Acquire the lease of the run directory, then train on the current ranks. Collective."""
        self._comm = world.current().comm
        self._console = make_console(shown=self._comm.rank == 0)
        if self._how.dry_run:
            return self._train()
        self._plan_part()  # raises errors before this job waits for the lease
        with held(self._directory, self._comm, self._console, force=self._how.force) as lease:
            return self._train(lease)

    def _settings(self, given: Mapping[str, Any]) -> Settings:
        """Return the ``HPCTRAIN_*`` settings; keys of the configuration take precedence."""
        comm = self._loaded.config.comm
        values = {
            "log_dir": None if self._how.dry_run else self._directory.logs,
            **given,
            "overlap": comm.overlap,
            "bucket_bytes": comm.bucket_bytes,
            "ranks_per_node": comm.ranks_per_node or None,
        }
        if self._loaded.config.train.on_divergence == "heal" and "check_weights" not in given:
            values["check_weights"] = "warn"
        return Settings(**values)

    def _plan_part(self) -> tuple[RunConfig, bool, list[str]]:
        """Return the configuration, whether the run is resumed, and the changed keys. Collective.

        Raises ``MismatchError`` on all ranks if the directory does not allow this run.
        """
        config, directory, how, comm = self._loaded.config, self._directory, self._how, self._comm
        continues = on_root(
            comm, lambda: not how.dry_run and continues_run(config, directory, asked=how.resume)
        )
        config = settled(config, directory if continues else None, comm)
        # Keep the number of micro-shards if ranks are lost before the first checkpoint.
        self._loaded = replace(self._loaded, config=config)
        text = render(config)
        comm.agree(
            comm.broadcast_object(text) == text,
            "all ranks must read the same configuration, but this rank and rank 0 read different "
            "ones; use a file that all ranks see",
        )

        def changes() -> list[str]:
            if continues:
                return check_same(directory, config, changed=how.changed)
            # No check for a job that may resume: it waits until the previous job has ended.
            if not (how.dry_run or how.resume or config.checkpoint.resume == "auto"):
                directory.check_unused()
            return []

        return config, continues, on_root(comm, changes)

    def _train(self, lease: Lease | None = None) -> int:
        """Train, or with ``dry_run`` only rehearse; return the exit code. Collective.

        ``lease`` is None on all ranks but rank 0, and with ``dry_run``.
        """
        directory, console = self._directory, self._console
        # Repeated: while this job waited, the previous job may have started or finished the run.
        config, continues, changes = self._plan_part()
        last = on_root(self._comm, lambda: finished(directory) if continues else None)
        if last is not None and not changes:
            console.print(f"the run in {config.directory} is finished, there is nothing to resume")
            console.print(result(last))
            return 0
        make_importable(self._loaded.folder)
        if self._how.dry_run:
            return self._carry_out(config, lease, changes, continues=continues)
        with FailureRecord(directory, self._comm, lease, self._num_steps).kept():
            return self._carry_out(config, lease, changes, continues=continues)

    def _num_steps(self) -> int:
        return self._in_directory.step if self._in_directory is not None else 0

    def _carry_out(
        self, config: RunConfig, lease: Lease | None, changes: list[str], *, continues: bool
    ) -> int:
        """Build and train; return the exit code. Collective."""
        here, directory, console = world.current(), self._directory, self._console
        on_root(self._comm, lambda: check_loggers(config.log.to))
        shelf = CheckpointDirectory(directory.checkpoints)
        has_weights = on_root(self._comm, lambda: continues and bool(shelf.steps()))
        # Importing the module may draw random numbers, so import it before build() seeds.
        with agreed(self._comm):
            resolve(config.model.target, "model.target")
        task = build(located(config, self._start), self._comm, is_new=not has_weights)
        if self._how.look:
            task.split(next(iter(task.train)))
            return 0
        _introduce(console, here, task)
        if self._how.verbose or self._how.dry_run:
            _describe(console, here)
        for line in changes:
            console.print(f"changed: {line}")
        if self._how.dry_run:
            _describe_measurements(console, here.plan)
            rehearse(task)
            console.print("dry run: a step and a test of one batch succeeded, nothing was written")
            return 0
        with requests_of(config, directory, self._started, self._comm) as requests:
            here_are = self._loaded.folder
            run = RunInDirectory(task, directory, console, lease, here_are)
            self._in_directory = run
            try:
                outcome = run.carry_out(render(config), requests, continues=continues)
            except (NotFiniteError, ReplicaError):
                self._draw(lease)
                raise
        code = self._end(task, outcome)
        self._draw(lease)
        return code

    def _draw(self, lease: Lease | None) -> None:
        """Plot the records of the run, if configured."""
        if lease is None or not (self._loaded.config.log.plots and lease.is_held(looks=True)):
            return
        try:
            draw_run = imported("hpctrain.train.run_figures:draw_run")
            draw_run(self._directory.path, self._directory.plot)
        except ConfigError as error:  # a missing plot must not fail the run
            logger.warning(str(error))

    def _end(self, task: Task, outcome: Outcome | Stopped) -> int:
        """Print the outcome and return the exit code."""
        if isinstance(outcome, Stopped):
            self._console.print(
                f"stopped by {outcome.reason} after step {outcome.step} of {task.num_steps}; "
                f"the same command with --resume continues it",
                style="yellow",
            )
            return STOPPED
        if outcome.step < task.num_steps:
            self._console.print(
                f"ended after step {outcome.step} of {task.num_steps}: no improvement within "
                f"test.patience = {task.config.test.patience}"
            )
        self._console.print(
            f"{outcome.num_samples / outcome.training_s:.0f} samples/s over all ranks, "
            f"{format_seconds(outcome.training_s)} in all; results in {task.config.directory}"
        )
        if task.config.sync.compression != "none" and self._comm.rank == 0:
            for line in self._compression_lines(task):
                self._console.print(line)
        for line in self._test_lines(task, outcome):
            self._console.print(line, style="bold green")
        return 0

    def _compression_lines(self, task: Task) -> Iterator[str]:
        """Yield lines about the bytes that compression saves and the codec that ``auto`` chose."""
        name = task.config.sync.compression
        if choice := getattr(task.exchange.codec, "choice", ""):
            yield f"compression {name} chose {choice}"
        savings = (
            imported("hpctrain.train.history:RunHistory").read(self._directory.path).savings_text
        )
        if savings:
            yield f"compression {name}: {savings}"

    def _test_lines(self, task: Task, outcome: Outcome) -> Iterator[str]:
        """Yield lines about the last test and, if another test was better, about the best test."""
        best, is_other = outcome.best, False
        if task.config.keep_best and best and best["step"] != outcome.step:
            # The configured path may be relative, as the user wrote it.
            folder = RunDirectory(task.config.directory).checkpoints
            path, is_other = CheckpointDirectory(folder).path(best["step"]), True
            yield f"best {task.tested} {task.metric_name} {best['metric']:.4f}, in {path}"
        if is_other or task.ema is not None:
            averaged = ", averaged by train.ema" * (task.ema is not None)
            yield f"on the test data, with the weights of the last step{averaged}:"
        yield from outcome.scores.lines(task.metric_name)


def rehearse(task: Task) -> None:
    """Run one step and test one batch without writing anything. Collective.

    Raises the same errors as a run.
    """
    guard = StepGuard(task, Metrics(None))
    guard.begin(1, task.config.optimizer.lr, 0)
    train_step(task, next(iter(task.train)), guard)
    guard.end()
    guard.check_test(evaluate(replace(task, test=cast("Loader", _FirstBatch(task.test)))), 1, 1)


class _FirstBatch:
    """Loader that yields only the first batch of another loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        yield from islice(self._loader, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def requests_of(
    config: RunConfig, directory: RunDirectory, started: float, comm: Communicator
) -> StopRequests:
    """Return the stop requests: signals on every rank; deadline and stop file on rank 0."""
    if comm.rank:
        return StopRequests()
    margin_s = seconds(config.stop.margin) or 0.0
    end = deadline(started, seconds(config.stop.after), end_of_job(), margin_s)
    return StopRequests(stop_file=directory.stop, deadline=end)


def _introduce(console: Console, here: world.World, task: Task) -> None:
    config, number = task.config, task.config.train.epochs
    epochs = "1 epoch" if number == 1 else f"{number} epochs"
    machine, [(name, plan), *_] = dict(here.topology.describe()), here.plan.describe()
    rate = f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}"
    data = f"{task.num_train_samples} samples, {config.train.global_batch} in each of"
    rows = [
        (config.name, f"in {config.directory}"),
        ("model", f"{config.model.target}, {task.exchange.num_parameters} parameters, {rate}"),
        ("data", f"{config.data.target}, {data} {task.num_steps} steps, {epochs}"),
        *([("validation", _held_out(task))] if task.held_out else []),
        *task.exchange.describe(),
        ("ranks", f"{machine['ranks']}; {name} {plan}"),
        *([("device", task.device_reason)] if task.device_reason else []),
        *([("shard", task.shard_reason)] if task.shard_reason else []),
    ]
    grid = Table.grid(Column(style="cyan", no_wrap=True), Column(), padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _held_out(task: Task) -> str:
    assert task.held_out is not None
    num, num_test = len(task.test.dataset), len(task.held_out.dataset)
    return f"{num} samples held out of training; {num_test} for the test at the end"


def _describe(console: Console, here: world.World) -> None:
    for title, part in (
        ("topology", here.topology.describe()),
        ("plan", [*here.plan.describe(), ("chosen by", here.plan_origin)]),
    ):
        console.print(_table(title, part))


def _describe_measurements(console: Console, plan: Plan) -> None:
    for what, title in (("rail", "parts between nodes"), ("tensors", "other tensors")):
        if rows := plan.measurements(what):
            console.print(_table(title, rows[1:], *rows[0]))


def _table(title: str, rows: Iterable[Iterable[str]], *head: str) -> Table:
    columns = head or (Column(style="dim", no_wrap=True), Column())
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    table.show_header = bool(head)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def held(
    directory: RunDirectory, comm: Communicator, console: Console, *, force: bool
) -> Iterator[Lease | None]:
    """Hold the lease of a run directory inside the block. Collective on entry.

    Waits for a job that is about to end, and takes the lease from a job that is dead.

    Args:
        directory: directory of the run.
        comm: all ranks.
        console: displays a description of the job that holds the lease, while this job waits.
        force: take the lease from a running job too.

    Yields:
        The lease on rank 0, None on other ranks.

    Raises:
        MismatchError: a running job holds the lease, or the directory is not writable; on all
            ranks.
    """
    lease = Lease(directory.path) if comm.rank == 0 else None
    description = ""

    def attempt() -> str:
        assert lease is not None
        with directory.explained():
            return lease.attempt(force=force)

    try:
        if lease is not None and force and (holder := Holder.read(directory.path)):
            console.print(_lost_steps(directory, holder))
        while waits_for := on_root(comm, attempt):
            if waits_for != description:
                console.print(waits_for)
                description = waits_for
            time.sleep(TIMES.look_s)
        yield lease
    finally:
        if lease is not None:
            lease.release()


def _lost_steps(directory: RunDirectory, holder: Holder) -> str:
    """Return a message about the steps that are lost if this job takes the run from ``holder``."""
    newest, last = None, 0
    with suppress(CheckpointError):
        newest, _ = CheckpointDirectory(directory.checkpoints).newest()
    with suppress(OSError, ValueError):
        last = last_record(directory.metrics).get("step", 0)
    start = f"the checkpoint of step {newest}" if newest is not None else "the start"
    return (
        f"--force takes {directory.path} from {holder.describe()}, which stops if it still runs; "
        f"the run continues from {start}, and later steps are lost; the last record is of step "
        f"{last}"
    )
