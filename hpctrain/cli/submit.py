"""``hpctrain submit``: a job of Slurm that trains what a configuration or a script describes."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hpctrain.cli.options import argument, flag, option
from hpctrain.core.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from hpctrain.core.finding import Finding
    from hpctrain.launch.slurm.batch_script import BatchSettings

_OUTPUT_DIR = re.compile(r"\s*output_dir\s*=")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """A job before it is submitted."""

    name: str
    folder: Path  # of the run; an array has one below it for each index
    is_array: bool = False

    def __post_init__(self) -> None:
        if "$" in str(self.folder):
            raise ConfigError(
                f"the folder of a job's run is a plain name without $, got {self.folder}; "
                "say another with --name"
            )

    @property
    def directory(self) -> str:
        """The run's folder as the script says it."""
        return f"{self.folder}/$SLURM_ARRAY_TASK_ID" if self.is_array else str(self.folder)

    @property
    def output(self) -> str:
        """File of the output, in Slurm's patterns."""
        return f"{self.folder}/slurm-{'%A_%a' if self.is_array else '%j'}.out"

    def check_free(self, after: str) -> None:
        """Raise where another job works on this run, or it is finished.

        ``after`` is for what the job will wait, so that it does not work at the same time.
        """
        from hpctrain.launch.slurm.scheduler import in_queue, jobs_of  # noqa: PLC0415
        from hpctrain.train.run_status import status  # noqa: PLC0415

        found = status(self.folder)
        if found.state == "finished":
            raise ConfigError(
                f"{found.what}; submit another run with --name {self.name}-2, or remove the folder"
            )
        named = re.findall(r"\d+", after)
        others = [job for job in jobs_of(self.folder) if str(job) not in named]
        if others and (there := [*in_queue(others)]):
            raise LaunchError(
                f"one job at a time works on a run, and job {there[-1]} waits or runs for "
                f"{self.folder}; continue it with --after afterany:{there[-1]}, cancel it with "
                f"`scancel {there[-1]}`, or submit another run with --name {self.name}-2"
            )

    def how_to_watch(self, number: int, output: str) -> str:
        """Return the lines that tell a user where to look; ``output`` is in Slurm's patterns."""
        values = {"j": number, "A": number, "x": self.name, "a": "*", "%": "%"}
        file = re.sub(r"%\d*(.)", lambda found: str(values.get(found[1], "*")), output)
        run = self.folder / "INDEX" if self.is_array else self.folder
        from hpctrain.launch.slurm.scheduler import SCRIPT  # noqa: PLC0415

        rows = (
            (f"squeue -j {number}", "where it stands"),
            (f"tail -F {file}", "its output"),
            (f"hpctrain status {run}", "waiting, at work, stopped or finished"),
            (f"touch {run}/STOP", "the run saves its state and stops"),
            (f"scancel {number}", "the job ends at once"),
        )
        width = max(len(command) for command, _ in rows)
        lines = [f"  {command:<{width}}  {what}" for command, what in rows]
        return "\n".join([f"job {number}: {self.folder / SCRIPT}", *lines])


TRY_S = 600.0  # time in which a configuration must have read one batch

PRINTED_OUTPUT = "slurm-%x-%j.out"  # beside the script: job name and number

REFUSED = 1  # exit code where the checks or Slurm refuse the job


Partition = Annotated[str | None, option("NAME", "Partition.", "--partition", "-p")]
Account = Annotated[str | None, option("NAME", "Whom to charge.", "--account", "-A")]
TimeLimit = Annotated[
    str | None, option("TIME", "Limit of a job, such as 01:30:00 or 90min.", "--time", "-t")
]
Extra = Annotated[
    list[str] | None, option("--qos=high", "A further option of sbatch.", "--option")
]

LIST = "list"  # what ``--template`` without a name stands for

WIDTH = 99  # columns of the list of templates


