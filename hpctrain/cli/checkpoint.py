"""``hpctrain checkpoint``: inspect, check, compare and export checkpoints."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.checkpoint import export as exporting
from hpctrain.checkpoint import inspection, state_diff
from hpctrain.cli.options import FAILED, AsJson, argument, flag, option, show_json
from hpctrain.cluster.env import launched

app = typer.Typer(no_args_is_help=True)

Where = Annotated[Path, argument("PATH", "A checkpoint, or a run directory.")]
PART = "Part of the state, such as model or optimizer/state"


@app.callback()
def checkpoint(context: typer.Context) -> None:
    """Inspect, check, compare and export the checkpoints of a run.

    Examples:
      hpctrain checkpoint info runs/digits

      hpctrain checkpoint verify runs/digits

      hpctrain checkpoint export runs/digits model.pt --only model

      hpctrain checkpoint diff runs/a runs/b
    """
    found = launched()
    if context.invoked_subcommand and found is not None and found.rank > 0:
        raise typer.Exit  # only rank 0 of a launch does the work


@app.command()
def info(
    path: Where,
    *,
    json: AsJson = False,
    largest: int = option(
        10, "N", "Number of tensors to list, largest first.", "--largest", min=0
    ),
) -> None:
    """Print the contents of a checkpoint: step, sizes, tensors, facts.

    For a run directory, the command lists the checkpoints and prints the newest one. The command
    reads the manifest, but no tensors.

    Examples:
      hpctrain checkpoint info runs/digits

      hpctrain checkpoint info runs/digits/checkpoints/step-00001200 --largest 50

      hpctrain checkpoint info runs/digits --json | jq .step
    """
    found = inspection.checkpoints_in(path)
    facts = inspection.describe(found[-1], num_largest=largest)
    if json:
        show_json(facts | {"checkpoints": [str(place) for place in found]})
        return
    if len(found) > 1:
        names = [place.name for place in found]
        shown = names if len(names) <= 8 else [names[0], "...", *names[-3:]]
        _print(f"{len(found)} checkpoints: {', '.join(shown)}; the newest is")
    for line in inspection.lines_of(facts):
        _print(line)


@app.command()
def verify(path: Where, *, json: AsJson = False) -> None:
    """Check every byte of a checkpoint, or of all checkpoints of a run, against its checksums.

    The exit code is 0 if all checkpoints are intact, 1 if a checkpoint is damaged, and 2 if there
    is no checkpoint.

    Examples:
      hpctrain checkpoint verify runs/digits

      hpctrain checkpoint verify runs/digits/checkpoints/step-00001200

      hpctrain checkpoint verify runs/digits --json | jq '.[].faults'
    """
    reports = []
    for directory, faults in inspection.verify(path):
        reports.append({"directory": str(directory), "faults": faults})
        state = "damaged" if faults else "intact"
        for line in () if json else (f"{directory}: {state}", *(f"  {f}" for f in faults)):
            _print(line)
    if json:
        show_json(reports)
    if any(report["faults"] for report in reports):
        raise typer.Exit(FAILED)


@app.command()
def export(
    path: Where,
    out: Path = argument("OUT", "File to write, .pt or .safetensors."),
    *,
    only: str | None = option(None, "PART", f"{PART}.", shown="the whole state"),
    overwrite: bool = flag("Replace OUT if it exists.", "--overwrite"),
) -> None:
    """Write the state of a checkpoint, or of the newest one of a run, for other programs.

    A file OUT.pt can be read by torch.load(OUT, weights_only=True). A file OUT.safetensors can be
    read by safetensors; this format stores only tensors, for example the state of a model. The
    private state of each rank, such as random states, is not exported.

    Examples:
      hpctrain checkpoint export runs/digits model.pt --only model

      hpctrain checkpoint export runs/digits model.safetensors --only model
    """
    exporting.check_ending(out)
    source, state = exporting.newest_state(path, only)
    exporting.export(state, out, overwrite=overwrite)
    _print(f"{out}: {only or 'the whole state'} of {source}")


@app.command()
def diff(
    first: Path = argument("A", "A checkpoint, or a run directory."),
    second: Path = argument("B", "The checkpoint or run directory to compare with A."),
    *,
    only: list[str] | None = option(
        None, "PART", f"{PART}; may be repeated.", "--only", shown="the whole state"
    ),
    lines: int = option(10, "N", "Number of differences to list.", "--lines", min=1),
    json: AsJson = False,
) -> None:
    """List the bitwise differences of two states: what differs, and by how much.

    For a run directory, the command compares the newest checkpoint of the run. Tensors are listed
    first, in the order of the state, then plain values, then the private state of each rank. The
    exit code is 0 if the states are identical, 1 if they differ; measured times and the number of
    records are listed but do not count.

    Examples:
      hpctrain checkpoint diff runs/a runs/b

      hpctrain checkpoint diff runs/a runs/b --only model --only optimizer
    """
    found = state_diff.compare(first, second, only or ())
    differ = [item for item in found if item.what not in state_diff.NO_RESULTS]
    if json:
        show_json([asdict(item) for item in found])
    elif differ:
        kinds = Counter(item.what for item in found)
        counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        _print(f"A {first} and B {second} differ: {counts}; the first is")
        for item in found[:lines]:
            _print(f"  {item.text}")
        if len(found) > lines:
            _print(f"  and {len(found) - lines} more; --lines {len(found)} lists all")
    else:
        names = ", ".join(item.path for item in found)
        but = f", except for measured times and numbers of records: {names}" if found else ""
        _print(f"{first} and {second} are bitwise identical{but}")
    if differ:
        raise typer.Exit(FAILED)


def _print(line: str) -> None:
    """Print a line with control characters escaped; names in files may contain them."""
    typer.echo("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))
