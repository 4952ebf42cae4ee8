"""Layouts of ``hpctrain plan``: division of a model larger than a GPU among ranks."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpctrain.cli.options import AsJson, option, show_json
from hpctrain.core import target
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import format_seconds, parse_number, parse_size
from hpctrain.cost import control, layout_search, transformer
from hpctrain.cost import machine as machines
from hpctrain.train import console, model_sizes

if TYPE_CHECKING:
    from hpctrain.cost.layout_search import LayoutAdvice, LayoutChoice
    from hpctrain.cost.machine import Machine
    from hpctrain.cost.transformer import Transformer

BATCH_OF_RANK = 8  # samples per step on each rank, if --batch is not given
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")


def _fixed(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def _layout(metavar: str, text: str, *names: str, **settings: Any) -> Any:
    return option(None, metavar, text, *names, rich_help_panel="Layouts", **settings)


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Options of ``hpctrain plan`` for goals and for layouts."""

    machine: Path | None = option(
        None, "FILE", "Machine as TOML: hpctrain guide plan.", "--machine"
    )
    parameters: float | None = option(
        None,
        "N",
        "Parameters of the model, such as 25.6M or 7e9.",
        "--parameters",
        "--params",
        parser=parse_number,
        shown="of the run or the model",
    )
    batch: int | None = option(
        None, "N", "Samples of a step, over all ranks.", shown="of the run", min=1
    )
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(SharedOptions):
    """Options of ``hpctrain plan`` for a layout."""

    nodes: int | None = _layout("N", "Nodes.", shown="of the machine file", min=1)
    gpus_per_node: int | None = _layout(
        "N", "GPUs of each node, one rank each.", shown="of the machine file", min=1
    )
    memory: int | None = _layout("40GB", "Memory of a GPU.", parser=parse_size, shown="80 GB")
    flops: float | None = _layout(
        "150T",
        "Floating-point operations per second that a GPU reaches.",
        parser=parse_number,
        shown="of the machine file, 150T",
    )
    model: str | None = _layout(
        "MODULE:FUNCTION", "Function that builds the model; only its sizes are used."
    )
    layers: int | None = _layout("N", "Layers.", shown="from --parameters", min=1)
    hidden: int | None = _layout("N", "Hidden size.", shown="from --parameters", min=1)
    heads: int | None = _layout("N", "Attention heads.", shown="from --hidden", min=1)
    sequence: int | None = _layout("N", "Tokens of a sample.", shown="2048", min=1)
    vocabulary: int | None = _layout("N", "Tokens of the vocabulary.", shown="51200", min=1)
    fused_attention: bool | None = _layout(
        "", "Attention does not store its scores.", "--fused-attention", shown="off"
    )
    fix: list[Any] | None = _layout(
        "tp=8",
        "Fix tp, pp, dp, cp, zero, micro_batch, recompute, virtual or schedule; may be repeated.",
        parser=_fixed,
    )
    tp_across_nodes: bool | None = _layout(
        "", "Allow tp groups that span nodes.", "--tp-across-nodes", shown="off"
    )

    def of_machine(self) -> "Machine":
        """Return the machine of --machine, or a default machine, changed by other options."""
        given: dict[str, Any] = {
            "nodes": self.nodes,
            "ranks_per_node": self.gpus_per_node,
            "flops_per_s": self.flops,
            "memory_bytes": self.memory,
        }
        if self.machine is not None:
            machine = machines.Machine.read(self.machine)
        elif self.nodes is None or self.gpus_per_node is None:
            raise ConfigError(
                f"a layout must have nodes with GPUs, got {self.nodes or 'no'} nodes with "
                f"{self.gpus_per_node or 'no'} GPUs; give --nodes and --gpus-per-node, or "
                f"--machine with a file"
            )
        else:  # assume NVLink in a node and InfiniBand between nodes
            node, network = machines.Link(3e-6, 250e9), machines.Link(5e-6, 25e9)
            nics = max(1, self.gpus_per_node // 2)
            machine = machines.Machine(node=node, network=network, nics=nics)
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(machine, **changes)

    def of_model(self) -> tuple["Transformer", list[str]]:
        """Return the model, and the names of the sizes that were estimated."""
        found: dict[str, Any] = {}
        if self.model is not None:
            target.make_importable(Path.cwd())
            found = model_sizes.sizes_of(self.model)
        names = (*SIZES, "parameters", "fused_attention")
        given = {name: getattr(self, name) for name in names}
        found |= {name: value for name, value in given.items() if value is not None}
        guessed = [name for name in names[:-1] if name not in found]
        unseen = [f"--{name}" for name in ("layers", "hidden", "heads") if name in guessed]
        if self.model is not None and unseen:
            raise ConfigError(
                f"a layout must have the sizes of the model, which {self.model} does not show "
                f"completely; give {', '.join(unseen)} too"
            )
        return transformer.Transformer.of(**found), guessed

    def of_fixed(self) -> dict[str, int | str]:
        """Return the layout fields that ``--fix`` sets, as a dict from name to value."""
        names = [name for name, _ in self.fix or ()]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(
                f"--fix must give a name once, got {', '.join(twice)} twice; omit one value"
            )
        return dict(self.fix or ())


def plan_layouts(options: LayoutOptions) -> None:
    """Print the fastest layouts of a model."""
    fixed = options.of_fixed()
    machine = options.of_machine()
    model, guessed = options.of_model()
    rules = layout_search.LayoutRules(
        batch=options.batch or BATCH_OF_RANK * machine.num_ranks,
        fixed=fixed,
        tp_across_nodes=bool(options.tp_across_nodes),
    )
    advice = layout_search.best_layouts(machine, model, rules)
    if options.as_json:
        show_json(_as_dict(advice, machine, model, rules.batch))
        return
    sizes = ", ".join(f"{name} {getattr(model, name)}" for name in SIZES)
    where = "" if options.machine else "; assumed: --machine FILE sets them"
    typer.echo(
        f"model    {model.parameters:,.0f} parameters: {sizes}"
        f"{'; assumed: ' * bool(guessed)}{', '.join(guessed)}\n"
        f"state    {_size(model.state_bytes * model.parameters)}: {model.state_bytes:g} bytes per "
        f"parameter (itself {model.parameter_bytes:g}, gradient {model.gradient_bytes:g}, "
        f"optimizer {model.optimizer_bytes:g})\n"
        f"machine  {machine.nodes} x {machine.ranks_per_node} GPUs with "
        f"{_size(machine.memory_bytes)}, of which {_size(rules.limit(machine))} for the items "
        f"below, {machine.flops_per_s / 1e12:.4g} Tflop/s reached\n"
        f"links    {machine.node.bytes_per_s / 1e9:.4g} GB/s between GPUs of a node, "
        f"{machine.nics} x {machine.network.bytes_per_s / 1e9:.4g} GB/s between nodes{where}\n"
        f"batch    {rules.batch} samples{'' if options.batch else ', assumed: --batch sets it'}\n"
    )
    _show(advice, machine, rules.batch)


def control_of(machine: "Machine") -> dict[str, dict[str, float]]:
    """Return the messages of all ranks and the seconds of each control operation.

    Control operations send no gradients; an example is the start-up.
    """
    return {
        name: {"messages": part.messages(machine), "seconds": part.seconds(machine)}
        for name, part in control.PARTS.items()
    }


def control_texts(machine: "Machine") -> list[str]:
    """Return a line for each control operation in ``control_of``."""
    return [
        f"{name}: {part['messages'] / machine.num_ranks:.3g} messages per rank, "
        f"{format_seconds(part['seconds'])}"
        for name, part in control_of(machine).items()
    ]


def _as_dict(
    advice: "LayoutAdvice", machine: "Machine", model: "Transformer", batch: int
) -> dict[str, Any]:
    def described(one: "LayoutChoice") -> dict[str, Any]:
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
        "control": control_of(machine),
        "best": [described(one) for one in advice.best],
    } | {name: getattr(advice, name) for name in counts}


