"""``hpctrain study``: write, measure, report and compare scaling studies."""

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpctrain.cli import study_bar, study_evidence, submit
from hpctrain.cli.examples import write_examples
from hpctrain.cli.options import (
    FAILED,
    Account,
    Extra,
    Partition,
    TimeLimit,
    argument,
    flag,
    option,
    takes,
)
from hpctrain.cluster.machine_load import LOAD_S, measured_for
from hpctrain.core import atomic, keys
from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_seconds, parse_number
from hpctrain.cost import machine as machines
from hpctrain.launch.slurm import batch_script, scheduler
from hpctrain.report.document import write_documents
from hpctrain.studies import comparison, points, proposal, study_file
from hpctrain.studies import report as reports
from hpctrain.studies import study_results as measured
from hpctrain.studies import study_run as studies
from hpctrain.train.console import make_console

if TYPE_CHECKING:
    from hpctrain.studies.points import PointRepeat
    from hpctrain.studies.study_run import Study

app = typer.Typer(no_args_is_help=True)
study_evidence.add_to(app)

File = Annotated[Path, argument("STUDY.toml", "File of the study.")]


@app.callback()
def study() -> None:
    """Measure how a training scales, and report the measurements.

    hpctrain guide studies describes factors, measurements and method.

    Examples:
      hpctrain study init strong.toml

      hpctrain study run strong.toml --dry-run

      hpctrain study run strong.toml

      hpctrain study report studies/digits-strong

      hpctrain study compare studies/before studies/after

      hpctrain study import studies/digits-strong ddp.csv --name DDP

      hpctrain study predict studies/digits-strong --ranks 16

      hpctrain study export studies/digits-strong

      hpctrain study reproduce digits-strong.tar.gz
    """


