"""Random models in random layouts train as one process does.

Models have tied weights, buffers and several dtypes; parts are frozen and unfrozen, and the batch
size changes. ``TEST_LAYOUTS=500`` sets the number of seeds; each test prints its layout.
"""

import copy
import os
import random
import sys
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import gelu, scaled_dot_product_attention

from hpctrain.parallel import Pipeline, build_mesh, recompute, shard, tensor_parallel
from hpctrain.parallel.dtensor import clip_grad_norm_, local, whole
from hpctrain.parallel.stage import SCHEDULES
from tests.parallel.training import loss_of

SEEDS = range(int(os.environ.get("TEST_LAYOUTS", "4")))
STEPS, WORDS, WIDTH, LENGTH, CLIP = 4, 16, 8, 4, 0.05


class Mlp(nn.Module):
    def __init__(self, *, bias):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = (nn.Linear(*each, bias=bias) for each in ((WIDTH, 32), (32, WIDTH)))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x)))) + self.shift


class Attention(nn.Module):
    def __init__(self, *, bias):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # key has no bias: its gradient would consist of rounding errors
        for name in ROLES[Attention]:
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=bias and name != "key"))

    def forward(self, x):
        given = self.norm(x)
        matrices = self.query, self.key, self.value
        parts = (each(given).unflatten(-1, (-1, 2)).transpose(1, 2) for each in matrices)
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Narrow(nn.Module):
    """A layer that computes in float32."""

    def __init__(self, *, bias):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.linear(x.float()).double()


class Counts(nn.Module):
    """A layer with a buffer that changes, and no parameters."""

    def __init__(self, **_):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x.clone()


ROLES = {
    Mlp: {"up": "column", "down": "row"},
    Attention: {"query": "column", "key": "column", "value": "column", "out": "row"},
    Narrow: {},
    Counts: {},
}


def drawn_model(rng):
    torch.manual_seed(rng.randrange(1000))
    kinds = [Mlp, Attention, Counts, Narrow] if rng.random() < 0.3 else [Mlp, Attention, Counts]
    blocks = [rng.choice(kinds)(bias=rng.random() < 0.5) for _ in range(rng.randint(3, 6))]
    ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=rng.random() < 0.5)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, *ends).double()
    if rng.random() < 0.4:
        model[-1].weight = model[0].weight
    alike = [block for block in blocks if isinstance(block, Mlp)]
    if len(alike) > 1 and rng.random() < 0.4:
        alike[1].up.weight = alike[0].up.weight
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1, std=0.1)
        elif isinstance(module, Narrow):
            module.float()
    return model


class Layout(NamedTuple):
    tp: int
    pp: int
    dp: int
    sequence: bool
    vocabulary: bool
    schedule: str
    zero: int
    recomputed: str


