"""A whole training step: ours against no communication at all, and against DDP over gloo.

    hpctrain launch -n 2 -- python perf/bench_step.py [--json FILE]

24 x (Linear(1024) + ReLU), 25.2 M parameters, batch 32 on every rank, float32; SGD with momentum,
and AdamW.
What gradients cost depends on where they are allocated, so there are three forms of the step
without communication, and ours is compared with the fastest of them:

* ``plain``: the loop of every tutorial, ``zero_grad()`` drops the gradients;
* ``views``: gradients are views of one flat buffer, which is zeroed;
* ``copied``: hooks copy each gradient into its place in a flat buffer.

``hpctrain`` is the automatic choice, ``sharded`` has ``shard="node"``, and ``ddp gloo`` is torch's
DistributedDataParallel. The variants
run in turn, each on a model of its own; a step's time is that of the slowest rank.
"""

from collections.abc import Callable

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI
from peers import start_gloo, stop_gloo
from table import spread
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hvd
from hpctrain.runtime.world import current

LAYERS, WIDTH, BATCH = 24, 1024, 32
NAMES = {"ours": "hpctrain", "ddp": "ddp gloo"}

Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model() -> nn.Module:
    """Make the same network every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def make_step(model: nn.Module, optimizer, zero_grad: Callable[[], object]) -> Callable[[], None]:
    """Make a training step on this rank's own batch."""
    data = torch.Generator().manual_seed(1 + MPI.COMM_WORLD.rank)
    inputs = torch.randn(BATCH, WIDTH, generator=data)
    targets = torch.randn(BATCH, WIDTH, generator=data)

    def step() -> None:
        zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the first optimizer of the variants."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the second one."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def flat_views(model: nn.Module) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Lay all gradients into one buffer, last parameter first."""
    parameters = list(model.parameters())[::-1]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    parts = flat.split([p.numel() for p in parameters])
    return flat, {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}


def plain(make: Make = sgd) -> Callable[[], None]:
    """No communication, gradients allocated anew."""
    model = make_model()
    optimizer = make(model)
    return make_step(model, optimizer, optimizer.zero_grad)


def views(make: Make = sgd) -> Callable[[], None]:
    """No communication, gradients kept in a flat buffer."""
    model = make_model()
    flat, places = flat_views(model)
    for parameter, place in places.items():
        parameter.grad = place
    return make_step(model, make(model), flat.zero_)


def copied(make: Make = sgd) -> Callable[[], None]:
    """No communication, gradients copied into a flat buffer as they come."""
    model = make_model()
    _, places = flat_views(model)
    optimizer = make(model)

    def take(parameter: Tensor) -> None:
        places[parameter].copy_(parameter.grad)
        parameter.grad = places[parameter]

    for parameter in places:
        parameter.register_post_accumulate_grad_hook(take)
    return make_step(model, optimizer, optimizer.zero_grad)


def ours(make: Make = sgd) -> Callable[[], None]:
    """Hpctrain with the plan it chooses."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters())
    return make_step(model, optimizer, optimizer.zero_grad)


def sharded(make: Make = sgd) -> Callable[[], None]:
    """Hpctrain with parameters once per node."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), shard="node")
    return make_step(model, optimizer, optimizer.zero_grad)


def ddp(make: Make = sgd) -> Callable[[], None]:
    """Torch's own, over gloo."""
    start_gloo()
    model = DistributedDataParallel(make_model())
    optimizer = make(model)
    return make_step(model, optimizer, optimizer.zero_grad)


def main() -> None:
    """Measure all variants in turn, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="counted steps in each turn")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    silent: dict[str, float] = {}
    for make, forms in (
        (sgd, (plain, views, copied, ours, sharded, ddp)),
        (adamw, (plain, views, copied, ours, sharded)),
    ):
        suffix = " AdamW" * (make is adamw)
        variants = {NAMES.get(f.__name__, f.__name__) + suffix: f(make) for f in forms}
        found = interleave(variants, rounds=options.rounds, repetitions=options.steps, warm_up=2)
        fastest = min(median(found[f.__name__ + suffix]) for f in (plain, views, copied))
        silent |= dict.fromkeys(found, fastest)
        seconds |= found
        del variants
    middle = {name: median(times) for name, times in seconds.items()}
    rows = [
        {
            "variant": name,
            "median ms": middle[name] * 1e3,
            "fastest ms": min(times) * 1e3,
            "slowest ms": max(times) * 1e3,
            "/ no communication": middle[name] / silent[name],
        }
        for name, times in seconds.items()
    ]
    ratios = {
        f"{name} / fastest without communication": middle[name] / silent[name]
        for name in ("hpctrain", "sharded", "hpctrain AdamW", "sharded AdamW")
    } | {
        "ddp gloo / hpctrain": middle["ddp gloo"] / middle["hpctrain"],
    }
    pair = seconds["ddp gloo"], seconds["hpctrain"]
    spreads = {"ddp gloo / hpctrain": spread(*pair, options.rounds)}
    title = f"Training step, plan: {current().plan.overlap}"
    report(title, rows, ratios, options.json, spreads)
    stop_gloo()


if __name__ == "__main__":
    main()