@app.command()
def init(
    path: File,
    *,
    mode: Literal["strong", "weak", "both"] = option(
        "strong",
        "strong|weak|both",
        "Same work on more ranks, work that grows with the ranks, or both, interleaved.",
    ),
    command: str = option(
        "", "COMMAND", "Command to measure, such as 'python train.py'.", shown="an example"
    ),
) -> None:
    """Write STUDY.toml with every key and its meaning.

    Without --command the study measures an example, which is written into examples/ if it is
    missing: handwritten digits if scikit-learn is installed, otherwise measured.py.

    A script records its steps in three lines, which do nothing outside a study:

      import hpctrain
      ...
      hpctrain.record(step=step, samples=len(batch), loss=loss.item())   # after each step

    Examples:
      hpctrain study init strong.toml

      hpctrain study init weak.toml --mode weak --command 'python train.py'
    """
    prefix = ""
    if not command:
        has_digits = find_spec("sklearn") is not None
        prefix, command = ("digits.", "") if has_digits else ("measured.", study_file.MEASURED)
    atomic.write_new(path, keys.render(study_file.example(mode, command)))
    for each in write_examples(prefix=prefix) if prefix else ():
        typer.echo(f"wrote {each}, which {path} measures")
    typer.echo(f"{path} has every key; `hpctrain study run {path} --dry-run` lists its points")


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Arguments and options of ``hpctrain study run``."""

    path: File
    out: Path | None = option(None, "DIR", "Directory of the study.", shown="studies/NAME")
    dry_run: bool = flag("List the points still to measure and their cost, and exit.", "--dry-run")
    seconds_per_point: float | None = option(
        None, "S", "Seconds per point, for the cost.", shown="as measured", min=0
    )
    retry_failed: bool = flag("Measure failed points again.", "--retry-failed")
    repeat: int | None = option(None, "N", "Measure repeat N only, from 0.", shown="all", min=0)
    slurm: bool = flag(
        "Submit a job for each repeat, and a job that writes the report.", "--slurm"
    )
    time: TimeLimit = None
    partition: Partition = None
    account: Account = None
    extra: Extra = None

    def of_study(self) -> "Study":
        """Return the study that the file describes.

        Raises:
            ConfigError: the file or an option is invalid.
        """
        config = study_file.load(self.path)
        for word in shlex.split(config.command.run):
            if word.endswith((".py", ".toml")) and "{" not in word and not Path(word).exists():
                raise ConfigError(
                    f"command.run of {self.path} must name files that exist, but {word} is not in "
                    f"{Path.cwd()}; start the study in its directory, write the full path, or let "
                    f"`hpctrain examples` write examples/"
                )
        name, last = config.study.name, config.study.repeats - 1
        if self.out is None and (Path(name).name != name or name in ("", "..")):
            raise ConfigError(
                f"study.name of {self.path} must be the name of a directory, got {name!r}; change "
                f"the name, or use --out"
            )
        if self.repeat is not None and self.repeat > last:
            raise ConfigError(
                f"--repeat must be between 0 and {last} for {self.path}, got {self.repeat}; raise "
                f"study.repeats"
            )
        config = points.on_slurm(config) if self.slurm else config
        return studies.Study(config, self.out or Path("studies", name))


@app.command()
@takes(StudyOptions)
def run(options: StudyOptions) -> None:
    """Measure all points of a scaling study, each several times, in random order.

    SIGINT, SIGTERM or SIGHUP ends the study and the ranks of the current point, which is not
    recorded. The same command continues: recorded points are not measured again. A point that
    fails is recorded with its last lines of output, and the study continues; the exit code is then
    1. The study stops if three attempts in a row fail with the same error, and the points are not
    the cause: either no point has succeeded yet, or these points have succeeded before.

    Relative paths start at the current directory. The modules that a TOML file names are first
    searched next to this file.

    Once per second, each rank samples its memory, the bytes that it reads and writes, and, where
    readable, energy (Cray pm_counters, RAPL) and GPUs (ROCm SMI, NVML by nvidia-ml-py). Sampling
    takes at most 1 % of the time. A busy node is reported, and disturbed points are marked.

    DIR has STUDY.toml, environment.json, points-N.jsonl with a line for each point of repeat N,
    and attempts/ with all output.

    Examples:
      hpctrain study run strong.toml --dry-run --seconds-per-point 20

      hpctrain study run strong.toml

      hpctrain study run strong.toml --slurm --time 1h --partition compute
    """
    found = options.of_study()
    attempts = found.missing(repeat=options.repeat, failed=options.retry_failed)
    if options.dry_run:
        _describe(found, attempts, options.seconds_per_point)
        return
    found.prepare()
    if options.slurm:
        _submit(found, attempts, options)
        return
    if attempts and (load := measured_for(LOAD_S)) is not None and load.fault:
        logger.warning(f"{load.fault}; stop the study, and continue it when the node is idle")
    is_complete = study_bar.measure(found, attempts)
    failed = [record for record in found.folder.read_points() if record.status == "failed"]
    remedy = "; --retry-failed measures the failed points again" if failed else ""
    typer.echo(
        f"{len(found.attempts) - len(found.missing(failed=True))} of {len(found.attempts)} "
        f"measured, {len(failed)} failed; `hpctrain study report {found.folder.path}` shows them"
        f"{remedy}"
    )
    if not is_complete:
        typer.echo(
            "stopped: the last attempts failed with the same error, which their points do not "
            "cause, so further attempts would fail too; correct the error, and run with "
            "--retry-failed"
        )
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def report(
    directory: Path = argument("DIR", "Directory of a study."),
    *,
    machine: Path | None = option(
        None, "FILE", "Machine as TOML, for a lower bound of the step times."
    ),
    out: Path | None = option(None, "DIR", "Directory to write into.", shown="DIR"),
    centre: Literal["csc", "eurohpc", "generic"] | None = option(
        None, "csc|eurohpc|generic", "Also write the scaling report of a proposal.", "--for"
    ),
    samples: str | None = option(
        None, "N", "Samples of the whole training, such as 1.2M.", shown="1M, or to the target"
    ),
    efficiency: float | None = option(
        None, "E", "Required efficiency.", shown="of the centre", min=0.01, max=1
    ),
) -> None:
    """Write the page report.html and figures as PNG and SVG, and print a summary.

    The page can be read without a network. Its checklist shows the rules for performance reports
    that the study follows; for each other rule, it shows which facts are missing.

    --for also writes the report that computing centres request with a proposal, as proposal.md,
    proposal.tex (the tables) and proposal.pdf: speed-up, efficiency, cost, memory, energy, the
    largest size with the required efficiency, and a job script. CSC compares each size with the
    next smaller one, the others with the smallest one.

    Examples:
      hpctrain study report studies/digits-strong

      hpctrain study report studies/digits-strong --machine cluster.toml --out digits

      hpctrain study report studies/digits-strong --for eurohpc --samples 1.2M
    """
    num_samples = None if samples is None else parse_number(samples)
    results = measured.StudyResults.read(directory)
    if machine is not None:
        results = results.with_bound(machines.Machine.read(machine))
    make_console(shown=True).print(reports.summary_of(results))
    page, *figures = reports.write_report(results, out or directory)
    typer.echo(f"wrote {page}, and {len(figures)} figures into plots in the same directory")
    if centre is not None:
        rules = proposal.Centre.named(centre, efficiency)
        evidence = proposal.Proposal(results, rules, num_samples)
        for path in write_documents(evidence.document(), out or directory, "proposal"):
            typer.echo(f"wrote {path}")


@app.command()
def compare(
    first: Path = argument("A", "Directory of a study."),
    second: Path = argument("B", "Directory of the study to compare with A."),
    *,
    alpha: float = option(
        0.05, "P", "Probability that equal studies are found to differ.", min=1e-6, max=0.5
    ),
    fail_slower: bool = flag("Exit with code 1 if B is slower beyond noise.", "--fail-slower"),
) -> None:
    """Compare the times of a step at the points that two studies share.

    Prints the ratios of B to A, with confidence intervals of an exact rank-sum test over repeats.

    Examples:
      hpctrain study compare studies/before studies/after

      hpctrain study compare studies/before studies/after --fail-slower
    """
    before, after = measured.StudyResults.read(first), measured.StudyResults.read(second)
    found = comparison.StudyComparison(before, after, alpha)
    make_console(shown=True).print(found.summary())
    if fail_slower and all(verdict.startswith("too few") for verdict in found.verdicts):
        raise ConfigError(
            f"--fail-slower must have enough repeats to find a difference, but they are too few "
            f"for --alpha {alpha:g}; measure more repeats, or raise --alpha"
        )
    if fail_slower and "slower" in found.verdicts:
        raise typer.Exit(FAILED)


def _describe(
    found: "Study", attempts: "list[PointRepeat]", seconds_per_point: float | None
) -> None:
    """Print the points to measure, an example command line, and the expected cost."""
    cores, hosts = found.config.study.cores, found.config.study.hosts
    counts = Counter(each.text for each in sorted(attempts, key=lambda each: each.layout))
    for text, repeats in counts.items():
        many = next(a for a in attempts if a.text == text).is_oversubscribed(cores, hosts)
        note = f"  oversubscribed: {found.config.study.describe_machine()}" * many
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
    price = "--seconds-per-point S estimates their cost"
    if cost_s is not None:
        # A job holds all nodes of the largest point for its whole time.
        price = f"{cost_s * hosts / 3600:.3g} node-hours, {format_seconds(cost_s)} in all"
    typer.echo(f"{len(attempts)} of {len(found.attempts)} are still to measure: {price}")


def _submit(found: "Study", attempts: "list[PointRepeat]", options: StudyOptions) -> None:
    """Submit a job for each repeat, and a job that writes the report after all repeats."""
    if not attempts:
        typer.echo("everything is measured")
        return
    where, table = found.folder.path, found.config.study
    layouts = [attempt.layout for attempt in attempts]
    repeats = ",".join(map(str, sorted({attempt.repeat for attempt in attempts})))
    array = batch_script.BatchSettings(
        job_name=table.name,
        config=str(found.folder.file),
        directory=str(where),
        nodes=max(layout.nodes for layout in layouts),
        ntasks_per_node=max(layout.ranks_per_node for layout in layouts),
        time=None if options.time is None else scheduler.sbatch_time(options.time),
        output=f"{where}/slurm-%A_%a.out",
        array=repeats,
        partition=options.partition,
        account=options.account,
        extra=tuple(options.extra or ()),
    )

    def job(name: str, settings: "batch_script.BatchSettings") -> int:
        text, path = batch_script.script("study", settings), where / f"{name}.sbatch"
        if name == "job":
            submit.check(text, where)
        path.write_text(text, encoding="utf-8")
        return scheduler.submit(path)

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
