"""The part of ``hpctrain plan`` that lays a model larger than a rank over ranks."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import format_seconds

if TYPE_CHECKING:
    from hpctrain.cost.layout_search import LayoutAdvice, LayoutChoice
    from hpctrain.cost.machine import Machine
    from hpctrain.cost.transformer import Transformer

BATCH_OF_RANK = 8  # samples, where nobody says how many a step takes
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")
GOAL = (
    *("run", "samples", "samples_per_s", "rank_batch", "target_loss", "noise_scale"),
    *("gradient_norms", "deadline", "codec"),
)
BOTH = ("machine", "parameters", "batch", "max_local_steps", "as_json")
"""Options of a goal, and those that say nothing of what is asked."""


def asks_for_layouts(asked: dict[str, Any]) -> bool:
    """Say what options of ``hpctrain plan`` ask for; ``ConfigError``: for both, or for nothing."""
    given = {name for name, value in asked.items() if value is not None}
    goal, layout = given & {*GOAL}, given - {*GOAL, *BOTH}
    names = [f"--{name.replace('_', '-')}" for name in (*sorted(goal - {"run"}), *sorted(layout))]
    names = ["a run directory"] * ("run" in goal) + names
    if bool(goal) == bool(layout) and (goal or "parameters" not in given):
        raise ConfigError(
            f"a plan is for a goal (a run directory, or --samples) or for a layout (--params or "
            f"--model on --nodes), got {', '.join(names) or 'neither'}; ask for one"
        )
    return not goal


def plan_layouts(asked: dict[str, Any], *, as_json: bool) -> None:
    """Print the fastest layouts of a model; ``asked`` has the options of the command by name."""
    from hpctrain.cost.layout_search import LayoutRules, best_layouts  # noqa: PLC0415

    names = [name for name, _ in asked["fix"] or ()]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(
            f"--fix settles a name once, got {', '.join(twice)} twice; leave one out"
        )
    if (memory := asked["memory"]) is not None and memory < 2**20:
        raise ConfigError(
            f"--memory of a GPU is a number with a unit, at least 1 MiB, got {memory} bytes; say "
            f"{memory}GB"
        )
    machine = _machine(asked)
    model, guessed = _model(asked)
    rules = LayoutRules(
        batch=asked["batch"] or BATCH_OF_RANK * machine.num_ranks,
        fixed=dict(asked["fix"] or ()),
        tp_across_nodes=bool(asked["tp_across_nodes"]),
    )
    advice = best_layouts(machine, model, rules)
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(_as_dict(advice, machine, model, rules.batch), indent=1))
        return
    sizes = ", ".join(f"{name} {getattr(model, name)}" for name in SIZES)
    where = "" if asked["machine"] else "; assumed, a file for --machine says better"
    typer.echo(
        f"model    {model.parameters:,.0f} parameters: {sizes}"
        f"{'; assumed: ' * bool(guessed)}{', '.join(guessed)}\n"
        f"state    {_size(model.state_bytes * model.parameters)}: {model.state_bytes:g} bytes per "
        f"parameter (itself {model.parameter_bytes:g}, gradient {model.gradient_bytes:g}, "
        f"optimizer {model.optimizer_bytes:g})\n"
        f"machine  {machine.nodes} x {machine.ranks_per_node} GPUs of "
        f"{_size(machine.memory_bytes)}, {_size(rules.limit(machine))} of it for what is counted, "
        f"{machine.flops_per_s / 1e12:.4g} Tflop/s reached\n"
        f"links    {machine.node.bytes_per_s / 1e9:.4g} GB/s from GPU to GPU inside a node, "
        f"{machine.nics} x {machine.network.bytes_per_s / 1e9:.4g} GB/s between nodes{where}\n"
        f"batch    {rules.batch} samples{'' if asked['batch'] else ', assumed: --batch'}\n"
    )
    _show(advice, machine, rules.batch)


def _machine(asked: dict[str, Any]) -> "Machine":
    from hpctrain.cost.machine import Link, Machine  # noqa: PLC0415

    nodes, local = asked["nodes"], asked["gpus_per_node"]
    given = {"nodes": nodes, "ranks_per_node": local, "flops_per_s": asked["flops"]}
    given |= {"memory_bytes": asked["memory"]}
    if asked["machine"] is not None:
        machine = Machine.read(asked["machine"])
    elif nodes is None or local is None:
        raise ConfigError(
            f"a layout is for nodes with GPUs, got {nodes or 'no'} nodes with {local or 'no'} "
            f"GPUs; give --nodes and --gpus-per-node, or --machine with a file"
        )
    else:  # as machines with NVLink and InfiniBand are
        nics = max(1, local // 2)
        machine = Machine(node=Link(3e-6, 250e9), network=Link(5e-6, 25e9), nics=nics)
    return replace(machine, **{name: value for name, value in given.items() if value is not None})


def _model(asked: dict[str, Any]) -> tuple["Transformer", list[str]]:
    """Return the model, and the names of sizes that nobody has given."""
    from hpctrain.cost.transformer import Transformer  # noqa: PLC0415

    found: dict[str, Any] = {}
    if asked["model"] is not None:
        from hpctrain.core.target import make_importable  # noqa: PLC0415
        from hpctrain.train.model_sizes import sizes_of  # noqa: PLC0415

        make_importable(Path.cwd())
        found = sizes_of(asked["model"])
    names = (*SIZES, "parameters", "fused_attention")
    found |= {name: asked[name] for name in names if asked[name] is not None}
    guessed = [name for name in names[:-1] if name not in found]
    unseen = [f"--{name}" for name in ("layers", "hidden", "heads") if name in guessed]
    if asked["model"] is not None and unseen:
        raise ConfigError(
            f"a model is laid out by its sizes, of which {asked['model']} does not show all; give "
            f"{', '.join(unseen)} too"
        )
    return Transformer.of(**found), guessed


def _as_dict(
    advice: "LayoutAdvice", machine: "Machine", model: "Transformer", batch: int
) -> dict[str, Any]:
    def told(one: "LayoutChoice") -> dict[str, Any]:
        found: dict[str, Any] = {"memory_bytes": one.memory, "terms_s": one.terms}
        found = {name: each._asdict() for name, each in (found | {"load": one.load}).items()}
        totals = {"rank_bytes": sum(one.memory), "step_s": sum(one.terms), "bubble": one.bubble}
        return asdict(one.layout) | totals | found

    finite = {name: value for name, value in asdict(machine).items() if value != math.inf}
    counts = ("num_meshes", "num_layouts", "broken", "lost")
    return {
        "model": asdict(model) | {"state_bytes": model.state_bytes * model.parameters},
        "machine": finite,
        "batch": batch,
        "best": [told(one) for one in advice.best],
    } | {name: getattr(advice, name) for name in counts}


def _show(advice: "LayoutAdvice", machine: "Machine", batch: int) -> None:
    from hpctrain.train.console import figures, make_console  # noqa: PLC0415

    console = make_console(shown=True)
    plans, fills, times = [], [], []
    for number, one in enumerate(advice.best, 1):
        layout, total_s = one.layout, sum(one.terms)
        stages = f"{layout.pp}{f'x{layout.virtual}' * (layout.virtual > 1)}"
        stages += " z" * (layout.schedule == "zero_bubble")
        axes = map(str, (layout.tp, stages, layout.dp, layout.cp, layout.zero))
        pieces = f"{batch // (layout.dp * layout.micro_batch)} x {layout.micro_batch}"
        sent = _size(one.load.node_bytes), _size(one.load.network_bytes)
        shown = (pieces, layout.recompute, f"{one.bubble:.1%}", *sent, format_seconds(total_s))
        plans.append((str(number), *axes, *shown))
        fills.append((str(number), *map(_size, one.memory), _size(sum(one.memory))))
        rate = one.terms.compute_s / total_s * machine.flops_per_s
        shares = (f"{each / total_s:.1%}" if each else "" for each in one.terms)
        times.append((str(number), *shares, f"{rate / 1e12:.3g}"))
    title = "the best layouts, predicted; bytes through a link in a node and a card between nodes"
    heads = ("", "tp", "pp", "dp", "cp", "zero", "batches", "recompute", "bubble")
    parts = (name.removesuffix("_s") for name in advice.best[0].terms._fields)
    console.print(figures(title, (*heads, "in node", "between", "step"), plans))
    memory = ("", *advice.best[0].memory._fields, "in all")
    console.print(figures("memory of the fullest rank", memory, fills))
    console.print(figures("where the time of a step goes", ("", *parts, "Tflop/s"), times))
    orders = "pp: ranks x stages of each; z: schedule zero_bubble, else one forward, one backward"
    lines = [orders] * any(one.layout.pp > 1 for one in advice.best)
    lines += [f"why the other layouts lost, of {advice.num_layouts}:"]
    lines += [f"{number:8}  {reason}" for reason, number in advice.lost.items()]
    if advice.broken:
        lines += [f"and of {advice.num_meshes} ways to divide {machine.num_ranks} ranks:"]
        lines += [f"{number:8}  {rule}" for rule, number in advice.broken.items()]
    console.print("\n".join(lines), soft_wrap=True)


def _size(num_bytes: float) -> str:
    """Write bytes in decimal units, in which the papers count."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