def _show(advice: "LayoutAdvice", machine: "Machine", batch: int) -> None:
    screen, figures = console.make_console(shown=True), console.figures
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
    title = "the best layouts, predicted; bytes per link in a node and per adapter between nodes"
    heads = ("", "tp", "pp", "dp", "cp", "zero", "batches", "recompute", "bubble")
    parts = (name.removesuffix("_s") for name in advice.best[0].terms._fields)
    screen.print(figures(title, (*heads, "in node", "between", "step"), plans))
    memory = ("", *advice.best[0].memory._fields, "total")
    screen.print(figures("memory of the fullest rank", memory, fills))
    screen.print(figures("shares of the time of a step", ("", *parts, "Tflop/s"), times))
    orders = "pp: ranks x stages of each; z: schedule zero_bubble, else 1F1B"
    lines = [orders] * any(one.layout.pp > 1 for one in advice.best)
    lines += [f"why the other layouts of {advice.num_layouts} are slower or impossible:"]
    lines += [f"{number:8}  {reason}" for reason, number in advice.lost.items()]
    if advice.broken:
        lines += [f"and of {advice.num_meshes} divisions of {machine.num_ranks} ranks:"]
        lines += [f"{number:8}  {rule}" for rule, number in advice.broken.items()]
    lines += [f"control  {text}" for text in control_texts(machine)]
    screen.print("\n".join(lines), soft_wrap=True)


def _size(num_bytes: float) -> str:
    """Return a text for a number of bytes, with decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
