"""``hpctrain plan``: nodes, batch, codec and local steps for a goal, by the models of cost."""

import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from hpctrain.cost.planner import Advice, Candidate
    from hpctrain.cost.step import Model

_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def _number(text: str) -> float:
    """Read a number such as 25.6M or 1e9."""
    digits = text.rstrip("kMG")
    try:
        return float(digits) * _FACTORS[text.removeprefix(digits)]
    except (ValueError, KeyError):
        raise typer.BadParameter(
            f"a number such as 1000, 25.6M or 1e9 is needed, got {text!r}"
        ) from None


def _norms(text: str) -> tuple[float, float]:
    batch, _, norm = text.partition(":")
    return _number(batch), _number(norm)


Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIRECTORY",
        help="A run of hpctrain train: its parameters, speed, batch and loss.",
        show_default=False,
    ),
]
MachineFile = Annotated[
    Path, Option("--machine", metavar="FILE", help="Machine in TOML: hpctrain guide plan.")
]


def _given(name: str, text: str, parser: Any = _number) -> Any:
    return Option(metavar=name, help=text, parser=parser, show_default=False)


def plan(  # noqa: PLR0913 - a command's options
    run: Run = None,
    *,
    machine: MachineFile,
    parameters: Annotated[
        float | None, _given("N", "Parameters of the model, such as 25.6M.")
    ] = None,
    samples_per_s: Annotated[float | None, _given("R", "Samples a second of one rank.")] = None,
    rank_batch: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Samples that a rank takes at once.", show_default="32"),
    ] = None,
    batch: Annotated[
        int | None, Option(min=1, metavar="N", help="Samples of a step, over all ranks.")
    ] = None,
    samples: Annotated[
        float | None, _given("N", "Samples to learn from until the goal, in such batches.")
    ] = None,
    target_loss: Annotated[
        float | None, Option(metavar="LOSS", help="The goal, where the run has reached it.")
    ] = None,
    noise_scale: Annotated[
        float | None, _given("N", "Gradient noise scale in samples: other batches are tried too.")
    ] = None,
    gradient_norms: Annotated[
        tuple[Any, Any] | None,
        Option(
            metavar="B1:N1 B2:N2",
            help="Instead of it: two batch sizes, each with the mean squared norm of gradients.",
            parser=_norms,
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        str | None, Option(metavar="TIME", help="Least node-hours within such as 12h or 2d.")
    ] = None,
    max_local_steps: Annotated[
        int, Option(min=1, metavar="H", help="Most steps between two averagings; 1: none.")
    ] = 8,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict which nodes, batch, codec and local steps reach a goal soonest, and at what cost.

    The models are closed forms with the figures of a machine file, which hpctrain bench fit
    writes; hpctrain guide plan says what they leave out. More nodes pay as long as twice as many
    save a quarter of the time. Times are predictions, not measurements.

    For instance:

      hpctrain plan runs/digits --machine machine.toml --target-loss 0.1

      hpctrain plan --machine machine.toml --parameters 25.6M --samples-per-s 250 --batch 4096
      --samples 115M

      hpctrain plan runs/digits --machine machine.toml --noise-scale 2000 --deadline 12h

      hpctrain plan runs/digits --machine machine.toml --gradient-norms 32:4.1 256:1.3 --json
    """
    from hpctrain.core.units import parse_seconds  # noqa: PLC0415
    from hpctrain.cost.learning import noise_scale as estimated  # noqa: PLC0415
    from hpctrain.cost.machine import Machine  # noqa: PLC0415
    from hpctrain.cost.planner import Goal, advise  # noqa: PLC0415
    from hpctrain.cost.step import Model  # noqa: PLC0415

    if target_loss is not None and run is None:
        raise ConfigError("--target-loss is read from a run: give its directory, or --samples")
    given = {
        "--parameters": parameters,
        "--samples-per-s": samples_per_s,
        "--rank-batch": rank_batch,
        "--batch": batch,
        "--samples": samples,
    }
    known = {"--rank-batch": 32} if run is None else _facts(run, target_loss)
    known |= {name: value for name, value in given.items() if value is not None}
    if missing := given.keys() - known:
        raise ConfigError(
            f"a plan needs the model and the goal, and lacks {', '.join(sorted(missing))}; give "
            f"them, or the directory of a run"
        )
    if gradient_norms is not None:
        noise_scale = estimated(*gradient_norms)
    model = Model(
        parameters=known["--parameters"],
        samples_per_s=known["--samples-per-s"],
        rank_batch=int(known["--rank-batch"]),
    )
    goal = Goal(
        samples=known["--samples"],
        batch=int(known["--batch"]),
        noise_scale=math.inf if noise_scale is None else noise_scale,
        deadline_s=math.inf if deadline is None else parse_seconds(deadline),
        max_local_steps=max_local_steps,
    )
    advice = advise(Machine.read(machine), model, goal)
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(_as_dict(advice), indent=1))
    else:
        _show(advice, model)


def _facts(run: Path, target_loss: float | None) -> dict[str, float]:
    """Read what a run of ``hpctrain train`` says about its model and its way to a loss."""
    from hpctrain.core.records import read  # noqa: PLC0415

    file = run / "metrics.jsonl"
    if not file.exists():
        raise ConfigError(f"{run} is no run directory: it has no {file.name}; give one that does")
    records = read(file)
    begun = [record for record in records if record["event"] in ("started", "resumed")]
    steps = [r for r in records if r["event"] == "step" and r["loss"] is not None]
    if not begun or not steps:
        raise ConfigError(f"{file} has no record of a step; let the run go on for a while first")
    ranks = begun[-1]["world_size"]
    times = ("compute_s", "communication_s", "input_s")
    # The mean over the steps of a record; the last step of an epoch may be short.
    batch = max(round(r["samples_per_s"] * sum(r[t] for t in times)) for r in steps)
    share = batch / ranks
    return {
        "--parameters": begun[-1]["parameters"],
        "--samples-per-s": share / statistics.median(r["compute_s"] for r in steps),
        "--rank-batch": math.ceil(share),
        "--batch": batch,
        "--samples": _steps_to(target_loss, records, run) * batch,
    }


def _steps_to(target: float | None, records: list[dict[str, Any]], run: Path) -> float:
    """Return after how many steps a run has reached a loss, in its tests if it has any."""
    steps, tests = (
        [r for r in records if r["event"] == event and r["loss"] is not None]
        for event in ("step", "test")
    )
    if target is None:
        return float(steps[-1]["step"])
    reached = [record["step"] for record in tests or steps if record["loss"] <= target]
    if not reached:
        least = min(record["loss"] for record in tests or steps)
        raise ConfigError(
            f"{run} has not reached a loss of {target:g}, its least is {least:.4g}; give a loss "
            f"that it has reached, or --samples"
        )
    return float(reached[0])


def _as_dict(advice: "Advice") -> dict[str, Any]:
    return {
        "best": _candidate(advice.best),
        "reason": advice.reason,
        "pays_up_to_nodes": advice.pays_up_to,
        "next": [_candidate(one) for one in advice.next_best],
        "by_nodes": [_candidate(one) for one in advice.by_nodes],
    }


def _candidate(one: "Candidate") -> dict[str, Any]:
    every_s = one.checkpoint_every_s
    return {
        "nodes": one.nodes,
        "batch": one.batch,
        **asdict(one.way),
        "local_steps": one.local_steps,
        "checkpoint_every_s": every_s if math.isfinite(every_s) else None,
        "steps": one.num_steps,
        **asdict(one.step),
        "efficiency": one.step.efficiency,
        "goodput": one.goodput,
        "seconds": one.seconds,
        "node_hours": one.node_hours,
    }


def _show(advice: "Advice", model: "Model") -> None:
    from hpctrain.core.units import format_seconds  # noqa: PLC0415
    from hpctrain.cost.collectives import allreduce, bound  # noqa: PLC0415
    from hpctrain.train.console import make_console  # noqa: PLC0415

    console, best = make_console(shown=True), advice.best
    console.print(_table("the best on each number of nodes, predicted", advice.by_nodes, best))
    console.print(_table(f"best: {advice.reason}", (best, *advice.next_best), best))
    stop = f"stop paying beyond {advice.pays_up_to}: twice as many save less than a quarter"
    if advice.pays_up_to == advice.by_nodes[-1].nodes:
        stop = f"might pay: up to {advice.pays_up_to} twice as many save a quarter of the time"
    machine, num_bytes = best.machine, model.num_bytes
    sum_s = allreduce(machine, num_bytes, best.way).seconds(machine)
    least_s = bound(machine, num_bytes).seconds(machine)
    rows = [
        ("more nodes", stop),
        ("all gradients", f"summed in {format_seconds(sum_s)} by {best.way}, not hidden at all"),
        ("", f"in float32 no way takes less than {format_seconds(least_s)} (bound)"),
        ("checkpoints", f"every {format_seconds(best.checkpoint_every_s)} of computing (Daly)"),
    ]
    if math.isinf(best.checkpoint_every_s):
        rows[-1] = ("checkpoints", "as you like: the machine file has no mtbf_s, so nothing fails")
    if best.local_steps > 1:
        rows.append(
            ("H > 1", "local SGD; a law for convex losses says that it learns as fast: try")
        )
    for name, text in rows:
        console.print(f"{name:14} {text}", soft_wrap=True)


def _table(title: str, rows: "Sequence[Candidate]", best: "Candidate") -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title, title_justify="left")
    for head in ("", "nodes", "batch", "codec", "H", "step", "efficiency"):
        table.add_column(head, justify="right")
    for head in ("goodput", "time", "node-hours"):
        table.add_column(head, justify="right")
    for one in rows:
        table.add_row(
            "*" if one == best else "",
            *(str(one.nodes), str(one.batch), one.way.codec, str(one.local_steps)),
            *(_time(one.step.total_s), f"{one.step.efficiency:.0%}"),
            *(f"{one.goodput:.1%}", _time(one.seconds), f"{one.node_hours:.4g}"),
        )
    return table


def _time(seconds: float) -> str:
    from hpctrain.core.units import format_seconds  # noqa: PLC0415

    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else format_seconds(seconds)
