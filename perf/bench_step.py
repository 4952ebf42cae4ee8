"""A whole training step: hpctrain against no communication, and against DDP over gloo.

    hpctrain launch -n 2 -- python perf/bench_step.py [--json FILE] [--only NAME]

| | |
|---|---|
| ``MLP`` | 24 x (Linear(1024) + ReLU), 25.2 M parameters, batch 32; SGD with momentum, and AdamW |
| ``MLP bf16`` | the same in bfloat16, with masters in float32; AdamW |
| ``transformer`` | 6 layers of width 384, 10.8 M parameters, 2 x 64 tokens; AdamW |
| ``ResNet`` | 7 blocks of up to 128 channels, 1.3 M parameters, 8 images of 32 x 32; SGD |

Batches are per rank. The time of backward depends on the memory of the gradients, so there are
three forms of the step without communication, and hpctrain is compared with the fastest form:

* ``plain``: the usual loop, in which ``zero_grad()`` frees the gradients;
* ``views``: gradients are views of one flat buffer, which is zeroed;
* ``copied``: hooks copy each gradient into its place in a flat buffer.

``hpctrain`` is the automatic choice, ``sharded`` has ``shard="node"``, and ``ddp gloo`` is
DistributedDataParallel of torch. The variants are interleaved, each with a separate model; the
time of a step is that of the slowest rank. ``MiB per node`` is the memory that the ranks allocated
for the variant; shared pages count once.

``model ms`` is the time of ``gradients``, a step without communication and without an update, and
of the memory traffic that the rest of the step needs at least, at the bandwidth that all ranks
measure together by ``c = a + b`` in the same run. The model counts each value once per use: values
that stay in the cache between two uses take less time.
"""

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI
from peers import start_gloo, stop_gloo
from table import spread
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hvd
from hpctrain.core.units import MIB
from hpctrain.runtime.world import current

LAYERS, WIDTH, BATCH = 24, 1024, 32
NUM_TRIAD = 16 * MIB  # elements of float32
NAMES = {"ours": "hpctrain", "ddp": "ddp gloo"}

Step = Callable[[], None]
Make = Callable[..., torch.optim.Optimizer]


class Masters:
    """Local optimizer of 16-bit parameters, which updates float32 copies (masters)."""

    def __init__(self, parameters: Sequence[nn.Parameter], make: Make) -> None:
        self.pairs = [(p, p.detach().float()) for p in parameters]
        self.inner = make([master for _, master in self.pairs])

    @torch.no_grad()
    def step(self) -> None:
        """Convert the gradients to float32, step, and round the parameters."""
        for p, master in self.pairs:
            master.grad = p.grad.float()
        self.inner.step()
        for p, master in self.pairs:
            p.copy_(master)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for p, _ in self.pairs:
            p.grad = None


