"""Six layouts of ``examples/lm``: predicted and measured times of a step.

    hpctrain launch -n 4 -- python perf/bench_layouts.py [--json FILE] [--rounds N] [--width N]

First the program measures the machine, with all ranks concurrently: forward and backward of the
batch of a replica and of a single sample, which give the time of arithmetic and the overhead; the
additional time of a step with tensor parallel layers; and all-reduces of 64 bytes and 4 MiB by
torch.distributed. The results form a machine file, with the number of ranks per core, from which
``hpctrain plan`` predicts the steps. Then the layouts train on random bytes, interleaved. A step
is forward, backward and their communication, without gradient clipping and AdamW, which the plan
does not include.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from measure import arguments, interleave, median, report
from mpi4py import MPI
from torch.distributed.tensor.parallel import loss_parallel

from hpctrain.core.units import MIB
from hpctrain.cost.layout_cost import ParallelLayout, Placed
from hpctrain.cost.machine import Machine
from hpctrain.cost.transformer import Transformer
from hpctrain.parallel import build_mesh
from hpctrain.runtime.world import current

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/lm"))
import model as lm
import train

LAYOUTS = {
    "replicas": ("", {"dp": 4}),
    "shards": ("--fsdp", {"dp": 4, "zero": 3}),
    "tp 2, shards": ("--tp 2 --sequence --fsdp", {"tp": 2, "dp": 2, "zero": 3}),
    "pp 4": ("--pp 4", {"pp": 4}),
    "tp 2, pp 2": ("--tp 2 --pp 2", {"tp": 2, "pp": 2}),
    "cp 2, shards": ("--cp 2 --fsdp", {"cp": 2, "dp": 2, "zero": 3}),
}
"""Options of the example, and what the plan calls them."""
Step = Callable[[], None]


def step_of(words: str, given: Namespace) -> Step:
    """Return a function that runs a step of the example in a layout."""
    sizes = f"--width {given.width} --length {given.length} --batch {given.batch}"
    options = train.options_of([*sizes.split(), *words.split()])
    mesh = build_mesh(tp=options.tp, pp=options.pp, cp=options.cp)
    torch.manual_seed(0)
    shape = {"width": options.width, "depth": options.depth, "num_heads": options.heads}
    trainer = train.parallel(lm.Transformer(**shape), mesh, options)
    windows = torch.randint(256, (options.batch, options.length + 1))
    windows = windows.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    part = mesh["cp"].size(), mesh["cp"].get_local_rank()
    mine = [x.chunk(part[0], 1)[part[1]] for x in (windows[:, :-1], windows[:, 1:])]

    def step() -> None:
        trainer.model.zero_grad()
        with loss_parallel():
            trainer.step(*mine)

    return step


def transformer(given: Namespace) -> Transformer:
    """Return the model of the example for the plan, in float32 with the moments of Adam."""
    shape = {"layers": train.options_of([]).depth, "hidden": given.width, "sequence": given.length}
    built = lm.Transformer(width=given.width)
    return Transformer(
        parameters=float(sum(p.numel() for p in built.parameters())),
        heads=train.options_of([]).heads, vocabulary=lm.NUM_BYTES, tied=False,
        fused_attention=True, parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0,
        **shape,
    )  # fmt: skip


def measured_machine(given: Namespace, model: Transformer) -> str:
    """Return the text of a machine file, from rates measured on all ranks concurrently."""
    topology, size = current().topology, dist.get_world_size()
    per_core = max(1.0, len(topology.core_peers) / topology.num_peer_cores)
    net = lm.Transformer(width=given.width)
    windows = torch.randint(256, (given.batch // size, given.length + 1))
    few = Namespace(**vars(given) | {"batch": size})

    def compute(some: torch.Tensor) -> Step:
        return lambda: train.loss_of(net(some[:, :-1]), some[:, 1:]).backward()

    def summed(num_bytes: int) -> Step:
        tensor = torch.zeros(num_bytes // 4)
        return lambda: dist.all_reduce(tensor)

    variants = {"batch": compute(windows), "sample": compute(windows[:1])}
    variants |= {"small": summed(64), "large": summed(4 * MIB), "shards": step_of("--fsdp", few)}
    variants["tensor"] = step_of("--tp 2 --sequence --fsdp", few)
    found = interleave(variants, rounds=given.rounds, repetitions=5)
    times = {name: median(seconds) for name, seconds in found.items()}
    sample_flops = 3 * (model.layers * model.layer_flops + model.output_flops)
    sample_s = (times["batch"] - times["sample"]) / (len(windows) - 1)
    passes = 3 * model.layers * per_core
    pass_s = max(0.0, times["sample"] - sample_s) / passes
    tensor_pass_s = max(0.0, times["tensor"] - times["shards"]) / passes
    # Down and up a tree, as the plan counts: all bytes but those of the rank are sent twice.
    rounds, moved = 2 * (size - 1).bit_length(), 2 * (size - 1) / size * 4 * MIB
    rate = moved / max(times["large"] - times["small"], 1e-9)
    return (
        f"nodes = 1\nranks_per_node = {size}\nranks_per_core = {per_core}\n"
        f"memory_bytes = 4e9\nflops_per_s = {per_core * sample_flops / sample_s:.4g}\n"
        f"pass_s = {pass_s:.3g}\ntensor_pass_s = {tensor_pass_s:.3g}\n"
        f"[node]\nlatency_s = {times['small'] / rounds:.3g}\nbytes_per_s = {rate:.4g}\n"
    )


def predicted(machine: Machine, model: Transformer, axes: dict[str, int], batch: int) -> float:
    """Return the predicted seconds of a step, with the micro-batches of the example."""
    pieces = 2 * axes["pp"] if "pp" in axes else 1
    layout = ParallelLayout(**axes, micro_batch=batch // axes.get("dp", 1) // pieces)
    return sum(Placed(machine, model, layout, batch).terms(layout))


def agreement(one: list[float], other: list[float]) -> float:
    """Return Kendall's tau: the pairs in equal order minus the other pairs, over all pairs."""
    pairs = [*combinations(range(len(one)), 2)]
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def main() -> None:
    """Measure, predict, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    build_mesh()
    if dist.get_world_size() != 4:
        raise SystemExit("the layouts must run on 4 ranks: hpctrain launch -n 4")
    model = transformer(given)
    text = MPI.COMM_WORLD.bcast(measured_machine(given, model))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        file.write_text(text)
        machine = Machine.read(file)
    steps = {name: step_of(words, given) for name, (words, _) in LAYOUTS.items()}
    found = interleave(steps, rounds=given.rounds, repetitions=3)
    predictions = {
        name: predicted(machine, model, axes, given.batch) for name, (_, axes) in LAYOUTS.items()
    }
    times = {name: median(seconds) for name, seconds in found.items()}
    places = [
        {name: sorted(each, key=each.get).index(name) + 1 for name in each}
        for each in (predictions, times)
    ]
    rows = [
        {
            "layout": name,
            "options": LAYOUTS[name][0],
            "predicted ms": 1e3 * predictions[name],
            "measured ms": 1e3 * times[name],
            "fastest ms": 1e3 * min(found[name]),
            "predicted place": places[0][name],
            "measured place": places[1][name],
        }
        for name in LAYOUTS
    ]
    ratios = {
        "Kendall's tau of the order": agreement([*predictions.values()], [*times.values()]),
        **{f"measured / predicted, {name}": times[name] / predictions[name] for name in LAYOUTS},
    }
    if dist.get_rank() == 0:
        sys.stdout.write(f"the machine as measured:\n{text}\n")
    report("layouts of examples/lm on 4 ranks", rows, ratios, given.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
