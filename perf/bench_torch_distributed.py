"""torch.distributed with the backends hpctrain and gloo: all-reduces, steps of DDP and FSDP2.

    hpctrain launch -n 2 -- python perf/bench_torch_distributed.py [--json FILE] [--steps N]

Both backends are groups of the same ranks in the same processes, and their calls are interleaved.
Tensors are float32; a call of 8 bytes is the mean of 100 consecutive calls. The step is that of
``bench_step.py``: 24 x (Linear(1024) + ReLU), 25.2 M parameters, batch 32, SGD with momentum. DDP
has its defaults, and FSDP2 shards each Linear and the whole model. ``alone / hpctrain`` is the
time of a step without communication, on all ranks concurrently, divided by the time of the step:
the difference from 1 is communication that computation does not hide, and copies for the
communication.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from bench_step import MLP
from measure import arguments, interleave, median, report
from table import spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hpctrain
from hpctrain.core.units import KIB, MIB

SIZES = {"8 B": (8, 100), "64 KiB": (64 * KIB, 20), "64 MiB": (64 * MIB, 1)}
"""Of an all-reduce, and how many of them are one call."""

Group = dist.ProcessGroup


def all_reduces(num_bytes: int, count: int, group: Group) -> Callable[[], None]:
    """Sum a tensor several times."""
    tensor = torch.zeros(num_bytes // 4)

    def call() -> None:
        for _ in range(count):
            dist.all_reduce(tensor, group=group)

    return call


def ddp(group: Group) -> Callable[[], None]:
    """Return a step of DistributedDataParallel."""
    model = DistributedDataParallel(MLP.make_model(), process_group=group)
    optimizer = MLP.optimizer(model.parameters())
    return MLP.make_step(model, optimizer, optimizer.zero_grad)


def fsdp2(group: Group) -> Callable[[], None]:
    """Return a step with fully_shard (FSDP2)."""
    mesh, model = DeviceMesh.from_group(group, "cpu"), MLP.make_model()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = MLP.optimizer(model.parameters())
    return MLP.make_step(model, optimizer, optimizer.zero_grad)


def alone() -> Callable[[], None]:
    """Return a step without communication."""
    model = MLP.make_model()
    optimizer = MLP.optimizer(model.parameters())
    return MLP.make_step(model, optimizer, optimizer.zero_grad)


def main() -> None:
    """Measure both backends, interleaved, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="counted calls in each turn")
    options = parser.parse_args()
    hpctrain.init()
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain")
    size = dist.get_world_size()
    groups = {"hpctrain": dist.group.WORLD, "gloo": dist.new_group(range(size), backend="gloo")}
    cases: dict[str, tuple[Callable[[Group], Callable[[], None]], int]]
    cases = {name: (partial(all_reduces, *case), case[1]) for name, case in SIZES.items()}
    cases |= {"DDP": (ddp, 1), "FSDP2": (fsdp2, 1)}
    rows, ratios, spreads = [], {}, {}
    for case, (make, count) in cases.items():
        variants = {name: make(group) for name, group in groups.items()}
        variants |= {"alone": alone()} if case in ("DDP", "FSDP2") else {}
        found = interleave(variants, rounds=options.rounds, repetitions=options.steps)
        del variants
        name = f"gloo / hpctrain, {case}"
        ratios[name] = median(found["gloo"]) / median(found["hpctrain"])
        spreads[name] = spread(found["gloo"], found["hpctrain"], options.rounds)
        if without := found.pop("alone", []):
            for each, seconds in found.items():
                share = f"alone / {each}, {case}"
                ratios[share] = median(without) / median(seconds)
                spreads[share] = spread(without, seconds, options.rounds)
        rows.append({"what": case} | of_calls(found, count) | {"gloo / hpctrain": ratios[name]})
    report("torch.distributed", rows, ratios, options.json, spreads)
    dist.destroy_process_group()


def of_calls(found: dict[str, list[float]], count: int) -> dict[str, float]:
    """Return median and minimum microseconds of an operation; calls repeat it ``count`` times."""
    middle = {f"{name} us": median(times) / count * 1e6 for name, times in found.items()}
    least = {f"{name} fastest": min(times) / count * 1e6 for name, times in found.items()}
    return middle | least


if __name__ == "__main__":
    main()