class Task(NamedTuple):
    """Training task: functions that create the model, a batch and the optimizer."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]
    optimizer: Make
    dtype: torch.dtype = torch.float32

    def traffic(self, form: str, ranks: int) -> float:
        """Return the bytes that a rank of a node of ``ranks`` reads and writes after backward."""
        grad, state = self.dtype.itemsize, 4
        num_states = 1 if self.optimizer is sgd else 2
        update = 2 * num_states * state + (2 * grad if grad == state else 2 * state + grad)
        copy, total = 2 * grad, grad * (1 + 1 / ranks)  # to the bucket; the sum of a part
        per_element = {
            "plain": grad + update + (2 * state if grad < state else 0),
            "hpctrain": copy + total + grad + update,
            "sharded": copy + grad + update / ranks,
        }
        num_elements = sum(p.numel() for p in self.make_model().parameters())
        return num_elements * per_element[form]

    def make_model(self) -> nn.Module:
        """Return the model, with equal initial weights in every call."""
        torch.manual_seed(0)
        return self.model().to(self.dtype)

    def silent(self, model: nn.Module) -> "torch.optim.Optimizer | Masters":
        """Return an optimizer without communication."""
        parameters = list(model.parameters())
        is_half = self.dtype is not torch.float32
        return Masters(parameters, self.optimizer) if is_half else self.optimizer(parameters)

    def make_step(self, model: nn.Module, optimizer, zero_grad: Callable[[], object]) -> Step:
        """Return a function that runs a training step on the batch of this rank."""
        source = torch.Generator().manual_seed(1 + MPI.COMM_WORLD.rank)
        inputs = self.batch(source)
        inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        with torch.no_grad():
            targets = torch.randn(model(inputs).shape, generator=source).to(self.dtype)

        def step() -> None:
            zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()

        return step


def mlp() -> nn.Module:
    """Return a network of identical layers."""
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def transformer() -> nn.Module:
    """Return a transformer encoder with a vocabulary of 512 tokens."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(512, 384), nn.TransformerEncoder(layer, 6))


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the output of the block."""
        inner = self.norms[0](self.first(values)).relu()
        return (self.norms[1](self.second(inner)) + self.shortcut(values)).relu()


def resnet() -> nn.Module:
    """Return a small residual network."""
    sizes = (32, 32, 32, 64, 64, 128, 128, 128)
    blocks = (Block(one, other) for one, other in pairwise(sizes))
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *ends)


sgd: Make = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
adamw: Make = partial(torch.optim.AdamW, lr=1e-3)


def rows_of(source: torch.Generator) -> Tensor:
    """Return a batch for the MLP."""
    return torch.randn(BATCH, WIDTH, generator=source)


def gradients(task: Task) -> Step:
    """Return a forward and a backward pass, without an update."""
    model = task.make_model()
    nothing = torch.optim.SGD(model.parameters(), lr=0.0)
    nothing.step = lambda: None
    return task.make_step(model, nothing, nothing.zero_grad)


def plain(task: Task) -> Step:
    """Return a step without communication, with new gradients in each step."""
    model = task.make_model()
    optimizer = task.silent(model)
    return task.make_step(model, optimizer, optimizer.zero_grad)


def flat_views(model: nn.Module) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Return the gradients as views of one buffer, last parameter first."""
    parameters = list(model.parameters())[::-1]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    parts = flat.split([p.numel() for p in parameters])
    return flat, {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}


def views(task: Task) -> Step:
    """Return a step without communication, with gradients in a flat buffer."""
    model = task.make_model()
    flat, places = flat_views(model)
    for parameter, place in places.items():
        parameter.grad = place
    return task.make_step(model, task.silent(model), flat.zero_)


def copied(task: Task) -> Step:
    """Return a step without communication, with hooks that copy gradients into a flat buffer."""
    model = task.make_model()
    _, places = flat_views(model)
    optimizer = task.silent(model)

    def take(parameter: Tensor) -> None:
        places[parameter].copy_(parameter.grad)
        parameter.grad = places[parameter]

    for parameter in places:
        parameter.register_post_accumulate_grad_hook(take)
    return task.make_step(model, optimizer, optimizer.zero_grad)


