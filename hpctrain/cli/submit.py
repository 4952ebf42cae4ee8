"""``hpctrain submit``: submit a Slurm job that trains a configuration or runs a script."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from hpctrain.cli.options import (
    FAILED,
    Account,
    Extra,
    Overrides,
    Partition,
    SiteName,
    TimeLimit,
    aligned,
    argument,
    flag,
    option,
    takes,
)
from hpctrain.core import config as configuration
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.launch import installed_horovod, program
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import batch_script, scheduler
from hpctrain.launch.slurm.lint import lint
from hpctrain.train import load_config
from hpctrain.train import run_status as state

if TYPE_CHECKING:
    from hpctrain.launch.slurm.batch_script import BatchSettings

_OUTPUT_DIR = re.compile(r"\s*output_dir\s*=")

TRY_S = 600.0  # time limit for building a configuration and reading one batch

PRINTED_OUTPUT = "slurm-%x-%j.out"  # output file of a printed script, with job name and id

LIST = "list"  # value of ``--template`` without a name

WIDTH = 99  # columns of the list of templates

app = typer.Typer()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Name and directory of a job before it is submitted."""

    name: str
    folder: Path  # directory of the run, with a subdirectory per index for an array
    is_array: bool = False

    def __post_init__(self) -> None:
        if "$" in str(self.folder):
            raise ConfigError(
                f"the directory of a job must be a name without $, got {self.folder}; choose one "
                f"with --name"
            )

    @property
    def directory(self) -> str:
        """Run directory, as written in the script: shell variables are not expanded."""
        return f"{self.folder}/$SLURM_ARRAY_TASK_ID" if self.is_array else str(self.folder)

    @property
    def output(self) -> str:
        """File of the output, with patterns of Slurm such as ``%j``."""
        return f"{self.folder}/slurm-{'%A_%a' if self.is_array else '%j'}.out"

    def check_free(self, after: str) -> None:
        """Raise an error if another job uses the run of this job, or if the run is finished.

        ``after`` names the jobs that this job waits for.
        """
        found = state.status(self.folder)
        if found.state == "finished":
            raise ConfigError(
                f"a job must have an unfinished run, but {found.what}; submit another run with "
                f"--name {self.name}-2, or delete the directory"
            )
        named = re.findall(r"\d+", after)
        others = [job for job in scheduler.jobs_of(self.folder) if str(job) not in named]
        if others and (active := [*scheduler.in_queue(others)]):
            raise LaunchError(
                f"a run must have one job at a time, but job {active[-1]} waits or runs for "
                f"{self.folder}; continue it with --after afterany:{active[-1]}, cancel it with "
                f"`scancel {active[-1]}`, or submit another run with --name {self.name}-2"
            )

    def next_commands(self, number: int, output: str) -> str:
        """Return the commands that show the state and the output of a job, one per line.

        ``output`` is the output file of the job, with patterns of Slurm.
        """
        values = {"j": number, "A": number, "x": self.name, "a": "*", "%": "%"}
        file = re.sub(r"%\d*(.)", lambda found: str(values.get(found[1], "*")), output)
        run = self.folder / "INDEX" if self.is_array else self.folder
        rows = (
            (f"squeue -j {number}", "state of the job"),
            (f"tail -F {file}", "output of the job"),
            (f"hpctrain status {run}", "waiting, running, stopped or finished"),
            (f"touch {run}/STOP", "save the state and stop"),
            (f"scancel {number}", "end the job at once"),
        )
        return "\n".join(
            [f"job {number}: {self.folder / scheduler.SCRIPT}", *aligned(rows, indent="  ")]
        )


