"""``hpctrain doctor``: find faults of this machine, job or launch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from hpctrain.cli.options import FAILED, AsJson, SiteName, flag, option, show_json
from hpctrain.cluster.env import launched
from hpctrain.core import atomic
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.finding import LEVELS, Finding, Level
from hpctrain.core.units import plural
from hpctrain.doctor.checks import gpu_network, table
from hpctrain.doctor.checks.check import Found, named
from hpctrain.doctor.checks.facts import Facts
from hpctrain.doctor.host import bug_report, gather
from hpctrain.doctor.ranks import examine_ranks
from hpctrain.launch import pmi as interfaces
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import scheduler
from hpctrain.launch.slurm.lint import lint as linting
from hpctrain.launch.slurm.lint import shellcheck

app = typer.Typer()


@app.command()
def doctor(  # noqa: PLR0913 - options of the command
    *,
    json: AsJson = False,
    pmi: bool = flag("Print the value for `srun --mpi=` only.", "--pmi"),
    lint: Path | None = option(None, "JOB.sbatch", "Check a job script only.", "--lint"),
    directory: list[Path] | None = option(
        None, "DIR", "Also test files, locks and HDF5 in DIR; may be repeated.", "--dir"
    ),
    site: SiteName = None,
    verbose: bool = flag("Also print checks without faults.", "--verbose", "-v"),
    report: Path | None = option(
        None, "FILE", "Also write FILE, to attach to a bug report.", "--report"
    ),
) -> None:
    """Find faults of this machine, job or launch, and print remedies.

    A single process examines this machine and this job. Ranks started by srun, mpirun or
    hpctrain launch also connect to each other and measure the links between them; rank 0 prints.

    The file of --report has versions, packages and all findings. It contains no command lines,
    no configurations, and no words that may be passwords or tokens.

    The exit code is 2 for a mistake in the command, 1 if there is a warning or an error, else 0.

    Examples:
      hpctrain doctor

      hpctrain doctor --dir /scratch/me/data --verbose

      hpctrain doctor --lint job.sbatch --site perlmutter

      hpctrain doctor --report report.txt

      srun --mpi=$(hpctrain doctor --pmi) -n 8 hpctrain doctor

      hpctrain launch -n 4 hpctrain doctor --json
    """
    if pmi:
        typer.echo(interfaces.needed_pmi())
        return
    if lint is not None:
        findings, is_speaker = _lint(lint, site), True
    else:
        of_site = partial(gpu_network.check_site, site=sites.find(site), given=site)
        findings, is_speaker = _examine(directory or (), of_site)
    if not is_speaker:
        return  # an exit code of 1 would end the job before rank 0 has printed
    if json:
        show_json([asdict(finding) for finding in findings])
    else:
        show(findings, verbose=verbose)
    if report is not None:
        with atomic.explained_writes("the file of --report", report, "name another file"):
            report.write_text(bug_report.bug_report(findings), encoding="utf-8")
        typer.echo(f"read {report} before you attach it to a bug report", err=True)
    if any(finding.is_wrong for finding in findings):
        raise typer.Exit(FAILED)


def _lint(script: Path, site: str | None = None) -> list[Finding]:
    try:
        text = script.read_bytes().decode("utf-8")  # keeps the line endings
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lint must get a job script, but {script} cannot be read: {error}"
        ) from None
    found = linting.lint(text, facts=linting.gather(Path.cwd(), site=sites.find(site)))
    found += shellcheck.shellcheck(text, str(script))
    with suppress(LaunchError):
        scheduler.find_sbatch()
        try:
            scheduler.try_out(text)
        except LaunchError as error:  # the error contains the message of Slurm
            level: Level = "note" if str(error).startswith(scheduler.NO_ANSWER) else "error"
            found.append(Finding("sbatch --test-only", level, str(error), "sbatch --help"))
    return [each for each in found if each.level != "ok"] or found


def _examine(
    directories: Sequence[Path], of_site: Callable[[Facts], Found]
) -> tuple[list[Finding], bool]:
    """Return the findings, and whether this process must print them."""
    found = launched()
    if found is None:
        facts = gather.gather(directories=directories)
        return [*table.examine(facts), *named("site", of_site(facts))], True
    # One rank of each node starts programs and writes files.
    is_first = not found.local_rank
    facts = gather.gather(directories=directories if is_first else (), lightly=not is_first)
    # If the ranks are not connected, each process is rank 0 of a separate world. The rank that the
    # launcher assigned therefore decides whether this process prints.
    findings = examine_ranks.probe(facts)
    return [*findings, *named("site", of_site(facts))], found.rank == 0


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_INDENT = 9


def show(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Print findings, the most severe first, and a summary.

    ``verbose`` includes findings of level ``ok``. Lines are not wrapped, so that grep finds their
    text. On a terminal the text has colours.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = [finding for finding in findings if verbose or finding.level != "ok"]
    for finding in sorted(shown, key=lambda each: -LEVELS.index(each.level)):
        level = Text(f"{finding.level:<{_INDENT}}", style=_STYLES[finding.level])
        console.print(level + Text(f"{finding.check}: {finding.what}"))
        if finding.do:
            console.print(Text(f"{'':<{_INDENT}}do: ") + Text(finding.do, style="bold"))
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """Return a line with the number of checks, errors, warnings and notes."""
    counts = {level: sum(each.level == level for each in findings) for level in LEVELS}
    checks = plural(len({finding.check for finding in findings}), "check")
    parts = [plural(counts[level], level) for level in reversed(LEVELS[1:]) if counts[level]]
    verdict = "" if counts["warning"] or counts["error"] else "nothing wrong: "
    return ", ".join([f"{verdict}{checks}", *parts])
