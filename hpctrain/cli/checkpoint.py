"""``hpctrain checkpoint info, verify, export, diff``: look at checkpoints, use them."""

from collections import Counter
from dataclasses import asdict
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson, argument, flag, option

FAULT = 1  # exit code when a checkpoint is not whole, or two states differ

EXAMPLES = """
For instance:

  hpctrain checkpoint info runs/digits

  hpctrain checkpoint verify runs/digits            exit code 1 if anything is damaged

  hpctrain checkpoint export runs/digits model.pt --only model

  hpctrain checkpoint diff runs/a runs/b            exit code 1 if they differ
"""

checkpoint = typer.Typer(
    name="checkpoint",
    help="Look at the checkpoints of a run, check, compare and export them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Where = Annotated[Path, argument("PATH", "A checkpoint, or a run directory.")]


@checkpoint.callback()
def alone(context: typer.Context) -> None:
    """Look at the checkpoints of a run, check, compare and export them."""
    from hpctrain.cluster.env import launched  # noqa: PLC0415

    found = launched()
    if context.invoked_subcommand and found is not None and found.rank > 0:
        raise typer.Exit  # of ranks that were started together, one does the work


@checkpoint.command()
def info(
    path: Where,
    *,
    json: AsJson = False,
    largest: Annotated[int, option("N", "How many tensors are listed.", "--largest", min=0)] = 10,
) -> None:
    """Tell what a checkpoint holds, or the newest one of a run: step, sizes, tensors, facts.

    Reads the manifest, no tensors. A run directory lists its checkpoints first.

    For instance:

      hpctrain checkpoint info runs/digits

      hpctrain checkpoint info runs/digits/checkpoints/step-00001200 --largest 50

      hpctrain checkpoint info runs/digits --json | jq .step
    """
    from hpctrain.checkpoint.inspection import checkpoints_in, describe, lines_of  # noqa: PLC0415

    found = checkpoints_in(path)
    told = describe(found[-1], num_largest=largest)
    if json:
        others = [str(place) for place in found]
        typer.echo(dumps({**told, "checkpoints": others}, indent=1))
        return
    if len(found) > 1:
        names = [place.name for place in found]
        shown = names if len(names) <= 8 else [names[0], "...", *names[-3:]]
        _say(f"{len(found)} checkpoints: {', '.join(shown)}; the newest is")
    for line in lines_of(told):
        _say(line)


@checkpoint.command()
def verify(path: Where, *, json: AsJson = False) -> None:
    """Check every byte of a checkpoint, or of all of a run, against its checksums.

    The exit code is 0 if all are whole, 1 if anything is wrong, 2 if there is none.

    For instance:

      hpctrain checkpoint verify runs/digits

      hpctrain checkpoint verify runs/digits/checkpoints/step-00001200

      hpctrain checkpoint verify runs/digits --json | jq '.[].faults'
    """
    from hpctrain.checkpoint.inspection import verify as check  # noqa: PLC0415

    reports = []
    for directory, faults in check(path):
        reports.append({"directory": str(directory), "faults": faults})
        told = [f"{directory}: {'not whole' if faults else 'whole'}", *(f"  {f}" for f in faults)]
        for line in () if json else told:
            _say(line)
    if json:
        typer.echo(dumps(reports, indent=1))
    if any(report["faults"] for report in reports):
        raise typer.Exit(FAULT)


@checkpoint.command()
def export(
    path: Where,
    out: Annotated[Path, argument("OUT", "What is written.")],
    *,
    only: Annotated[
        str | None,
        option(
            "PART",
            "This part of the state, such as model or optimizer/state.",
            default="all of it",
        ),
    ] = None,
    overwrite: Annotated[bool, flag("Replace what OUT is.", "--overwrite")] = False,
) -> None:
    """Write the state of a checkpoint for other programs; of a run, that of the newest one.

    OUT.pt is for torch.load(OUT, weights_only=True), OUT.safetensors for safetensors, which
    holds tensors alone: a model. What each rank has of its own, such as random states, is not
    exported.

    For instance:

      hpctrain checkpoint export runs/digits model.pt --only model

      hpctrain checkpoint export runs/digits model.safetensors --only model
    """
    from hpctrain.checkpoint.export import check_ending, newest_state  # noqa: PLC0415
    from hpctrain.checkpoint.export import export as write  # noqa: PLC0415

    check_ending(out)
    source, state = newest_state(path, only)
    write(state, out, overwrite=overwrite)
    _say(f"{out}: {only or 'the whole state'} of {source}")


@checkpoint.command()
def diff(
    first: Annotated[Path, argument("A", "A checkpoint, or a run directory.")],
    second: Annotated[Path, argument("B", "What A is compared with.")],
    *,
    only: Annotated[
        list[str] | None,
        option(
            "PART",
            "This part of the state, such as model or optimizer/state; may be repeated.",
            "--only",
            default="all of it",
        ),
    ] = None,
    lines: Annotated[int, option("N", "How many differences are listed.", "--lines", min=1)] = 10,
    json: AsJson = False,
) -> None:
    """Tell where two states differ, bit by bit: the first tensor, and by how much.

    A and B are checkpoints, or run directories, whose newest one counts. Tensors come first, in
    the order of the state, then plain values, then what each rank has of its own. The exit code
    is 0 if they are the same, 1 if they differ; times that a run has measured, and the number of
    its records, are named, and do not count.

    For instance:

      hpctrain checkpoint diff runs/a runs/b

      hpctrain checkpoint diff runs/a runs/b --only model --only optimizer
    """
    from hpctrain.checkpoint.state_diff import NO_RESULTS, compare  # noqa: PLC0415

    found = compare(first, second, only or ())
    differ = [item for item in found if item.what not in NO_RESULTS]
    if json:
        typer.echo(dumps([asdict(item) for item in found], indent=1))
    elif differ:
        kinds = Counter(item.what for item in found)
        counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        _say(f"A {first} and B {second} differ: {counts}; the first is")
        for item in islice(found, lines):
            _say(f"  {item.text}")
        if len(found) > lines:
            _say(f"  and {len(found) - lines} more; --lines {len(found)} lists all")
    else:
        but = ", but for times that were measured and numbers of records: " * bool(found)
        names = ", ".join(item.path for item in found)
        _say(f"{first} and {second} are the same, bit for bit{but}{names}")
    if differ:
        raise typer.Exit(FAULT)


def _say(line: str) -> None:
    """Print a line; what a name from a file would do to a terminal is spelled out."""
    typer.echo("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))
