"""``hpctrain study init, run``: a scaling study from its file to its records."""

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TextColumn
from typer import Option

from hpctrain.cli.train import write_new
from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from hpctrain.studies.points import Attempt
    from hpctrain.studies.records import PointRecord
    from hpctrain.studies.study import Study

FAILED = 1  # exit code where points have failed

File = Annotated[Path, typer.Argument(metavar="STUDY.toml", show_default=False)]


def init(
    path: File,
    *,
    mode: Annotated[
        Literal["strong", "weak"], Option(help="The same work on more ranks, or more work.")
    ] = "strong",
    command: Annotated[
        str,
        Option(
            metavar="COMMAND",
            help="What to measure, such as 'python train.py'.",
            show_default="the example with handwritten digits",
        ),
    ] = "",
) -> None:
    """Write STUDY.toml, with every key and what it means.

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
    typer.echo(f"{path} has every key; `hpctrain study run {path} --dry-run` lists its points")


def run(  # noqa: PLR0913 - a command's options
    path: File,
    *,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder of the study.", show_default="studies/NAME"),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List what is left to measure and its cost, and stop.")
    ] = False,
    seconds_per_point: Annotated[
        float | None,
        Option(min=0, metavar="S", help="For that cost.", show_default="as measured"),
    ] = None,
    retry_failed: Annotated[
        bool, Option("--retry-failed", help="Measure points again that have failed.")
    ] = False,
    repeat: Annotated[
        int | None, Option(min=0, metavar="N", help="Measure this repeat alone, from 0.")
    ] = None,
    slurm: Annotated[
        bool, Option("--slurm", help="Submit a job for each repeat, and one that reports.")
    ] = False,
    time: Annotated[
        str | None, Option("--time", "-t", metavar="TIME", help="Limit of each job.")
    ] = None,
    partition: Annotated[str | None, Option("--partition", "-p", metavar="NAME")] = None,
    account: Annotated[str | None, Option("--account", "-A", metavar="NAME")] = None,
    extra: Annotated[
        list[str] | None,
        Option("--option", metavar="--qos=high", help="A further option of sbatch."),
    ] = None,
) -> None:
    """Measure all points of a scaling study, each several times, in random order.

    The same command goes on after any kill: what has a record is not measured
    again, what was broken off is. A point that fails is recorded, with its last
    lines, and the study goes on; the exit code is 1 then.

    DIR has study.json, environment.json, points.jsonl with a line for each point
    and repeat, and attempts/ with all output.

    For instance:

      hpctrain study run strong.toml --dry-run --seconds-per-point 20

      hpctrain study run strong.toml

      hpctrain study run strong.toml --slurm --time 1h --partition compute
    """
    from hpctrain.studies import study_file  # noqa: PLC0415
    from hpctrain.studies.points import on_slurm  # noqa: PLC0415
    from hpctrain.studies.study import Study  # noqa: PLC0415

    config = study_file.load(path)
    where = out or Path("studies", config.study.name)
    if slurm:
        config = on_slurm(config)
    study = Study(config, where)
    attempts = study.missing(repeat=repeat, failed=retry_failed)
    if dry_run:
        _describe(study, attempts, seconds_per_point)
        return
    study.prepare()
    if slurm:
        settings = {"partition": partition, "account": account, "extra": tuple(extra or ())}
        _submit(study, attempts, time, settings)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)  # by an exception, which leaves no rank behind
    _measure(study, attempts, repeat)
    failed = [record for record in study.folder.read_points() if record.status == "failed"]
    left = len(study.missing())
    typer.echo(
        f"{len(study.attempts) - left} of {len(study.attempts)} measured, {len(failed)} failed; "
        f"`hpctrain study report {where}` shows them"
    )
    if failed:
        raise typer.Exit(FAILED)


def _describe(study: "Study", attempts: "list[Attempt]", seconds_per_point: float | None) -> None:
    """List the points that are left, a command line, and the cost."""
    from hpctrain.core.units import format_seconds  # noqa: PLC0415

    points: dict[str, list[Attempt]] = {}
    for attempt in sorted(attempts, key=lambda each: each.layout):
        points.setdefault(attempt.text, []).append(attempt)
    cores, hosts = study.facts.cores, study.config.study.hosts
    for text, repeats in points.items():
        many = repeats[0].is_oversubscribed(cores, hosts)
        note = f"  oversubscribed: {cores} cores on each of {hosts} hosts" if many else ""
        typer.echo(f"{text}  x {len(repeats)}{note}")
    if attempts:
        place = study.folder.attempts / attempts[0].name
        names = attempts[0].names(study.config.study.mode, place)
        launcher, command, _ = study.config.filled(names)
        typer.echo(f"the first: {shlex.join([*launcher, *command])}")
    if seconds_per_point is None:
        cost_s = study.expected_s(attempts)
    else:
        cost_s = seconds_per_point * len(attempts)
    price = "say --seconds-per-point for their cost"
    if cost_s is not None:
        # All nodes of the largest point are held all the time.
        price = f"{cost_s * hosts / 3600:.3g} node-hours, {format_seconds(cost_s)} in all"
    typer.echo(f"{len(attempts)} of {len(study.attempts)} are left to measure: {price}")


def _submit(
    study: "Study", attempts: "list[Attempt]", time: str | None, settings: dict[str, Any]
) -> None:
    """Submit a job for each repeat that is left, and behind them one that reports."""
    from hpctrain.cli.submit import check  # noqa: PLC0415
    from hpctrain.launch.slurm.batch_script import BatchSettings, script  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import sbatch_time, submit  # noqa: PLC0415

    if not attempts:
        typer.echo("everything is measured")
        return
    where = study.folder.path
    common = BatchSettings(
        job_name=study.config.study.name,
        config=str(study.folder.file),
        directory=str(where),
        **settings,
    )
    layouts = [attempt.layout for attempt in attempts]
    repeats = sorted({attempt.repeat for attempt in attempts})
    array = replace(
        common,
        nodes=max(layout.nodes for layout in layouts),
        tasks_per_node=max(layout.ranks_per_node for layout in layouts),
        time=None if time is None else sbatch_time(time),
        output=f"{where}/slurm-%A_%a.out",
        array=",".join(map(str, repeats)),
    )
    text = script("study", array)
    check(text, where)
    path = where / "job.sbatch"
    path.write_text(text, encoding="utf-8")
    number = submit(path)
    report = replace(
        common,
        nodes=1,
        tasks_per_node=1,
        output=f"{where}/slurm-report-%j.out",
        dependency=f"afterany:{number}",
        extra=(*common.extra, "--export=ALL,PART=report"),
    )
    path = where / "report.sbatch"
    path.write_text(script("study", report), encoding="utf-8")
    typer.echo(f"job {number}: repeats {array.array} in {where}\njob {submit(path)}: the report")


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _measure(study: "Study", attempts: "list[Attempt]", share: int | None) -> None:
    """Measure under a bar that shows the time left, with a line for each attempt."""
    from hpctrain.core.units import format_seconds  # noqa: PLC0415
    from hpctrain.studies.statistics import step_time_s  # noqa: PLC0415

    left = {attempt.order: attempt for attempt in attempts}
    with _StudyBar(len(attempts)) as bar:

        def begun(attempt: "Attempt") -> None:
            left_s = study.expected_s(left.values())
            time_left = f"  {format_seconds(left_s)} left" if left_s else ""
            bar.show(len(attempts) - len(left), f"{attempt.text}{time_left}")

        def ended(record: "PointRecord") -> None:
            said = f"failed: {record.error}"
            if record.status == "done":
                step = format_seconds(step_time_s(record))
                said = f"{step} a step, {record.samples_per_s:.0f} samples/s"
            bar.tell(f"{left.pop(record.order).text}  repeat {record.repeat}: {said}")

        study.measure(attempts, share=share, begun=begun, ended=ended)


class _StudyBar(Bar):
    def __init__(self, total: int) -> None:
        self._console = make_console(shown=True)
        count, text = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}")
        super().__init__(self._console, count, BarColumn(), text)
        self._task = self._bar.add_task("", total=total)

    def show(self, completed: int, text: str) -> None:
        """Show how many are done, and what is measured now."""
        self._bar.update(self._task, completed=completed, description=text)

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, soft_wrap=True)
