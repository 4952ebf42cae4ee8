"""A run from its configuration to the last line."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from hpctrain.checkpoint.plain import save_on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan
from hpctrain.comm.plan_file import StoredPlan
from hpctrain.config import Settings
from hpctrain.errors import ConfigError
from hpctrain.logs import logger
from hpctrain.runtime import world
from hpctrain.train.agreed import agreed
from hpctrain.train.load import Loaded
from hpctrain.train.loop import Outcome, train
from hpctrain.train.metrics import Metrics
from hpctrain.train.plot import plot_run
from hpctrain.train.progress import Progress, make_console
from hpctrain.train.run_directory import RunDirectory, environment
from hpctrain.train.targets import make_importable
from hpctrain.train.task import Task, build
from hpctrain.train.template import render
from hpctrain.units import format_seconds


def run(loaded: Loaded, environment_settings: Mapping[str, Any], *, dry_run: bool) -> None:
    """Train as ``loaded`` says; with ``dry_run`` only build and describe everything.

    Collective over all ranks that were started together.

    Args:
        loaded: the configuration.
        environment_settings: what ``HPCTRAIN_*`` variables set, by names of ``Settings``.
        dry_run: write nothing into the run directory and train nothing.

    Raises:
        MismatchError: something is wrong with the configuration; on all ranks.
        LaunchError: the ranks do not form a world.
    """
    directory = RunDirectory(loaded.config.directory)
    if not dry_run:
        directory.make_log_folder()
    world.join(_settings(loaded, environment_settings, directory, dry_run=dry_run))
    here = world.current()
    comm = here.comm
    console = make_console(shown=comm.rank == 0)
    text = render(loaded.config)
    comm.agree(
        comm.broadcast_object(text) == text,
        "this rank has read another configuration than rank 0; all must see the same file",
    )
    with agreed(comm):
        if comm.rank == 0 and not dry_run:
            directory.check_unused()
    make_importable(loaded.folder)
    task = build(loaded.config, comm)
    _describe(console, here, task, directory)
    if dry_run:
        _describe_measurements(console, here.plan)
        console.print("dry run: everything is built, nothing was trained")
        return
    with agreed(comm):
        if comm.rank == 0:
            directory.create(
                text,
                environment(),
                {
                    "topology": dict(here.topology.describe()),
                    **StoredPlan.of(here.topology, here.plan).as_dict(),
                },
            )
    outcome = _train(task, directory, comm, console)
    if comm.rank == 0 and loaded.config.log.plots:
        _plot(directory)
    console.print(
        f"{task.num_samples / outcome.training_s:.0f} samples/s over all ranks, "
        f"{format_seconds(outcome.training_s)} in all; results in {directory.path}"
    )
    console.print(f"test {task.metric_name} {outcome.scores.metric:.4f}")


def _train(task: Task, directory: RunDirectory, comm: Communicator, console: Console) -> Outcome:
    """Train, save, and write the first and the last record."""
    epochs = task.config.train.epochs
    with Metrics(directory.metrics if comm.rank == 0 else None) as metrics:
        metrics.write("started", **_facts(task))
        with Progress(console, task.num_steps, epochs, task.metric_name) as progress:
            outcome = train(task, comm, metrics, progress)
        state = {
            "model": task.model.state_dict(),
            "optimizer": task.optimizer.state_dict(),
            "epoch": epochs,
            "step": task.num_steps,
        }
        with agreed(comm):
            save_on_root(directory.checkpoints / "final.pt", state, comm)
        metrics.write(
            "finished",
            **_facts(task),
            **asdict(outcome.scores),
            metric_name=task.metric_name,
            training_s=outcome.training_s,
            samples_per_s=task.num_samples / outcome.training_s,
        )
    return outcome


def _settings(
    loaded: Loaded, given: Mapping[str, Any], directory: RunDirectory, *, dry_run: bool
) -> Settings:
    """All settings of this process: the configuration has the last word on what it covers."""
    comm = loaded.config.comm
    values = {
        "log_dir": None if dry_run else directory.logs,
        **given,
        "overlap": comm.overlap,
        "bucket_bytes": comm.bucket_bytes,
        "ranks_per_node": comm.ranks_per_node or None,
    }
    return Settings(**values)


def _facts(task: Task) -> dict[str, Any]:
    here = world.current()
    return {
        "world_size": here.topology.size,
        "nodes": here.topology.num_nodes,
        "path": here.plan.node_memory,
        "rails": here.plan.num_rails,
        "parameters": task.num_parameters,
    }


def _plot(directory: RunDirectory) -> None:
    try:
        plot_run(directory.metrics, directory.plots / "training.png")
    except ConfigError as error:
        logger.warning(str(error))  # the run itself is complete


def _describe(console: Console, here: world.World, task: Task, directory: RunDirectory) -> None:
    config = task.config
    rows = [
        ("run directory", str(directory.path)),
        ("model", f"{config.model.target}, {task.num_parameters} parameters"),
        ("data", f"{config.data.target}, {task.num_train_samples} samples"),
        ("epochs", f"{config.train.epochs} of {len(task.train)} steps, {task.num_steps} in all"),
        ("global batch", f"{config.train.global_batch} samples"),
        ("optimizer", f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}"),
    ]
    for title, part in (
        (config.name, rows),
        ("topology", here.topology.describe()),
        ("plan", [*here.plan.describe(), ("chosen by", here.plan_origin)]),
    ):
        console.print(_table(title, part))


def _describe_measurements(console: Console, plan: Plan) -> None:
    for what, title in (("rail", "parts between nodes"), ("tensors", "other tensors")):
        if rows := plan.measurements(what):
            table = Table(*rows[0], title=title, title_justify="left", title_style="bold")
            for row in rows[1:]:
                table.add_row(*row)
            console.print(table)


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table