class SubmitCommand(TyperCommand):
    """Takes ``--template`` without a name too, and a command behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the name where there is none, and leave the command to ``ctx.args``."""
        if "--" in args:
            at = args.index("--")
            self.parse_args(ctx, args[:at])
            ctx.args = args[at + 1 :] or ["--"]
            return list(ctx.args)
        option = "--template"
        for at in [at for at, word in enumerate(args) if word == option]:
            if at + 1 == len(args) or args[at + 1].startswith("-"):
                args = [*args[: at + 1], LIST, *args[at + 1 :]]
                break
        return super().parse_args(ctx, args)


def submit(  # noqa: PLR0913 - a command's options
    ctx: typer.Context,
    config: Annotated[Path | None, argument("CONFIG.toml", "What to train.")] = None,
    *,
    template: Annotated[
        str | None,
        option(
            "NAME",
            "The script to start from; without NAME, list them.",
            default="requeue, gpu, single_node or multi_node, by the other options",
        ),
    ] = None,
    partition: Partition = None,
    account: Account = None,
    nodes: Annotated[int | None, option("N", "How many nodes.", "--nodes", "-N", min=1)] = None,
    tasks: Annotated[
        int | None, option("N", "Ranks on each node.", default="one per GPU", min=1)
    ] = None,
    cpus: Annotated[
        int | None,
        option("N", "CPUs of each rank.", default="all of a node, over its ranks", min=1),
    ] = None,
    mem: Annotated[
        str | None,
        option("SIZE", "Memory on each node.", default="all, where --cpus takes all CPUs"),
    ] = None,
    time: TimeLimit = None,
    gpus: Annotated[int | None, option("N", "GPUs of each node.", min=1)] = None,
    name: Annotated[
        str | None,
        option(
            "NAME",
            "Name of the job and of its folder, runs/NAME.",
            default="the configuration's or the script's",
        ),
    ] = None,
    output: Annotated[
        str | None, option("FILE", "Output.", default="slurm-%j.out in the folder")
    ] = None,
    array: Annotated[
        str | None, option("0-7%2", "A job array: a run for each index, FOLDER/INDEX.")
    ] = None,
    after: Annotated[
        str | None, option("JOB", "Start when this job has ended well; afterany:JOB.")
    ] = None,
    requeue: Annotated[
        bool | None, flag("Queue the job again until it has finished.", "--requeue/--no-requeue")
    ] = None,
    overrides: Annotated[
        list[str] | None, option("KEY=VALUE", "Replace a value of the configuration.", "--set")
    ] = None,
    extra: Extra = None,
    dry_run: Annotated[
        bool, flag("Print and check the script, write and submit none.", "--dry-run")
    ] = False,
    no_check: Annotated[
        bool, flag("Do not try the configuration's own functions before.", "--no-check")
    ] = False,
    print_only: Annotated[
        bool, flag("Print the script, or a template as it is, and stop.", "--print")
    ] = False,
) -> None:
    """Write a batch script for Slurm, check it and submit it.

    Behind -- stands a script of your own in place of a configuration. It finds the run's folder in
    the variable RUN_DIRECTORY; hpctrain.should_stop() tells it when to save and end with code 85.

    The batch script lies in the run's folder: output_dir of the configuration, or runs/NAME. A run
    that has stopped there goes on. Before anything waits in a queue, the script is checked as by
    hpctrain doctor --lint, Slurm is asked whether it would take it, and the functions that a
    configuration names are called here and one batch is read; exit code 1 if something is wrong.

    Under PBS, LSF and others: hpctrain launch starts the ranks inside a job of your own.

    For instance:

      hpctrain submit my.toml --nodes 2 --tasks 8 --time 2h

      hpctrain submit my.toml --nodes 4 --gpus 4 --partition gpu --requeue

      hpctrain submit --nodes 2 --tasks 8 --requeue -- python train.py --lr 0.1

      hpctrain submit my.toml --after 1234 --dry-run

      hpctrain submit my.toml --array 0-4 --set 'seed=$SLURM_ARRAY_TASK_ID'

      hpctrain submit --template             list the templates

      hpctrain submit --template requeue --print > my.sbatch
    """
    from hpctrain.launch.installed_horovod import without_horovod  # noqa: PLC0415
    from hpctrain.launch.slurm import batch_script  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import (  # noqa: PLC0415
        dependency,
        sbatch_time,
        submit_in,
    )

    if template == LIST:
        _list_templates()
        return
    if config is None and not ctx.args:
        _print_template(template, print_only=print_only)
        return
    program: Sequence[str] = ()
    if config is None:
        program = _command(ctx.args, overrides)
        job = _job_of(program, name, array)
    elif ctx.args:
        raise ConfigError(
            f"a job trains one thing, got the configuration {config} and the command "
            f"`{shlex.join(ctx.args)}`; leave one out"
        )
    else:
        job = _job(config, name, overrides or (), array)
    cpus, mem = _share_of_node(partition, tasks or gpus, (cpus, mem), extra or ())
    settings = batch_script.BatchSettings(
        job_name=job.name,
        partition=partition,
        account=account,
        nodes=nodes,
        tasks_per_node=tasks or gpus,
        cpus_per_task=cpus,
        mem=mem,
        time=None if time is None else sbatch_time(time),
        gpus_per_node=gpus,
        # sbatch makes no folder, and a script that is printed is submitted without hpctrain.
        output=output or (PRINTED_OUTPUT if print_only else job.output),
        array=array,
        dependency=None if after is None else dependency(after),
        requeue=requeue,
        config=None if config is None else str(config),
        program=tuple(program),
        directory=job.directory,
        # The folder is the job's: of an array each index has its own.
        overrides=tuple(each for each in overrides or () if not _OUTPUT_DIR.match(each)),
        extra=tuple(extra or ()),
    )
    script = batch_script.script(template or _default_template(settings), settings)
    if print_only or dry_run:
        typer.echo(script, nl=False)
    if print_only:
        return
    if told := without_horovod(ctx.args):
        typer.echo(f"warning: horovod: {told}", err=True)
    job.check_free(after or "")
    check(script, job.folder, needs_slurm=not dry_run)
    if not dry_run:
        if config is not None and not no_check:
            try_configuration(config, overrides or ())
        number = submit_in(job.folder, script)
        typer.echo(job.how_to_watch(number, settings.output or ""))


