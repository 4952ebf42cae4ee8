"""``hpctrain plan``: what reaches a goal, or how a large model lies on ranks; models of cost."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.layouts import asks_for_layouts, plan_layouts
from hpctrain.cli.options import AsJson, argument, option
from hpctrain.core.errors import ConfigError
from hpctrain.core.records import finite
from hpctrain.core.units import format_seconds, parse_bytes, parse_number, parse_seconds

if TYPE_CHECKING:
    from hpctrain.cost.planner import Advice, Candidate
    from hpctrain.cost.step import Model


def _norms(text: str) -> tuple[float, float]:
    batch, _, norm = text.partition(":")
    return parse_number(batch), parse_number(norm)


def _fixed(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def _layout(metavar: str, text: str, *names: str, **settings: Any) -> Any:
    return option(metavar, text, *names, rich_help_panel="Layouts", **settings)


def plan(  # noqa: PLR0913 - a command's options
    run: Annotated[
        Path | None,
        argument(
            "RUN_DIRECTORY", "A run of hpctrain train: its parameters, speed, batch and loss."
        ),
    ] = None,
    *,
    machine: Annotated[
        Path | None, option("FILE", "Machine in TOML: hpctrain guide plan.", "--machine")
    ] = None,
    parameters: Annotated[
        float | None,
        option("N", "Of the model: 25.6M, 7e9.", "--parameters", "--params", parser=parse_number),
    ] = None,
    samples_per_s: Annotated[
        float | None, option("R", "Samples a second of one rank.", parser=parse_number)
    ] = None,
    rank_batch: Annotated[
        int | None, option("N", "Samples that a rank takes at once.", default="32", min=1)
    ] = None,
    batch: Annotated[int | None, option("N", "Samples of a step, over all ranks.", min=1)] = None,
    samples: Annotated[
        float | None,
        option("N", "Samples to learn from until the goal, in such batches.", parser=parse_number),
    ] = None,
    target_loss: Annotated[
        float | None, option("LOSS", "The goal, where the run has reached it.")
    ] = None,
    noise_scale: Annotated[
        float | None,
        option(
            "N",
            "Gradient noise scale in samples: other batches are tried too.",
            parser=parse_number,
        ),
    ] = None,
    gradient_norms: Annotated[
        tuple[Any, Any] | None,
        option(
            "B1:N1 B2:N2",
            "Instead of it: batches and mean squared norms of gradients.",
            parser=_norms,
        ),
    ] = None,
    deadline: Annotated[
        str | None, option("TIME", "Least node-hours within such as 12h or 2d.")
    ] = None,
    max_local_steps: Annotated[
        int, option("H", "Most steps between two averagings; 1: none.", min=1)
    ] = 8,
    codec: Annotated[
        list[str] | None, option("NAME:BYTES:SECONDS", "One more: of an element, and for a byte.")
    ] = None,
    nodes: Annotated[int | None, _layout("N", "Nodes; else of the machine file.", min=1)] = None,
    gpus_per_node: Annotated[int | None, _layout("N", "GPUs of each: a rank each.", min=1)] = None,
    memory: Annotated[int | None, _layout("40GB", "Of a GPU.", parser=parse_bytes)] = None,
    flops: Annotated[
        float | None, _layout("150T", "Operations a second that it reaches.", parser=parse_number)
    ] = None,
    model: Annotated[
        str | None, _layout("MODULE:FUNCTION", "Makes the model: its sizes, without memory.")
    ] = None,
    layers: Annotated[int | None, _layout("N", "Layers.", min=1)] = None,
    hidden: Annotated[int | None, _layout("N", "Elements of a token.", min=1)] = None,
    heads: Annotated[int | None, _layout("N", "Heads of attention.", min=1)] = None,
    sequence: Annotated[int | None, _layout("N", "Tokens of a sample: 2048.", min=1)] = None,
    vocabulary: Annotated[int | None, _layout("N", "Words: 51200.", min=1)] = None,
    fused_attention: Annotated[
        bool | None, _layout("", "Attention keeps no scores.", "--fused-attention")
    ] = None,
    fix: Annotated[
        list[Any] | None,
        _layout(
            "tp=8",
            "Settle tp, pp, dp, cp, zero, micro_batch, recompute, virtual, schedule.",
            parser=_fixed,
        ),
    ] = None,
    tp_across_nodes: Annotated[
        bool | None, _layout("", "Let tp groups cross nodes.", "--tp-across-nodes")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what reaches a goal soonest, or how a model larger than a GPU lies on ranks.

    A goal is a run or samples to learn from: which nodes, batch, codec and local steps reach it,
    at what cost, and what each saves below which bandwidth. More nodes pay as long as twice as
    many save a quarter of the time.

    Without a goal: the five fastest ways to lay a transformer over ranks by tensor, pipeline, data
    and context parallelism, ZeRO, micro-batches and recomputation, with memory, bubble and bytes,
    and why the others lost. Times are predictions of closed forms with the figures of a machine
    file, not measurements; hpctrain guide plan says what they leave out.

    For instance:

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
    if asks_for_layouts(asked := locals()):
        plan_layouts(asked, as_json=as_json)
        return
    from hpctrain.cost.collectives import CODECS  # noqa: PLC0415
    from hpctrain.cost.learning import noise_scale as estimated  # noqa: PLC0415
    from hpctrain.cost.machine import Machine  # noqa: PLC0415
    from hpctrain.cost.planner import Goal, advise  # noqa: PLC0415
    from hpctrain.cost.step import Model  # noqa: PLC0415
    from hpctrain.train.metrics import learned  # noqa: PLC0415

    if target_loss is not None and run is None:
        raise ConfigError("--target-loss is read from a run: give its directory, or --samples")
    if machine is None:
        raise ConfigError("a goal is reached on a machine, got none; give --machine with a file")
    given = {
        "parameters": parameters,
        "samples_per_s": samples_per_s,
        "rank_batch": rank_batch,
        "batch": batch,
        "samples": samples,
    }
    known = {"rank_batch": 32} if run is None else learned(run, target_loss)
    known |= {name: value for name, value in given.items() if value is not None}
    if missing := given.keys() - known.keys():
        options = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in missing))
        raise ConfigError(
            f"a plan needs the model and the goal, and lacks {options}; give them, or the "
            f"directory of a run"
        )
    if gradient_norms is not None:
        if noise_scale is not None:
            raise ConfigError("--gradient-norms stand for --noise-scale, got both; leave one out")
        noise_scale = estimated(*gradient_norms)
    told = known.pop("noise_scale", math.inf)
    goal = Goal(
        samples=known.pop("samples"),
        batch=int(known.pop("batch")),
        noise_scale=told if noise_scale is None else noise_scale,
        deadline_s=math.inf if deadline is None else parse_seconds(deadline),
        max_local_steps=max_local_steps,
        codecs=(*CODECS, *(codec or ())),
    )
    trained = Model(**known)
    advice = advise(Machine.read(machine), trained, goal)
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(_as_dict(advice), indent=1))
    else:
        _show(advice, trained)


def _as_dict(advice: "Advice") -> dict[str, Any]:
    def told(one: "Candidate") -> dict[str, Any]:
        names = ("nodes", "batch", "local_steps", "checkpoint_every_s", "goodput", "seconds")
        found = {name: getattr(one, name) for name in (*names, "node_hours")}
        found |= asdict(one.way) | asdict(one.step)
        return finite(found | {"steps": one.num_steps, "efficiency": one.step.efficiency})

    return {
        "best": told(advice.best),
        "reason": advice.reason,
        "pays_up_to_nodes": advice.pays_up_to,
        "next": [told(one) for one in advice.next_best],
        "by_nodes": [told(one) for one in advice.by_nodes],
        "payoffs": [finite(asdict(one)) for one in advice.payoffs],
    }


def _show(advice: "Advice", model: "Model") -> None:
    from hpctrain.cost.collectives import allreduce, bound  # noqa: PLC0415
    from hpctrain.train.console import figures, make_console  # noqa: PLC0415

    console, best, machine = make_console(shown=True), advice.best, advice.best.machine

    def told(one: "Candidate") -> tuple[str, ...]:
        step = format_seconds(one.step.total_s), f"{one.step.efficiency:.0%}"
        plain = map(str, (one.nodes, one.batch, one.way.codec, one.local_steps))
        cost = format_seconds(one.seconds), f"{one.node_hours:.4g}"
        return ("*" if one == best else "", *plain, *step, f"{one.goodput:.1%}", *cost)

    heads = ("", "nodes", "batch", "codec", "H", "step", "efficiency", "goodput", "time")
    for title, rows in (
        ("the best on each number of nodes, predicted", advice.by_nodes),
        (f"best: {advice.reason}", (best, *advice.next_best)),
    ):
        console.print(figures(title, (*heads, "node-hours"), map(told, rows)))
    steps = [format_seconds(one.step.total_s) for one in advice.payoffs]
    pays = [
        (one.codec, str(one.local_steps), step, f"{one.saves:+.0%}", _bandwidth(one.pays_below))
        for one, step in zip(advice.payoffs, steps, strict=True)
    ]
    title = f"what pays on {best.nodes} nodes with a batch of {best.batch}, beside neither"
    console.print(figures(title, ("codec", "H", "step", "saves", "pays"), pays))
    stop = f"stop paying beyond {advice.pays_up_to}: twice as many save less than a quarter"
    if advice.pays_up_to == advice.by_nodes[-1].nodes:
        stop = f"might pay: up to {advice.pays_up_to} twice as many save a quarter of the time"
    num_bytes, every_s = model.num_bytes, best.checkpoint_every_s
    sum_s, least_s = (
        format_seconds(load.seconds(machine))
        for load in (allreduce(machine, num_bytes, best.way), bound(machine, num_bytes))
    )
    often = "as you like: the machine file has no mtbf_s, so nothing fails"
    if every_s < math.inf:
        often = f"every {format_seconds(every_s)} of computing (Daly)"
    lines = [
        ("more nodes", stop),
        ("all gradients", f"summed in {sum_s} by {best.way}, not hidden at all"),
        ("", f"in float32 no way takes less than {least_s} (bound)"),
        ("checkpoints", often),
    ]
    if best.local_steps > 1:
        lines += [("H > 1", "local SGD; a law for convex losses says that it learns as fast: try")]
    for name, text in lines:
        console.print(f"{name:14} {text}", soft_wrap=True)


def _bandwidth(bytes_per_s: float) -> str:
    if bytes_per_s in (0.0, math.inf):
        return "always" if bytes_per_s else "never"
    return f"below {bytes_per_s * 8 / 1e9:.3g} Gbit/s"
