"""``hpctrain plan``: predictions for a goal, or for a model larger than a GPU."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpctrain.cli.layouts import (
    LayoutOptions,
    SharedOptions,
    control_of,
    control_texts,
    plan_layouts,
)
from hpctrain.cli.options import aligned, argument, option, show_json, takes
from hpctrain.core.errors import ConfigError
from hpctrain.core.records import finite
from hpctrain.core.units import format_seconds, parse_number, parse_seconds
from hpctrain.cost import collectives, learning, planner, step
from hpctrain.cost import machine as machines
from hpctrain.train import console, metrics

if TYPE_CHECKING:
    from hpctrain.cost.planner import Advice, Candidate, Goal
    from hpctrain.cost.step import Model

app = typer.Typer()


def _norms(text: str) -> tuple[float, float]:
    batch, _, norm = text.partition(":")
    return parse_number(batch), parse_number(norm)


@dataclass(frozen=True, kw_only=True)
class GoalOptions(SharedOptions):
    """Options of ``hpctrain plan`` for a goal."""

    run: Path | None = argument(
        "RUN", "Directory of a run, which gives parameters, speed, batch and loss.", default=None
    )
    samples_per_s: float | None = option(
        None, "R", "Samples per second of one rank.", parser=parse_number, shown="of the run"
    )
    rank_batch: int | None = option(
        None, "N", "Samples that a rank processes at once.", shown="32", min=1
    )
    samples: float | None = option(
        None,
        "N",
        "Samples until the goal is reached, in batches of --batch.",
        parser=parse_number,
        shown="of the run",
    )
    target_loss: float | None = option(
        None, "LOSS", "Goal: a loss that the run has reached.", shown="the whole run"
    )
    noise_scale: float | None = option(
        None,
        "N",
        "Gradient noise scale in samples; other batch sizes are then tried too.",
        parser=parse_number,
        shown="of the run",
    )
    gradient_norms: tuple[Any, Any] | None = option(
        None,
        "B1:N1 B2:N2",
        "Two batch sizes, each with the mean squared norm of its gradients, for the noise scale.",
        parser=_norms,
    )
    deadline: str | None = option(None, "TIME", "Find the fewest node-hours within TIME: 12h, 2d.")
    max_local_steps: int = option(
        8,
        "H",
        "Most steps between two averagings of the parameters; 1 averages after every step.",
        min=1,
    )
    codec: list[str] | None = option(
        None,
        "NAME:BYTES:SECONDS",
        "Another codec: bytes per element, seconds per byte; may be repeated.",
    )

    def of_goal(self) -> tuple["Goal", "Model"]:
        """Return goal and model; values that the options omit are taken from the measured run."""
        if self.target_loss is not None and self.run is None:
            raise ConfigError(
                "--target-loss must be used with the directory of a run, got none; give RUN, or "
                "--samples"
            )
        names = ("parameters", "samples_per_s", "rank_batch", "batch", "samples")
        known: dict[str, Any] = {"rank_batch": 32}
        if self.run is not None:
            known = metrics.learned(self.run, self.target_loss)
        given = {name: getattr(self, name) for name in names}
        known |= {name: value for name, value in given.items() if value is not None}
        if missing := given.keys() - known.keys():
            options = ", ".join(sorted(map(_name, missing)))
            raise ConfigError(
                f"a plan must have the model and the goal, but {options} are missing; use these "
                f"options, or the directory of a run"
            )
        noise_scale, of_run = self.noise_scale, known.pop("noise_scale", math.inf)
        if self.gradient_norms is not None:
            if noise_scale is not None:
                raise ConfigError(
                    f"the noise scale must be given once, got --noise-scale {noise_scale} and "
                    f"--gradient-norms; omit one"
                )
            noise_scale = learning.noise_scale(*self.gradient_norms)
        goal = planner.Goal(
            samples=known.pop("samples"),
            batch=int(known.pop("batch")),
            noise_scale=of_run if noise_scale is None else noise_scale,
            deadline_s=math.inf if self.deadline is None else parse_seconds(self.deadline),
            max_local_steps=self.max_local_steps,
            codecs=(*collectives.CODECS, *(self.codec or ())),
        )
        return goal, step.Model(**known)


def _name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(GoalOptions, LayoutOptions):
    """Arguments and options of ``hpctrain plan``."""

    def is_for_layouts(self) -> bool:
        """Return True if a layout is requested, False if a goal is requested.

        Raises:
            ConfigError: both or neither are requested.
        """
        given = {each.name for each in fields(self) if getattr(self, each.name) is not None}
        shared = {each.name for each in fields(SharedOptions)} | {"max_local_steps"}
        goal = given & {each.name for each in fields(GoalOptions)} - shared
        layout = given & {each.name for each in fields(LayoutOptions)} - shared
        names = [*map(_name, sorted(goal - {"run"})), *map(_name, sorted(layout))]
        names = ["a run directory"] * ("run" in goal) + names
        if bool(goal) == bool(layout) and (goal or "parameters" not in given):
            raise ConfigError(
                f"a plan must be for a goal (a run directory, or --samples) or for a layout "
                f"(--params or --model on --nodes), got {', '.join(names) or 'neither'}; request "
                f"one of them"
            )
        return not goal


@app.command()
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict the fastest setup for a goal, or for a model larger than a GPU.

    For a goal, a run or a number of samples: the nodes, batch, codec and local steps that reach
    the goal first, the cost, and the bandwidth below which each codec is worthwhile. More nodes
    are worthwhile if doubling the number of nodes saves at least a quarter of the time.

    For a layout: the five fastest layouts of a transformer by tensor, pipeline, data and context
    parallelism, ZeRO, micro-batches and recomputation, with memory, bubble and bytes, and the
    reasons against all others. Times are predicted by formulas from the figures of a machine file;
    hpctrain guide plan lists the effects that the formulas omit.

    Examples:
      hpctrain plan runs/digits --machine machine.toml --target-loss 0.1

      hpctrain plan --machine machine.toml --parameters 25.6M --samples-per-s 250 --batch 4096
      --samples 115M

      hpctrain plan runs/digits --machine machine.toml --noise-scale 2000 --deadline 12h

      hpctrain plan runs/digits --machine machine.toml --gradient-norms 32:4.1 256:1.3 --json

      hpctrain plan runs/digits --machine machine.toml --codec int8:1:2e-10

      hpctrain plan --params 7.5e9 --nodes 8 --gpus-per-node 8 --batch 512

      hpctrain plan --params 70e9 --nodes 16 --gpus-per-node 4 --memory 40GB --fix tp=4

      hpctrain plan --model mine:model --machine machine.toml --sequence 4096 --json
    """
    if options.is_for_layouts():
        plan_layouts(options)
        return
    if options.machine is None:
        raise ConfigError("a plan for a goal must have a machine, got none; use --machine FILE")
    goal, trained = options.of_goal()
    advice = planner.advise(machines.Machine.read(options.machine), trained, goal)
    if options.as_json:
        show_json(_as_dict(advice))
    else:
        _show(advice, trained)