def _share_of_node(
    partition: str | None,
    tasks: int | None,
    asked: tuple[int | None, str | None],
    extra: Sequence[str],
) -> tuple[int | None, str | None]:
    """Return CPUs per task and memory by which the ranks of a node take all of it.

    What the user has ``asked`` for stays, as it does where Slurm does not describe its nodes.
    """
    from hpctrain.launch.slurm.scheduler import node_shape  # noqa: PLC0415

    is_said = any(re.match("--(cpus-per|mem|exclusive)", each) for each in extra)
    if tasks is None or asked[0] is not None or is_said:
        return asked
    shape = node_shape(partition)
    cpus = shape.cpus_per_task(tasks) if shape is not None else 0
    if not cpus:
        return asked
    mem = asked[1] or "0"
    typer.echo(
        f"note: --cpus-per-task={cpus} --mem={mem} for {tasks} ranks on a node; --cpus and --mem "
        f"ask for less",
        err=True,
    )
    return cpus, mem


def _list_templates() -> None:
    from hpctrain.launch.slurm import batch_script  # noqa: PLC0415

    width = max(map(len, batch_script.names())) + 2
    for name in batch_script.names():
        # The first comment, up to its empty line, says what a template is for.
        lines = batch_script.text(name).partition("\n# ")[2].partition("\n#\n")[0].split("\n# ")
        what = " ".join(lines).rstrip(":")
        typer.echo(fill(f"{name:<{width}}{what}", WIDTH, subsequent_indent=" " * width))


def _print_template(template: str | None, *, print_only: bool) -> None:
    from hpctrain.launch.slurm import batch_script  # noqa: PLC0415

    if template is None or not print_only:
        raise ConfigError(
            "a job needs a configuration or a script: hpctrain submit CONFIG.toml, or "
            "hpctrain submit -- python train.py; "
            "hpctrain submit --template NAME --print prints a template"
        )
    typer.echo(batch_script.text(template), nl=False)