def ours(task: Task, **options: object) -> Step:
    """Return a step of hpctrain with its default plan."""
    model = task.make_model()
    optimizer = task.optimizer(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    return task.make_step(model, optimizer, optimizer.zero_grad)


def sharded(task: Task) -> Step:
    """Return a step of hpctrain with the state sharded over the ranks of a node."""
    masters = {} if task.dtype is torch.float32 else {"master_dtype": torch.float32}
    return ours(task, shard="node", **masters)


def ddp(task: Task) -> Step:
    """Return a step of DistributedDataParallel over gloo."""
    start_gloo()
    model = DistributedDataParallel(task.make_model())
    optimizer = task.optimizer(model.parameters())
    return task.make_step(model, optimizer, optimizer.zero_grad)


def triad() -> Step:
    """Return a sum of two vectors of 64 MiB into a third one, which are too large for caches."""
    one, other, out = (torch.zeros(NUM_TRIAD) for _ in range(3))
    return partial(torch.add, one, other, out=out)


SILENT = (plain, views, copied)
MLP = Task(mlp, rows_of, sgd)
TOKENS = partial(torch.randint, 512, (2, 64))
IMAGES = partial(torch.randn, 8, 3, 32, 32)
TASKS = {
    "": (MLP, (gradients, *SILENT, ours, sharded, ddp)),
    "AdamW": (MLP._replace(optimizer=adamw), (gradients, *SILENT, ours, sharded)),
    "bf16": (
        MLP._replace(optimizer=adamw, dtype=torch.bfloat16),
        (gradients, plain, copied, sharded),
    ),
    "transformer": (
        Task(transformer, lambda g: TOKENS(generator=g), adamw),
        (gradients, plain, copied, ours, sharded),
    ),
    "ResNet": (
        Task(resnet, lambda g: IMAGES(generator=g), sgd),
        (gradients, plain, copied, ours, sharded),
    ),
}
"""Constructor of each variant by its name."""


def node_mib() -> float:
    """Return the memory of the ranks of this node in MiB; shared pages count once."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory is not counted
    text = Path("/proc/self/smaps_rollup").read_text()
    own = int(text.partition("\nPss:")[2].split()[0])
    return MPI.COMM_WORLD.allreduce(own) * 1024 / MIB


def made(form: Callable[[Task], Step], task: Task) -> tuple[Step, float]:
    """Create a step and run it twice; return the step, and the additional memory."""
    before = node_mib()
    step = form(task)
    for _ in range(2):
        step()
    MPI.COMM_WORLD.Barrier()
    return step, node_mib() - before


def main() -> None:
    """Measure all variants, interleaved, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="counted steps in each turn")
    parser.add_argument("--only", choices=[*TASKS], help="what to measure alone")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    silent: dict[str, float] = {}
    memory: dict[str, float] = {}
    needed: dict[str, float] = {}
    for suffix, (task, forms) in TASKS.items():
        if options.only not in (None, suffix):
            continue
        name_of = {f: f"{NAMES.get(f.__name__, f.__name__)} {suffix}".strip() for f in forms}
        steps = {name: made(form, task) for form, name in name_of.items()}
        variants = {name: step for name, (step, _) in steps.items()}
        variants["triad"] = triad()
        memory |= {name: mib for name, (_, mib) in steps.items()}
        found = interleave(variants, rounds=options.rounds, repetitions=options.steps, warm_up=1)
        bandwidth = 3 * 4 * NUM_TRIAD / median(found.pop("triad"))
        fastest = min(median(found[name_of[form]]) for form in SILENT if form in name_of)
        silent |= dict.fromkeys(found, fastest)
        compute = median(found[name_of[gradients]])
        for form in {plain, ours, sharded} & {*forms}:
            moved = task.traffic(NAMES.get(form.__name__, form.__name__), MPI.COMM_WORLD.size)
            needed[name_of[form]] = compute + moved / bandwidth
        seconds |= found
        del variants, steps
    middle = {name: median(times) for name, times in seconds.items()}
    rows = [
        {
            "variant": name,
            "median ms": middle[name] * 1e3,
            "fastest ms": min(times) * 1e3,
            "slowest ms": max(times) * 1e3,
            "/ no communication": middle[name] / silent[name],
            "model ms": needed[name] * 1e3 if name in needed else "",
            "/ model": middle[name] / needed[name] if name in needed else "",
            "MiB per node": memory[name],
        }
        for name, times in seconds.items()
    ]
    ratios = {
        f"{name} / fastest without communication": middle[name] / silent[name]
        for name in seconds
        if name.startswith(("hpctrain", "sharded"))
    } | {f"{name} / model": middle[name] / needed[name] for name in needed}
    spreads = {}
    if "ddp gloo" in seconds:
        stop_gloo()
        ratios["ddp gloo / hpctrain"] = middle["ddp gloo"] / middle["hpctrain"]
        pair = seconds["ddp gloo"], seconds["hpctrain"]
        spreads["ddp gloo / hpctrain"] = spread(*pair, options.rounds)
    title = f"Training step, plan: {current().plan.overlap}"
    report(title, rows, ratios, options.json, spreads)


if __name__ == "__main__":
    main()