def _as_dict(advice: "Advice") -> dict[str, Any]:
    def described(one: "Candidate") -> dict[str, Any]:
        names = ("nodes", "batch", "local_steps", "checkpoint_every_s", "goodput", "seconds")
        found = {name: getattr(one, name) for name in (*names, "node_hours")}
        found |= asdict(one.spec) | asdict(one.step)
        return finite(found | {"steps": one.num_steps, "efficiency": one.step.efficiency})

    return {
        "best": described(advice.best),
        "reason": advice.reason,
        "pays_up_to_nodes": advice.pays_up_to,
        "next": [described(one) for one in advice.next_best],
        "by_nodes": [described(one) for one in advice.by_nodes],
        "payoffs": [finite(asdict(one)) for one in advice.payoffs],
        "control": control_of(advice.best.machine),
    }


def _show(advice: "Advice", model: "Model") -> None:
    screen, figures = console.make_console(shown=True), console.figures
    best, machine = advice.best, advice.best.machine

    def described(one: "Candidate") -> tuple[str, ...]:
        step = format_seconds(one.step.total_s), f"{one.step.efficiency:.0%}"
        plain = map(str, (one.nodes, one.batch, one.spec.codec, one.local_steps))
        cost = format_seconds(one.seconds), f"{one.node_hours:.4g}"
        return ("*" if one == best else "", *plain, *step, f"{one.goodput:.1%}", *cost)

    heads = ("", "nodes", "batch", "codec", "H", "step", "efficiency", "goodput", "time")
    for title, rows in (
        ("the best on each number of nodes, predicted", advice.by_nodes),
        (f"best: {advice.reason}", (best, *advice.next_best)),
    ):
        screen.print(figures(title, (*heads, "node-hours"), map(described, rows)))
    steps = [format_seconds(one.step.total_s) for one in advice.payoffs]
    pays = [
        (one.codec, str(one.local_steps), step, f"{one.saves:+.0%}", _bandwidth(one.pays_below))
        for one, step in zip(advice.payoffs, steps, strict=True)
    ]
    title = f"codecs and local steps on {best.nodes} nodes with a batch of {best.batch}"
    screen.print(figures(title, ("codec", "H", "step", "saves", "worthwhile"), pays))
    most = f"up to {advice.pays_up_to}"
    stop = f"worthwhile {most}: twice as many save less than a quarter of the time"
    if advice.pays_up_to == advice.by_nodes[-1].nodes:
        stop = f"more may be worthwhile: {most}, twice as many save a quarter of the time"
    num_bytes, every_s = model.num_bytes, best.checkpoint_every_s
    sum_s, least_s = (
        format_seconds(load.seconds(machine))
        for load in (
            collectives.allreduce(machine, num_bytes, best.spec),
            collectives.bound(machine, num_bytes),
        )
    )
    often = "at any interval: the machine file has no mtbf_s, so no failures are assumed"
    if every_s < math.inf:
        often = f"every {format_seconds(every_s)} of computing (Daly)"
    lines = [
        ("more nodes", stop),
        ("all gradients", f"reduced in {sum_s} by {best.spec}, without overlap"),
        ("", f"in float32 no algorithm takes less than {least_s} (bound)"),
        ("checkpoints", often),
    ]
    lines += [("control", text) for text in control_texts(machine)]
    if best.local_steps > 1:
        lines += [("H > 1", "local SGD; convergence is proven for convex losses: verify it")]
    typer.echo("\n".join(aligned(lines)))


def _bandwidth(bytes_per_s: float) -> str:
    if bytes_per_s in (0.0, math.inf):
        return "always" if bytes_per_s else "never"
    return f"below {bytes_per_s * 8 / 1e9:.3g} Gbit/s"
