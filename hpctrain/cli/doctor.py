"""``hpctrain doctor``: what is wrong with this machine, this job or this launch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson, flag, option
from hpctrain.core.finding import LEVELS, Finding, Level

WRONG = 1  # exit code when there is a warning or an error


def doctor(
    *,
    json: AsJson = False,
    pmi: Annotated[
        bool, flag("Print what `srun --mpi=` needs, and nothing else.", "--pmi")
    ] = False,
    lint: Annotated[Path | None, option("JOB.sbatch", "Check a job script.", "--lint")] = None,
    directory: Annotated[
        list[Path] | None,
        option("DIR", "Try files, locks and HDF5 there too; may be repeated.", "--dir"),
    ] = None,
    verbose: Annotated[bool, flag("Show what is well, too.", "--verbose", "-v")] = False,
) -> None:
    """Look for what goes wrong on clusters, and say what to do about it.

    By itself it looks at this machine and this job. Started as ranks, by
    srun, mpirun or hpctrain launch, it also lets the ranks find each other
    and measures what is between them; rank 0 prints.

    The exit code is 1 if there is a warning or an error, 2 for a mistake
    in the command, else 0, also with notes.

    For instance:

      hpctrain doctor

      hpctrain doctor --dir /scratch/me/data --verbose

      hpctrain doctor --lint job.sbatch

      srun --mpi=$(hpctrain doctor --pmi) -n 8 hpctrain doctor

      hpctrain launch -n 4 hpctrain doctor --json
    """
    if pmi:
        from hpctrain.launch.pmi import needed_pmi  # noqa: PLC0415

        typer.echo(needed_pmi())
        return
    if lint is not None:
        findings, is_speaker = _lint(lint), True
    else:
        findings, is_speaker = _examine(directory or ())
    if not is_speaker:
        return  # one exit code is enough, and one before rank 0 has spoken would end it
    if json:
        typer.echo(dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings, verbose=verbose)
    if any(finding.is_wrong for finding in findings):
        raise typer.Exit(WRONG)


def _lint(script: Path) -> list[Finding]:
    from hpctrain.core.errors import ConfigError, LaunchError  # noqa: PLC0415
    from hpctrain.launch.slurm.lint.lint import gather, lint  # noqa: PLC0415
    from hpctrain.launch.slurm.lint.shellcheck import shellcheck  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import (  # noqa: PLC0415
        NO_ANSWER,
        find_sbatch,
        try_out,
    )

    try:
        text = script.read_bytes().decode("utf-8")  # with the ends of its lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lint needs a job script, {script} cannot be read: {error}") from None
    found = lint(text, facts=gather(Path.cwd()))
    found += shellcheck(text, str(script))
    with suppress(LaunchError):
        find_sbatch()
        try:
            try_out(text)
        except LaunchError as error:  # in Slurm's own words
            level: Level = "note" if str(error).startswith(NO_ANSWER) else "error"
            found.append(Finding("sbatch --test-only", level, str(error), "sbatch --help"))
    others = [each for each in found if each.level != "ok"]
    return others or found


def _examine(directories: Sequence[Path]) -> tuple[list[Finding], bool]:
    """Return the findings, and whether this process is the one that tells them."""
    from hpctrain.cluster.env import launched  # noqa: PLC0415
    from hpctrain.doctor.checks.table import examine  # noqa: PLC0415
    from hpctrain.doctor.host.gather import gather  # noqa: PLC0415

    found = launched()
    if found is None:
        return examine(gather(directories=directories)), True
    # Programs are started, files are written and so on by one rank of each node.
    is_first = not found.local_rank
    facts = gather(directories=directories if is_first else (), lightly=not is_first)
    from hpctrain.doctor.ranks.examine_ranks import probe  # noqa: PLC0415 - loads torch and MPI

    # Where every rank is alone, each is the first of its world: the launcher's word counts.
    return probe(facts), found.rank == 0


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_INDENT = 9


def show(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Print the findings, the worst first, and a line that sums them up; ``verbose`` all of them.

    No line is broken, so that grep finds things; a terminal gets colours.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = [finding for finding in findings if verbose or finding.level != "ok"]
    for finding in sorted(shown, key=lambda each: -LEVELS.index(each.level)):
        level = Text(f"{finding.level:<{_INDENT}}", style=_STYLES[finding.level])
        console.print(level + Text(f"{finding.check}: {finding.what}"))
        if finding.do:
            console.print(Text(f"{'':<{_INDENT}}do: ") + Text(finding.do, style="bold"))
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """Sum up in a line."""
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    checks = len({finding.check for finding in findings})
    parts = [
        f"{counts[level]} {level}{'s' * (counts[level] != 1)}"
        for level in reversed(LEVELS[1:])
        if counts[level]
    ]
    verdict = "" if counts["warning"] or counts["error"] else "nothing wrong: "
    return ", ".join([f"{verdict}{checks} check{'s' * (checks != 1)}", *parts])