def _job(
    config: Path, name: str | None, overrides: Sequence[str], array: str | None
) -> "JobOptions":
    from hpctrain.core.config import given  # noqa: PLC0415
    from hpctrain.train.load_config import load  # noqa: PLC0415

    # Only the job knows the values of its variables; the index of an array is a number.
    known = map(_without_index, overrides)
    run = load(config, [text for text in known if "$" not in text], given()).config
    where = Path("runs", name) if name else Path(run.output_dir or Path("runs", run.name))
    return JobOptions(name=name or run.name, folder=where, is_array=array is not None)


def _command(words: Sequence[str], overrides: Sequence[str] | None) -> Sequence[str]:
    """Return the command of a job, looked at first. Raises ``ConfigError``: it cannot be."""
    from hpctrain.launch.program import resolve  # noqa: PLC0415

    if overrides:
        raise ConfigError(
            f"--set replaces values of a configuration, got --set {overrides[0]} and the command "
            f"`{shlex.join(words)}`; give the script arguments of its own"
        )
    found = resolve([] if words == ["--"] else words)
    script = next((word for word in found[1:] if word.endswith(".py")), None)
    if script is not None and "$" not in script and not Path(script).is_file():
        raise ConfigError(f"a job runs a script that is there, nothing is at {script}")
    return ["python", *words] if words[0] == script else words


def _job_of(words: Sequence[str], name: str | None, array: str | None) -> "JobOptions":
    scripts = [word for word in words if word.endswith(".py")]
    name = name or Path(scripts[0] if scripts else words[0]).stem
    return JobOptions(name=name, folder=Path("runs", name), is_array=array is not None)


def _default_template(settings: "BatchSettings") -> str:
    if settings.requeue:
        return "requeue"
    if settings.gpus_per_node:
        return "gpu"
    return "single_node" if settings.nodes == 1 else "multi_node"


def check(script: str, made: Path, *, needs_slurm: bool = True) -> None:
    """Print what is wrong with a script and what Slurm says of it; stop where it would not run.

    Without Slurm that is a note where it is not needed.
    """
    from hpctrain.launch.slurm.lint.lint import gather, lint  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import RefusedJobError, try_out  # noqa: PLC0415

    findings = [
        finding for finding in lint(script, facts=gather(made=made)) if finding.level != "ok"
    ]
    for finding in findings:
        _say(finding)
    try:
        typer.echo(f"Slurm: {try_out(script)}", err=True)
    except RefusedJobError as error:
        typer.echo(f"hpctrain: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    except LaunchError as error:
        told = f"note: Slurm has not checked the script: {error}"
        typer.echo(f"hpctrain: {error}" if needs_slurm else told, err=True)
        if needs_slurm:
            raise typer.Exit(REFUSED) from None
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(REFUSED)


def try_configuration(config: Path, overrides: Sequence[str]) -> None:
    """Build here, in another process, what the job will, and read one batch; stop if it fails."""
    from importlib.util import find_spec  # noqa: PLC0415

    from hpctrain.launch.program import ask  # noqa: PLC0415

    if find_spec("torch") is None:
        typer.echo("note: there is no torch here, so the configuration is not tried", err=True)
        return
    line = [sys.executable, "-m", "hpctrain", "train", str(config), "--look"]
    for override in (*map(_without_index, overrides), 'data.stage=""'):
        line += ["--set", override]
    environ = {**os.environ, "HPCTRAIN_ALONE": "1"}
    try:
        done = ask(line, environ, timeout_s=TRY_S)
        code, said = done.returncode, done.stderr
    except (OSError, TimeoutError) as error:
        code, said = REFUSED, f"hpctrain: {config} could not be tried: {error}\n"
    if code:
        typer.echo(f"{said}--no-check submits it all the same", err=True)
        raise typer.Exit(REFUSED)


def _without_index(override: str) -> str:
    """Put the first index of an array in: only the job knows its own."""
    return re.sub(r"\$\{?SLURM_ARRAY_TASK_ID\}?", "0", override)


def _say(finding: "Finding") -> None:
    typer.echo(f"{finding.level}: {finding.check}: {finding.what}", err=True)
    if finding.do:
        typer.echo(f"  do: {finding.do}", err=True)