def drawn_layout(rng, model, size):
    has_attention = any(isinstance(block, Attention) for block in model)
    is_mixed = len({p.dtype for p in model.parameters()}) > 1
    tp = rng.choice([n for n in (1, 2, 4)[: 3 - has_attention] if size % n == 0])
    pp = rng.choice([n for n in (1, 2, 3, 4) if size // tp % n == 0])
    dp, sequence = size // tp // pp, tp > 1 and rng.random() < 0.5
    two = len(model) >= 2 * pp  # enough layers for two stages per rank
    schedule = rng.choice(list(SCHEDULES)[: 5 if two else 2])
    zero = rng.choice([0, 1, 2, 3]) if dp > 1 and not is_mixed else 0
    if pp > 1 and zero:
        schedule = rng.choice(["gpipe", "1f1b"])
    selective = ["selective"] if pp == 1 or not schedule.startswith("z") else []
    recomputed = rng.choice(["", "full", *selective])
    vocabulary = sequence or rng.random() < 0.6
    return Layout(tp, pp, dp, sequence, vocabulary, schedule, zero, recomputed)


def drawn_trained(rng, model, *, may_change):
    """Return, for each step, which parameters are trained, by name; tied names are equal."""
    named, how = dict(model.named_parameters(remove_duplicate=False)), rng.choice("afpc")
    steps = []
    for _ in range(STEPS):
        if how == "a":
            some = {*named.values()}
        elif how == "p":  # freeze the first layers
            layers = [*model][rng.randint(0, len(model) - 1) :]
            some = {p for layer in layers for p in layer.parameters()}
        else:
            some = {p for p in named.values() if rng.random() < 0.65}
        some = some or {*named.values()}
        steps.append({name: p in some for name, p in named.items()})
    return steps if may_change and how != "f" else steps[:1] * STEPS


def train_only(model, trained):
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(requires_grad=trained[name])


def divided(model, layout, mesh, micro_batches):
    """Return this rank's part of a model, and its pipeline or None."""
    blocks = {name: ROLES[type(b)] for name, b in model.named_children() if type(b) in ROLES}
    if layout.tp > 1:
        roles = {f"{n}.{part}": its for n, own in blocks.items() for part, its in own.items()}
        ends = ["0", str(len(model) - 1)] if layout.vocabulary else []
        roles |= dict.fromkeys(ends, "vocabulary")
        tensor_parallel(model, mesh["tp"], roles, sequence=layout.sequence)
    if layout.recomputed:
        recompute(model, [*blocks], selective=layout.recomputed == "selective")
    if layout.pp == 1:
        return model, None
    options = {"loss": loss_of, "schedule": layout.schedule, "num_microbatches": micro_batches}
    if layout.zero:
        options["wrap"] = lambda stage: fully_shard(stage, mesh=mesh["dp"])
    pipeline = Pipeline(model, mesh["pp"], ["*"], **options)
    return pipeline.model, pipeline


def optimizer_of(model, *, is_adam):
    groups = [{"params": [*model.parameters()]}]  # a stage may have no parameters
    if is_adam:
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_in_a_random_layout_trains_as_one_process_does(seed):
    rng = random.Random(seed)
    one, size = drawn_model(rng), dist.get_world_size()
    layout = drawn_layout(rng, one, size)
    steps = drawn_trained(rng, one, may_change=not layout.zero)
    is_adam, micro_batches = rng.random() < 0.5, 3 if layout.pp == 3 else 4
    sys.stdout.write(f"{seed} {layout} {one}\n{steps}\n")
    exact = {"rtol": 1e-9, "atol": 1e-10}
    if any(isinstance(block, Narrow) for block in one):
        exact = {"rtol": 1e-4, "atol": 1e-5}

    train_only(one, steps[0])
    mesh = build_mesh(tp=layout.tp, pp=layout.pp)
    mine, pipeline = divided(copy.deepcopy(one), layout, mesh, micro_batches)
    optimizer, alone = (optimizer_of(each, is_adam=is_adam) for each in (mine, one))
    if layout.zero and pipeline is None:
        optimizer = shard(mine, optimizer, stage=layout.zero, mesh=mesh["dp"])
    data, group = mesh["dp"], mesh["dp"].get_group()
    for number, trained in enumerate(steps):
        alone.zero_grad()
        optimizer.zero_grad()
        train_only(one, trained)
        train_only(mine, trained)
        samples = micro_batches * layout.dp * rng.choice([1, 1, 2])
        draws = torch.Generator().manual_seed(100 * seed + number)
        windows = torch.randint(WORDS, (samples, LENGTH + 1), generator=draws)
        expected = loss_of(one(windows[:, :-1]), windows[:, 1:])
        expected.backward()
        norm = nn.utils.clip_grad_norm_(one.parameters(), CLIP)
        alone.step()

        part = windows.chunk(data.size())[data.get_local_rank()]
        with loss_parallel():
            if pipeline is None:
                loss = loss_of(mine(part[:, :-1]), part[:, 1:])
                loss.backward()
            else:
                loss = pipeline.step(part[:, :-1], part[:, 1:])
        loss = whole(loss.detach()).clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=group)
        torch.testing.assert_close(loss.item(), expected.item(), **exact)
        if not layout.zero:
            for parameter in mine.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), dist.ReduceOp.AVG, group=group)
        clip = (
            clip_grad_norm_ if pipeline is None else lambda _, most: pipeline.clip_grad_norm_(most)
        )
        torch.testing.assert_close(clip(mine.parameters(), CLIP).item(), norm.item(), **exact)
        optimizer.step()
        for name, parameter in mine.named_parameters():
            expected = one.get_parameter(name).detach()
            torch.testing.assert_close(whole(parameter.detach()), expected, **exact)
