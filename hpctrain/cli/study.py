"""``hpctrain study``: scaling studies, from their file to their report."""

import shlex
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpctrain.cli.examples import write_examples
from hpctrain.cli.options import argument, flag, option
from hpctrain.cli.submit import Account, Extra, Partition, TimeLimit
from hpctrain.cli.train import write_new
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import format_seconds
from hpctrain.train.console import make_console

if TYPE_CHECKING:
    from hpctrain.studies.point_records import PointRecord
    from hpctrain.studies.points import PointRepeat
    from hpctrain.studies.study_run import Study

FAILED = 1  # exit code of run where points have failed
SLOWER = 1  # and of compare --fail-slower

EXAMPLES = """
For instance:

  hpctrain study init strong.toml      a file with every key; of your script by --command

  hpctrain study run strong.toml --dry-run

  hpctrain study run strong.toml       again after a kill: it goes on

  hpctrain study report studies/digits-strong

  hpctrain study compare studies/before studies/after

  hpctrain guide studies               factors, what is measured, and how
"""

study = typer.Typer(
    name="study",
    help="Measure how a training scales, and report it so that others can believe it.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

File = Annotated[Path, argument("STUDY.toml")]


@study.command()
def init(
    path: File,
    *,
    mode: Annotated[
        Literal["strong", "weak"], flag("The same work on more ranks, or more work.")
    ] = "strong",
    command: Annotated[
        str,
        option(
            "COMMAND", "What to measure, such as 'python train.py'.", default="handwritten digits"
        ),
    ] = "",
) -> None:
    """Write STUDY.toml, with every key and what it means.

    Without --command it measures the example of handwritten digits, whose files are written into
    examples/ where they are missing; it needs the package scikit-learn.

    A script of your own tells of its steps in three lines; elsewhere they do nothing:

      import hpctrain
      ...
      hpctrain.record(step=step, samples=len(batch), loss=loss.item())   # behind each step

    For instance:

      hpctrain study init strong.toml

      hpctrain study init weak.toml --mode weak --command 'python train.py'
    """
    from hpctrain.core.keys import render  # noqa: PLC0415
    from hpctrain.studies.study_file import example  # noqa: PLC0415

    write_new(path, render(example(mode, command)))
    written = [] if command else write_examples(prefix="digits.")
    for each in written:
        typer.echo(f"wrote {each}, which {path} measures")
    typer.echo(f"{path} has every key; `hpctrain study run {path} --dry-run` lists its points")


@study.command()
def run(  # noqa: PLR0913 - a command's options
    path: File,
    *,
    out: Annotated[
        Path | None, option("DIR", "Folder of the study.", default="studies/NAME")
    ] = None,
    dry_run: Annotated[
        bool, flag("List what is left to measure and its cost, and stop.", "--dry-run")
    ] = False,
    seconds_per_point: Annotated[
        float | None, option("S", "For that cost.", default="as measured", min=0)
    ] = None,
    retry_failed: Annotated[
        bool, flag("Measure points again that have failed.", "--retry-failed")
    ] = False,
    repeat: Annotated[int | None, option("N", "Measure this repeat alone, from 0.", min=0)] = None,
    slurm: Annotated[
        bool, flag("Submit a job for each repeat, and one that reports.", "--slurm")
    ] = False,
    time: TimeLimit = None,
    partition: Partition = None,
    account: Account = None,
    extra: Extra = None,
) -> None:
    """Measure all points of a scaling study, each several times, in random order.

    The same command goes on after any kill: what has a record is not measured
    again, what was broken off is. A point that fails is recorded, with its last
    lines, and the study goes on; the exit code is 1 then.

    DIR has STUDY.toml, environment.json, points-N.jsonl with a line for each point
    of repeat N, and attempts/ with all output.

    For instance:

      hpctrain study run strong.toml --dry-run --seconds-per-point 20

      hpctrain study run strong.toml

      hpctrain study run strong.toml --slurm --time 1h --partition compute
    """
    from hpctrain.studies import study_file  # noqa: PLC0415
    from hpctrain.studies.points import on_slurm  # noqa: PLC0415
    from hpctrain.studies.study_run import Study  # noqa: PLC0415

    config = study_file.load(path)
    for word in shlex.split(config.command.run):
        if word.endswith((".py", ".toml")) and "{" not in word and not Path(word).exists():
            raise ConfigError(
                f"command.run of {path} must name files that exist, but {word} is not in "
                f"{Path.cwd()}; start the study in its folder, write its whole path, or let "
                f"`hpctrain examples` write examples/"
            )
    name, most = config.study.name, config.study.repeats - 1
    if out is None and (Path(name).name != name or name in ("", "..")):
        raise ConfigError(f"study.name of {path} is that of a folder, got {name!r}; or say --out")
    where = out or Path("studies", name)
    found = Study(on_slurm(config) if slurm else config, where)
    if repeat is not None and repeat > most:
        raise ConfigError(
            f"{path} has repeats 0 to {most}, got {repeat}; set study.repeats higher"
        )
    attempts = found.missing(repeat=repeat, failed=retry_failed)
    if dry_run:
        _describe(found, attempts, seconds_per_point)
        return
    found.prepare()
    if slurm:
        settings = {"partition": partition, "account": account, "extra": tuple(extra or ())}
        _submit(found, attempts, time, settings)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        # By an exception, which leaves no rank behind.
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    _measure(found, attempts)
    failed = [record for record in found.folder.read_points() if record.status == "failed"]
    way_out = "; --retry-failed measures again what failed" if failed else ""
    typer.echo(
        f"{len(found.attempts) - len(found.missing(failed=True))} of {len(found.attempts)} "
        f"measured, {len(failed)} failed; `hpctrain study report {where}` shows them{way_out}"
    )
    if failed:
        raise typer.Exit(FAILED)


@study.command()
def report(
    directory: Annotated[Path, argument("DIR", "The folder of a study.")],
    *,
    machine: Annotated[
        Path | None, option("FILE", "A machine in TOML, for a bound.", default="none")
    ] = None,
    out: Annotated[Path | None, option("DIR", "Folder to write into.", default="DIR")] = None,
) -> None:
    """Write the page report.html, figures as PNG and SVG, and print a summary.

    The page opens without a network. Its checklist names the rules for reports
    on performance that the study keeps, and what is missing for the others.

    For instance:

      hpctrain study report studies/digits-strong

      hpctrain study report studies/digits-strong --machine cluster.toml --out digits
    """
    from hpctrain.cost.machine import Machine  # noqa: PLC0415
    from hpctrain.studies.report import summary_of, write_report  # noqa: PLC0415
    from hpctrain.studies.study_results import StudyResults  # noqa: PLC0415

    results = StudyResults.read(directory)
    if machine is not None:
        results = results.beside(Machine.read(machine))
    console = Console(highlight=False, markup=False)
    console.print(summary_of(results))
    page, *figures = write_report(results, out or directory)
    console.print(f"wrote {page}, and {len(figures)} figures in plots beside it", soft_wrap=True)


@study.command()
def compare(
    first: Annotated[Path, argument("A", "The folder of a study.")],
    second: Annotated[Path, argument("B", "What is compared with A.")],
    *,
    alpha: Annotated[
        float, option("P", "How often equal studies may differ.", min=1e-6, max=0.5)
    ] = 0.05,
    fail_slower: Annotated[
        bool, flag("Exit code 1 if B is slower beyond noise.", "--fail-slower")
    ] = False,
) -> None:
    """Compare the time of a step at the points that two studies share.

    Ratios of B to A, with intervals of an exact rank-sum test over repeats.

    For instance:

      hpctrain study compare studies/before studies/after

      hpctrain study compare studies/before studies/after --fail-slower
    """
    from hpctrain.studies.comparison import StudyComparison  # noqa: PLC0415
    from hpctrain.studies.study_results import StudyResults  # noqa: PLC0415

    found = StudyComparison(StudyResults.read(first), StudyResults.read(second), alpha)
    Console(highlight=False, markup=False).print(found.summary())
    if fail_slower and all(verdict.startswith("too few") for verdict in found.verdicts):
        raise ConfigError(
            "--fail-slower needs more repeats, or a larger --alpha, to find anything"
        )
    if fail_slower and "slower" in found.verdicts:
        raise typer.Exit(SLOWER)


def _describe(
    found: "Study", attempts: "list[PointRepeat]", seconds_per_point: float | None
) -> None:
    """List the points that are left, a command line, and the cost."""
    cores, hosts = found.config.study.cores, found.config.study.hosts
    points = Counter(each.text for each in sorted(attempts, key=lambda each: each.layout))
    for text, repeats in points.items():
        many = next(a for a in attempts if a.text == text).is_oversubscribed(cores, hosts)
        note = f"  oversubscribed: {cores} cores on each of {hosts} hosts" * many
        typer.echo(f"{text}  x {repeats}{note}")
    if attempts:
        place = found.folder.attempts / attempts[0].name
        launcher, command, _ = found.config.filled(
            attempts[0].names(found.config.study.mode, place)
        )
        typer.echo(f"the first: {shlex.join([*launcher, *command])}")
    cost_s = found.expected_s(attempts)
    if seconds_per_point is not None:
        cost_s = seconds_per_point * len(attempts)
    price = "say --seconds-per-point for their cost"
    if cost_s is not None:
        # All nodes of the largest point are held all the time.
        price = f"{cost_s * hosts / 3600:.3g} node-hours, {format_seconds(cost_s)} in all"
    typer.echo(f"{len(attempts)} of {len(found.attempts)} are left to measure: {price}")


def _submit(
    found: "Study", attempts: "list[PointRepeat]", time: str | None, settings: dict[str, Any]
) -> None:
    """Submit a job for each repeat that is left, and behind them one that reports."""
    from hpctrain.cli.submit import check  # noqa: PLC0415
    from hpctrain.launch.slurm.batch_script import BatchSettings, script  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import sbatch_time, submit  # noqa: PLC0415

    if not attempts:
        typer.echo("everything is measured")
        return
    where, table = found.folder.path, found.config.study
    layouts = [attempt.layout for attempt in attempts]
    repeats = ",".join(map(str, sorted({attempt.repeat for attempt in attempts})))
    array = BatchSettings(
        job_name=table.name,
        config=str(found.folder.file),
        directory=str(where),
        nodes=max(layout.nodes for layout in layouts),
        ntasks_per_node=max(layout.ranks_per_node for layout in layouts),
        time=None if time is None else sbatch_time(time),
        output=f"{where}/slurm-%A_%a.out",
        array=repeats,
        **settings,
    )

    def job(name: str, settings: BatchSettings) -> int:
        text, path = script("study", settings), where / f"{name}.sbatch"
        if name == "job":
            check(text, where)
        path.write_text(text, encoding="utf-8")
        return submit(path)

    number = job("job", array)
    after = replace(
        array,
        nodes=1,
        ntasks_per_node=1,
        time=None,
        output=f"{where}/slurm-report-%j.out",
        array=None,
        dependency=f"afterany:{number}",
        extra=(*array.extra, "--export=ALL,PART=report"),
    )
    typer.echo(f"job {number}: repeats {repeats} in {where}")
    typer.echo(f"job {job('report', after)}: the report")


def _measure(found: "Study", attempts: "list[PointRepeat]") -> None:
    """Measure under a bar that shows the time left, with a line for each attempt."""
    left = {attempt.order: attempt for attempt in attempts}
    console = make_console(shown=True)
    texts = ("{task.completed}/{task.total}", "{task.description}")
    count, text = (TextColumn(each, markup=False) for each in texts)
    how: dict[str, Any] = {
        "console": console,
        "transient": True,
        "disable": not console.is_terminal,
    }
    with Progress(count, BarColumn(), text, **how) as bar:
        task = bar.add_task("", total=len(attempts))

        def begun(attempt: "PointRepeat") -> None:
            left_s = found.expected_s(left.values())
            time_left = f"  {format_seconds(left_s)} left" if left_s else ""
            done = len(attempts) - len(left)
            bar.update(task, completed=done, description=f"{attempt.text}{time_left}")

        def ended(record: "PointRecord") -> None:
            said = f"failed: {record.error}"
            if record.is_done:
                step = format_seconds(record.mean_step_s)
                said = f"{step} a step, {record.samples_per_s or 0:.0f} samples/s"
                if record.is_disturbed:
                    said += (
                        f"; disturbed: other processes used {record.other_cores:.1f} of "
                        f"{record.machine_cores} cores"
                    )
            del left[record.order]
            console.print(f"{record.text}  repeat {record.repeat}: {said}", soft_wrap=True)

        found.measure(attempts, begun=begun, ended=ended)
