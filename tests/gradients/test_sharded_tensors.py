"""Check ``shard="node"`` with optimizers that read whole tensors: each rank steps some tensors."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hpctrain.checkpoint import Manager
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.gradients.elementwise import can_shard
from hpctrain.runtime.world import current
from tests.gradients.test_sharded_memory import bytes_of_tensors
from tests.gradients.test_sharded_step import (
    MANY,
    assert_one_model,
    assert_same_bits,
    backward,
    make_model,
    train,
    wrapped,
)

pytestmark = pytest.mark.requires("own-engine")


class Ratio(torch.optim.Optimizer):
    """Define a user's optimizer: steps as long as the weights, with state of three shapes."""

    tensorwise = True

    def __init__(self, params, lr, *, is_joint=False):
        super().__init__(params, {"lr": lr})
        self.is_joint = is_joint

    @torch.no_grad()
    def step(self):
        for group, p in ((g, p) for g in self.param_groups for p in g["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum"], state["steps"] = torch.zeros_like(p), torch.zeros(())
            state["momentum"].mul_(0.9).add_(p.grad)
            state["norms"] = torch.stack([p.norm(), state["momentum"].norm() + 1e-6])
            state["steps"] += 1
            weights, step = state["norms"].tolist()
            p.sub_(state["momentum"], alpha=group["lr"] * weights / step)


class Child(Ratio):
    """Declare nothing itself, unlike its parent."""


class Joint(Ratio):
    """Read several tensors together if ``is_joint``."""

    @property
    def tensorwise(self):
        return not self.is_joint


class Counting(Ratio):
    """Keep state that ranks of a node cannot share."""

    tensorwise = True

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


MUON = getattr(torch.optim, "Muon", None)  # since torch 2.9
KINDS = [
    (torch.optim.Adafactor, {"lr": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.1, "foreach": True, "weight_decay": 0.1, "maximize": True}),
    (Ratio, {"lr": 0.1}),
    *([(MUON, {"lr": 0.1})] if MUON else []),
]


def optimizers(hvd, kind, settings, dtype, **options):
    """Make a model and its optimizers with two groups each; Muon needs a second optimizer."""
    model = make_model(dtype)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    two = lambda of: [{"params": of[:1], "lr": 0.05}, {"params": of[1:]}]  # noqa: E731
    if kind is MUON:
        plain = [kind(two(matrices), **settings), torch.optim.AdamW(others, lr=0.01)]
    else:
        plain = [kind(two(matrices + others), **settings)]
    schedules = [StepLR(each, 1, gamma=0.9) for each in plain]
    return model, [hvd.DistributedOptimizer(each, **options) for each in plain], schedules


def take_steps(hvd, model, made, schedules, steps):
    for step in steps:
        model.zero_grad()
        backward(hvd, model, step)
        for each in (*made, *schedules):
            each.step()


@MANY
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_steps_of_whole_tensors_have_the_same_bits(hvd, world):
    for (kind, settings), dtype in product(KINDS, (torch.float32, torch.bfloat16)):
        found = []
        for shard in (None, "node"):
            model, made, schedules = optimizers(hvd, kind, settings, dtype, shard=shard)
            take_steps(hvd, model, made, schedules, range(3))
            found.append((model, made))
        (one, ordinary), (other, sharded) = found
        assert_same_bits(one, other)
        for mine, theirs in zip(ordinary, sharded, strict=True):
            assert_same_bits(mine.state_dict(), theirs.state_dict())
        assert_one_model(world, other)


@MANY
def test_passes_and_clipped_gradients_have_the_same_bits(hvd):
    def clip(_, optimizer, __):
        optimizer.clip_grad_value_(0.01)

    for kind in (torch.optim.Adafactor, Ratio):
        (one, ordinary), (other, sharded) = (
            train(hvd, 3, clip, shard=shard, kind=kind, passes=2) for shard in (None, "node")
        )
        assert_same_bits(one, other)
        assert_same_bits(ordinary.state_dict(), sharded.state_dict())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_checkpoint_resumes_with_other_owners_and_methods(hvd, world, tmp_path):
    folder = world.bcast(tmp_path)
    fewer = hvd.add_process_set(range(1, hvd.size()))
    for kind, settings in (KINDS[0], KINDS[2]):
        manager = Manager(folder / kind.__name__, current().comm, every=1)
        model, made, schedules = optimizers(hvd, kind, settings, torch.float32, shard="node")
        take_steps(hvd, model, made, schedules, range(2))
        manager.save({"model": model.state_dict(), "optimizer": made[0].state_dict()}, 2)
        manager.close()
        found = []
        for shard, ranks in product((None, "node"), (None, fewer)):
            state = Manager(folder / kind.__name__, current().comm).load_latest().state
            options = {"shard": shard, "process_set": ranks}
            other, resumed, schedules = optimizers(hvd, kind, settings, torch.float32, **options)
            other.load_state_dict(state["model"])
            resumed[0].load_state_dict(state["optimizer"])
            if ranks is None or hvd.rank():
                take_steps(hvd, other, resumed, schedules, range(2, 4))
            found.append((other.state_dict(), resumed[0].state_dict()))
        for ordinary, sharded in zip(found[:2], found[2:], strict=True):
            assert_same_bits(dict(enumerate(ordinary)), dict(enumerate(sharded)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_node_stores_tensors_and_their_state_once(hvd, world):
    before = bytes_of_tensors(world)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adafactor(model.parameters()), shard="node")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 512)).square().mean().backward()
        optimizer.step()
    own = sum(p.nbytes for p in model.parameters())
    state = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values())
    due = own + state + hvd.size() * (own + model[0].weight.nbytes)
    found = bytes_of_tensors(world) - before
    assert due <= found < 1.05 * due
    buckets = optimizer._exchange.reduction.values.buckets
    pieces = [p for bucket in buckets for chunk in bucket.chunks for p in chunk.pieces]
    assert sum(p.values.nbytes for p in pieces) == own // hvd.size()


@MANY
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_state_of_another_shape_is_an_error_on_all_ranks(hvd):
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):
        model, optimizer = train(hvd, 1, kind=kind, shard="node")
        state = optimizer.state_dict()
        for entry in state["state"].values():
            entry |= {name: torch.zeros(7) for name, v in entry.items() if v.shape == (3,)}
        optimizer.load_state_dict(state)
        backward(hvd, model, 1)
        with pytest.raises((ConfigError, MismatchError, RuntimeError), match=r"3|failed step"):
            optimizer.step()


@MANY
def test_undeclared_or_joint_optimizers_are_rejected_on_all_ranks(hvd):
    for kind in (Child, torch.optim.LBFGS):
        with pytest.raises(ConfigError, match=f"is not known of .*{kind.__name__};.*tensorwise"):
            wrapped(hvd, kind, shard="node")
    assert can_shard(Joint(make_model().parameters(), 0.1))
    assert not can_shard(Joint(make_model().parameters(), 0.1, is_joint=True))
    model, optimizer = wrapped(hvd, Counting, shard="node")
    backward(hvd, model, 0)
    with pytest.raises(ConfigError, match="must consist of tensors, got steps = 1 of Counting"):
        optimizer.step()