class SubmitCommand(TyperCommand):
    """Command that accepts ``--template`` without a name, and a command after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; store the words after ``--`` in ``ctx.args``.

        If ``--template`` has no name, the name is ``LIST``.
        """
        if "--" in args:
            at = args.index("--")
            self.parse_args(ctx, args[:at])
            ctx.args = args[at + 1 :] or ["--"]
            return list(ctx.args)
        at = args.index("--template") + 1 if "--template" in args else 0
        if at and (at == len(args) or args[at].startswith("-")):
            args = [*args[:at], LIST, *args[at:]]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Arguments and options of ``hpctrain submit``."""

    ctx: typer.Context
    config: Path | None = argument("CONFIG.toml", "Configuration to train.", default=None)
    template: str | None = option(
        None,
        "NAME",
        "Template of the script; without NAME, list the templates.",
        shown="requeue, gpu, single_node or multi_node, by the other options",
    )
    site: SiteName = None
    partition: Partition = None
    account: Account = None
    nodes: int | None = option(
        None, "N", "Number of nodes.", "--nodes", "-N", shown="of the template", min=1
    )
    tasks: int | None = option(None, "N", "Ranks on each node.", shown="one per GPU", min=1)
    cpus: int | None = option(
        None, "N", "CPUs of each rank.", shown="the CPUs of a node, divided among its ranks", min=1
    )
    mem: str | None = option(
        None, "SIZE", "Memory on each node.", shown="all, if the ranks use all CPUs"
    )
    time: TimeLimit = None
    gpus: int | None = option(None, "N", "GPUs of each node.", shown="of the site", min=1)
    name: str | None = option(
        None,
        "NAME",
        "Name of the job and of its directory, runs/NAME.",
        shown="of the configuration or the script",
    )
    output: str | None = option(
        None, "FILE", "Output of the job.", shown="slurm-%j.out in the directory"
    )
    array: str | None = option(
        None, "0-7%2", "A job array: one run for each index, DIRECTORY/INDEX."
    )
    after: str | None = option(
        None, "JOB", "Start after job JOB has succeeded; afterany:JOB waits for any end of JOB."
    )
    requeue: bool | None = flag(
        "Queue the job again until it has finished.", "--requeue/--no-requeue", default=None
    )
    overrides: Overrides = None
    extra: Extra = None
    dry_run: bool = flag("Print and check the script; write and submit nothing.", "--dry-run")
    no_check: bool = flag("Do not call the functions of the configuration first.", "--no-check")
    print_only: bool = flag("Print the script, or an unchanged template, and exit.", "--print")

    def job_and_program(self) -> tuple[JobOptions, Sequence[str]]:
        """Return the job and its command; the command is empty for a configuration."""
        words: Sequence[str] = self.ctx.args
        config = self.config
        if config is None:
            words = _command(words, self.overrides)
            script = next((word for word in words if word.endswith(".py")), words[0])
            name = self.name or Path(script).stem
            folder = Path("runs", name)
        elif words:
            raise ConfigError(
                f"a job must have one program, got the configuration {config} and the command "
                f"`{shlex.join(words)}`; omit one"
            )
        else:
            # Omit overrides with shell variables, whose values only the job knows.
            known = [text for text in map(_without_index, self.overrides or ()) if "$" not in text]
            run = load_config.load(config, known, configuration.given()).config
            name = self.name or run.name
            folder = Path(run.output_dir or Path("runs", name))
            folder = Path("runs", name) if self.name else folder
        return JobOptions(name=name, folder=folder, is_array=self.array is not None), words

    def settings(self, job: JobOptions, words: Sequence[str]) -> "BatchSettings":
        """Return the settings of the batch script.

        Raises ``ConfigError``: a node of the site has fewer resources than the job requests.
        """
        extra, overrides = (*self._site_options(), *(self.extra or ())), self.overrides or ()
        site, node = self.profile or sites.SiteProfile(), self._site_node()
        gpus = self.gpus or min(node.gpus, self.tasks or node.gpus) or None
        tasks = self.tasks or gpus
        num_tasks, cpus, mem = tasks or self._template_tasks(gpus), self.cpus, self.mem
        for fault in node.excess(num_tasks, cpus=cpus, gpus=gpus, mem=mem):
            raise ConfigError(
                f"{fault}, by the profile of {site.label}; request less, or another --partition, "
                f"or omit the profile by --site {sites.NONE}"
            )
        is_given = any(re.match("--(cpus-per|mem|exclusive)", each) for each in extra)
        if cpus is None and not is_given:
            cpus, mem = _share_of_node(self.partition, num_tasks, mem, node)
        if site.lacks_account(self.account):
            typer.echo(
                f"note: jobs on {site.label} must name an account such as "
                f"{site.job.account_form}; add --account",
                err=True,
            )
        return batch_script.BatchSettings(
            job_name=job.name,
            partition=self.partition or site.job.partition or None,
            account=self.account or site.job.account or None,
            nodes=self.nodes,
            ntasks_per_node=tasks,
            cpus_per_task=cpus,
            mem=mem,
            time=None if self.time is None else scheduler.sbatch_time(self.time),
            gpus_per_node=gpus,
            # A user submits a printed script with sbatch, which does not create a directory.
            output=self.output or (PRINTED_OUTPUT if self.print_only else job.output),
            array=self.array,
            dependency=None if self.after is None else scheduler.dependency(self.after),
            requeue=self.requeue,
            config=None if self.config is None else str(self.config),
            program=tuple(words),
            directory=job.directory,
            # The script sets output_dir, because each index of an array has its own directory.
            overrides=tuple(each for each in overrides if not _OUTPUT_DIR.match(each)),
            extra=extra,
        )

    def template_for(self, gpus: int | None) -> str:
        """Return the name of the template; by default it follows from the other options."""
        if self.template is not None or self.requeue:
            return self.template or "requeue"
        if gpus:
            return "gpu"
        return "single_node" if self.nodes == 1 else "multi_node"

    def _template_tasks(self, gpus: int | None) -> int:
        return int(batch_script.option(self.template_for(gpus), "--ntasks-per-node"))

    @cached_property
    def profile(self) -> sites.SiteProfile | None:
        """Profile of the site, or None if it is unknown."""
        return sites.find(self.site)

    def binds_by_gpu(self, settings: "BatchSettings") -> bool:
        """Return True if ranks can be bound to the cores that the profile lists for each GPU.

        This requires one rank per GPU, and ranks that use all cores of a node. Otherwise, Slurm
        may give the listed cores to other jobs, and the method prints a note.
        """
        node, tasks = self._site_node(), settings.ntasks_per_node
        if not node.gpu_cores:
            return False
        num_gpus, share = len(node.gpu_cores), node.cpus // len(node.gpu_cores)
        if tasks == settings.gpus_per_node == num_gpus and settings.cpus_per_task == share:
            return True
        typer.echo(
            f"note: Slurm binds ranks to cores, but not next to their GPUs; --tasks {num_gpus} "
            f"--cpus {share}, a rank for each GPU of a node, binds each next to its GPU",
            err=True,
        )
        return False

    def _site_options(self) -> list[str]:
        """Return the sbatch options of the profile that the command line does not set."""
        given = {each.partition("=")[0] for each in self.extra or ()}
        options = () if self.profile is None else self.profile.job.options
        return [each for each in options if each.partition("=")[0] not in given]

    def _site_node(self) -> sites.SiteNode:
        """Return the node that the profile describes; empty if other nodes are requested."""
        if self.profile is None:
            return sites.SiteNode()
        return self.profile.node_of(self.partition, self.extra or ())


@app.command(cls=SubmitCommand)
@takes(SubmitOptions)
def submit(options: SubmitOptions) -> None:
    """Write a batch script for Slurm, check it and submit it.

    Your own command, instead of a configuration, follows after --. The variable RUN_DIRECTORY
    contains the run directory for the command. When hpctrain.should_stop() returns True, the
    command must save its state and exit with code 85.

    The batch script is written into the run directory: output_dir of the configuration, or
    runs/NAME. A stopped run in that directory is continued. Before the job is queued, the script
    is checked as by hpctrain doctor --lint, Slurm tests whether it accepts the job, and the
    functions of the configuration are called on this machine and one batch is read; the exit code
    is 1 if a check fails.

    With PBS, LSF and other schedulers: hpctrain launch starts the ranks in your own job.

    Examples:
      hpctrain submit my.toml --nodes 2 --tasks 8 --time 2h

      hpctrain submit my.toml --nodes 4 --gpus 4 --partition gpu --requeue

      hpctrain submit --nodes 2 --tasks 8 --requeue -- python train.py --lr 0.1

      hpctrain submit my.toml --after 1234 --dry-run

      hpctrain submit my.toml --array 0-4 --set 'seed=$SLURM_ARRAY_TASK_ID'

      hpctrain submit --template             list the templates

      hpctrain submit --template requeue --print > my.sbatch
    """
    if options.template == LIST:
        _list_templates()
        return
    if options.config is None and not options.ctx.args:
        if options.template is None or not options.print_only:
            raise ConfigError(
                "submit must get a configuration or a command, got none: hpctrain submit "
                "CONFIG.toml, or hpctrain submit -- python train.py; "
                "hpctrain submit --template NAME --print prints a template"
            )
        typer.echo(batch_script.text(options.template), nl=False)
        return
    job, words = options.job_and_program()
    settings = options.settings(job, words)
    script = batch_script.script(options.template_for(settings.gpus_per_node), settings)
    if options.profile is not None:
        what = f"note: the script follows the profile of {options.profile.label}"
        typer.echo(f"{what}; --site {sites.NONE} omits it", err=True)
        script = options.profile.write_into(script, is_full=options.binds_by_gpu(settings))
    if options.print_only or options.dry_run:
        typer.echo(script, nl=False)
    if options.print_only:
        what = "note: nothing was checked or submitted; save the script as FILE, then"
        typer.echo(f"{what} `hpctrain doctor --lint FILE` and `sbatch FILE`", err=True)
        return
    if note := installed_horovod.without_horovod(words):
        typer.echo(f"warning: horovod: {note}", err=True)
    job.check_free(options.after or "")
    check(script, job.folder, options.profile, needs_slurm=not options.dry_run)
    if options.dry_run:
        what = "note: nothing was submitted or written, and no function of a configuration called"
        typer.echo(f"{what}; without --dry-run the job is queued", err=True)
        return
    if options.config is not None and not options.no_check:
        try_configuration(options.config, options.overrides or ())
    number = scheduler.submit_in(job.folder, script)
    typer.echo(job.next_commands(number, settings.output or ""))


def _share_of_node(
    partition: str | None, tasks: int, mem: str | None, node: sites.SiteNode
) -> tuple[int | None, str | None]:
    """Return the CPUs per task and the memory with which ``tasks`` ranks use a complete node.

    ``node`` is the node that the site profile describes. If the ranks use only some of its GPUs,
    they get a proportional share of its CPUs. If neither the profile nor Slurm describes the
    nodes, return None for the CPUs, and ``mem`` unchanged.
    """
    is_part = tasks < node.gpus
    shape = None if node.cpus else scheduler.node_shape(partition)
    cpus = node.cpus // max(tasks, node.gpus, 1)
    if shape is not None:
        cpus = shape.cpus_per_task(tasks)
    if not cpus:
        what = (
            "neither Slurm nor a site profile describes the nodes: the template sets the CPUs and "
            "memory of ranks; --cpus, --mem or --site set them"
        )
        typer.echo(f"note: {what}", err=True)
        return None, mem
    mem = mem or (None if is_part else node.mem or "0")
    memory = "" if mem is None else f" --mem={mem}"
    typer.echo(
        f"note: --cpus-per-task={cpus}{memory} for {tasks} ranks on a node; --cpus and --mem "
        f"request less",
        err=True,
    )
    return cpus, mem


def _list_templates() -> None:
    width = max(map(len, batch_script.names())) + 2
    for name in batch_script.names():
        # The first comment, up to its empty line, describes the template.
        lines = batch_script.text(name).partition("\n# ")[2].partition("\n#\n")[0].split("\n# ")
        text = " ".join(lines).rstrip(":")
        typer.echo(fill(f"{name:<{width}}{text}", WIDTH, subsequent_indent=" " * width))


def _command(words: Sequence[str], overrides: Sequence[str] | None) -> Sequence[str]:
    """Return the command of a job; raise ``ConfigError`` if its script does not exist."""
    if overrides:
        raise ConfigError(
            f"--set must be used with a configuration, got --set {overrides[0]} and the command "
            f"`{shlex.join(words)}`; pass arguments to the script instead"
        )
    found = program.resolve([] if words == ["--"] else words)
    script = next((word for word in found[1:] if word.endswith(".py")), None)
    if script is not None and "$" not in script and not Path(script).is_file():
        raise ConfigError(
            f"a job must run a script that exists, but {script} does not; correct the path"
        )
    return ["python", *words] if words[0] == script else words


def check(
    script: str,
    made: Path,
    site: sites.SiteProfile | None = None,
    *,
    needs_slurm: bool = True,
) -> None:
    """Check a script, also with Slurm; print all faults, and exit with code 1 on an error.

    ``made`` is the directory that hpctrain creates before the job starts. If Slurm is not
    available here, this is an error with ``needs_slurm``, and only a note without it.
    """
    findings = lint.lint(script, facts=lint.gather(made=made, site=site))
    for finding in (each for each in findings if each.level != "ok"):
        typer.echo(f"{finding.level}: {finding.check}: {finding.what}", err=True)
        if finding.do:
            typer.echo(f"  do: {finding.do}", err=True)
    is_wrong = any(finding.level == "error" for finding in findings)
    try:
        typer.echo(f"Slurm: {scheduler.try_out(script)}", err=True)
    except LaunchError as error:
        is_fatal = needs_slurm or isinstance(error, scheduler.RefusedJobError)
        note = "hpctrain: " if is_fatal else "note: Slurm has not checked the script: "
        typer.echo(f"{note}{error}", err=True)
        is_wrong = is_wrong or is_fatal
    if is_wrong:
        raise typer.Exit(FAILED)


def try_configuration(config: Path, overrides: Sequence[str]) -> None:
    """Test a configuration in a separate process: build it, read a batch; exit with 1 on error."""
    if find_spec("torch") is None:
        typer.echo(
            "note: torch is not installed here, so the configuration is not tested", err=True
        )
        return
    line = [sys.executable, "-m", "hpctrain", "train", str(config), "--look"]
    for override in (*map(_without_index, overrides), 'data.stage=""'):
        line += ["--set", override]
    environ = {**os.environ, "HPCTRAIN_ALONE": "1"}
    try:
        done = program.run_to_end(line, environ, timeout_s=TRY_S)
        code, text = done.returncode, done.stderr
    except (OSError, TimeoutError) as error:
        code = FAILED
        text = f"hpctrain: {config} must pass a test before its submission, but: {error}\n"
    if code:
        typer.echo(f"{text}--no-check submits the job without this check", err=True)
        raise typer.Exit(FAILED)


def _without_index(override: str) -> str:
    """Replace the variable with the array index by 0, because only the job knows its index."""
    return re.sub(r"\$\{?SLURM_ARRAY_TASK_ID\}?", "0", override)
