"""Check that ``shard="node"`` gives the same bits as unsharded steps."""

import copy
import io
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hpctrain.core.errors import CommError, ConfigError, HpctrainError, MismatchError
from hpctrain.gradients import node_bucket, node_values
from hpctrain.runtime.world import current

pytestmark = pytest.mark.requires("own-engine")

MANY = pytest.mark.ranks(2, 3, 4)
OPTIMIZERS = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    "AdamW": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "amsgrad": True, "fused": True}],
    "Adam": [{"lr": 0.01, "foreach": True, "maximize": True}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.9, "centered": True}],
    "Adagrad": [{"lr": 0.01, "initial_accumulator_value": 0.1}],
    **{name: [{"lr": 0.01}] for name in ("Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")},
}


def make_model(dtype=torch.float32):
    """Make a network whose tensors are split at odd places; one of them is in no loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 257), nn.Tanh(), nn.Linear(257, 131), nn.Linear(131, 3))
    model.unused = nn.Parameter(torch.ones(5))
    return model.to(dtype).to(memory_format=torch.contiguous_format)


def batch(hvd, step, dtype=torch.float32, rank=None):
    rank = hvd.rank() if rank is None else rank
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 70, generator=source).to(dtype)


def backward(hvd, model, step, rank=None):
    model(batch(hvd, step, model[0].weight.dtype, rank)).square().mean().backward()


def wrapped(hvd, kind=torch.optim.SGD, dtype=torch.float64, settings=None, **options):
    model = make_model(dtype)
    plain = kind(model.parameters(), **(settings or {"lr": 0.1}))
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def train(hvd, steps, between=lambda *_: None, shard=None, passes=1, **options):
    """Train by a script; ``between`` is called between backward and step."""
    model, optimizer = wrapped(hvd, shard=shard, backward_passes_per_step=passes, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            backward(hvd, model, step * passes + number)
        between(model, optimizer, step)
        optimizer.step()
    return model, optimizer


def assert_same_bits(one, other):
    """Compare two models, or two values of state dicts."""
    if isinstance(one, nn.Module):
        one, other = one.state_dict(), other.state_dict()
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same_bits(value, other[key])
    elif torch.is_tensor(one):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def assert_one_model(world, model):
    mine = [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, mine, world.bcast(mine)))


# Bits


@MANY
@pytest.mark.limit(180)
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_every_optimizer_takes_steps_of_the_same_bits(hvd, monkeypatch):
    monkeypatch.setattr(node_bucket, "_STATE_BYTES", 10_000)  # several chunks per rank
    rows = [(name, row) for name, rows in OPTIMIZERS.items() for row in rows]
    for (name, settings), dtype in product(rows, (torch.float32, torch.bfloat16)):
        if dtype is torch.bfloat16 and name not in {"SGD", "AdamW"}:
            continue
        kind = getattr(torch.optim, name)
        models = []
        for shard in (None, "node"):
            model = make_model(dtype)
            plain = kind(model.parameters(), **settings)
            before = StepLR(plain, 1, gamma=0.9)
            optimizer = hvd.DistributedOptimizer(plain, shard=shard)
            for step in range(3):
                optimizer.zero_grad()
                backward(hvd, model, step)
                optimizer.step()
                before.step()
            models.append((model, optimizer.state_dict()))
        (one, state), (other, other_state) = models
        assert_same_bits(one, other)
        assert_same_bits(state, other_state)


@MANY
@pytest.mark.parametrize(
    "options",
    [
        {"passes": 2},
        {"op": "Sum"},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"kind": torch.optim.AdamW, "passes": 3, "settings": {"lr": torch.tensor(0.01)}},
    ],
    ids=str,
)
def test_options_have_the_same_bits(hvd, options):
    options = {**options, "op": getattr(hvd, options.get("op", "Average"))}
    ordinary, sharded = (train(hvd, 3, shard=shard, **options)[0] for shard in (None, "node"))
    assert_same_bits(ordinary, sharded)


@MANY
def test_uneven_samples_and_ranks_without_any_have_the_same_bits(hvd):
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, shard=shard)
        for step in range(4):
            optimizer.zero_grad()
            count = (hvd.rank() + step) % 3
            optimizer.set_num_samples(count, nominal=2)
            if count:
                backward(hvd, model, step)
            optimizer.step()
        models.append(model)
    assert_same_bits(*models)


@MANY
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_parameters_that_are_frozen_unfrozen_or_added_later_have_the_same_bits(hvd, kind):
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, kind, settings={"lr": 0.01}, shard=shard)
        for step in range(5):
            model[0].requires_grad_(step not in (1, 2))
            if step == 3:
                model.late = nn.Parameter(torch.ones(3, dtype=torch.float64))
                optimizer.add_param_group({"params": [model.late], "lr": 0.1})
            optimizer.zero_grad()
            late = (model.late * (1 + hvd.rank())).sum() if step >= 3 else 0.0
            (model(batch(hvd, step, torch.float64)).square().mean() + late).backward()
            optimizer.step()
            if step == 1:
                assert model[0].weight.grad is None
        models.append((model, optimizer.state_dict()))
    assert_same_bits(models[0][0], models[1][0])
    assert_same_bits(models[0][1], models[1][1])


@MANY
def test_state_is_exchanged_with_a_plain_optimizer_and_back(hvd):
    model, optimizer = train(hvd, 2, shard="node", kind=torch.optim.AdamW)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    num_bytes = sum(3 * p.nbytes for p in model.parameters())
    assert file.tell() < 1.2 * num_bytes + 20_000  # and not once per rank of the node
    file.seek(0)
    saved = torch.load(file)
    resumed = []
    for shard in (None, "node"):
        other, plain = wrapped(hvd, torch.optim.AdamW, shard=shard)
        other.load_state_dict(saved["model"])
        plain.load_state_dict(copy.deepcopy(saved["optimizer"]))
        resumed.append((other, plain))
    resumed.append((model, optimizer))
    for step in (7, 8):
        for one, its in resumed:
            its.zero_grad()
            backward(hvd, one, step)
            its.step()
    assert_same_bits(resumed[0][0], model)
    assert_same_bits(resumed[0][1].state_dict(), optimizer.state_dict())
    assert_same_bits(resumed[1][0], model)


@MANY
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_uses_the_average(hvd, world, order):
    norms = []

    def clip(_, optimizer, step):
        if step != 1:
            optimizer.clip_grad_value_(0.01)
        norms.append(float(optimizer.clip_grad_norm_(0.02, order)))

    ordinary = train(hvd, 3, clip)[0]
    found, norms = norms, []
    model = train(hvd, 3, clip, shard="node")[0]
    assert norms == pytest.approx(found, rel=1e-12)
    assert len(set(world.allgather(norms[-1]))) == 1
    for one, other in zip(ordinary.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert_one_model(world, model)
    with pytest.raises(RuntimeError, match="finite"):
        train(hvd, 1, lambda m, o, _: spoil_and_clip(m, o), shard="node")


def spoil_and_clip(model, optimizer):
    optimizer.zero_grad()
    (model[0].bias * float("inf")).sum().backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@MANY
def test_gradients_stay_local_and_are_kept_after_the_step(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    alone = make_model(torch.float64)
    for step in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        alone.load_state_dict(model.state_dict())
        backward(hvd, model, step)
        backward(hvd, alone, step)
        for _ in range(2):
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.equal(p.grad, q.grad)
            if step == 0:
                optimizer.step()


# Parameters stored once per node


@torch.no_grad()
def halve(model, *_):
    model[0].weight.mul_(0.5)


def halve_silently(model, *_):
    for p in model.parameters():
        p.data.mul_(0.5)


def store_silently(model, *_):
    model[2].weight.data[7] = 0.0


def load(model, optimizer, _):
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def edit_state(_, optimizer, __):
    for entry in optimizer.state.values():
        entry["exp_avg"].mul_(0.5)


def share(model, *_):
    model.share_memory()


def replace(model, *_):
    model[0].weight.data = model[0].weight.detach() * 2


def drop_state(_, optimizer, step):
    if step == 2:
        optimizer.state.clear()


@MANY
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_changes_of_parameters_act_once(hvd, world):
    for edit in (
        halve,
        halve_silently,
        store_silently,
        load,
        edit_state,
        share,
        replace,
        drop_state,
    ):
        options = {"kind": torch.optim.AdamW, "settings": {"lr": 0.01}}
        ordinary, sharded = (train(hvd, 4, edit, shard=s, **options)[0] for s in (None, "node"))
        for one, other in zip(ordinary.parameters(), sharded.parameters(), strict=True):
            # Not bitwise: after load_state_dict() the ordinary method averages averages again.
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        assert_one_model(world, sharded)


@MANY
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_writes_that_torch_does_not_count_are_found(hvd, monkeypatch):
    monkeypatch.setattr(node_values, "_LOOK", 16)
    monkeypatch.setattr(node_values, "_MOST_LOOKS", 1)
    model, optimizer = train(hvd, 1, shard="node")
    model[2].weight.data[7] = 0.0

    def go_on():
        for step in range(20):
            optimizer.zero_grad()
            backward(hvd, model, step)
            optimizer.step()

    with pytest.raises(MismatchError, match="write to the parameter itself"):
        go_on()


@MANY
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_parameters_and_state_are_stored_once(hvd, world):
    model, optimizer = train(hvd, 2, shard="node", kind=torch.optim.AdamW)
    num_bytes = sum(3 * p.nbytes for p in model.parameters() if p.grad is not None)
    found = own_share_of(optimizer)
    assert found * world.size < 1.05 * num_bytes + 64 * 4096 * world.size
    assert found * world.size >= num_bytes


def own_share_of(optimizer):
    """Return the bytes that this rank contributes for parameters and state."""
    values = optimizer._exchange.reduction.values
    tensors = [t for b in values.buckets for t in (b.values, *b.state.values())]
    return sum(len(t._region.shared) for t in tensors) // values._node.local_size


@MANY
def test_graph_from_before_the_step_is_stale(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    loss = model(batch(hvd, 0, torch.float64)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Rejected uses


class Elementwise(torch.optim.Optimizer):
    """Step by the sign of the gradient, as a user's optimizer that replaces its state."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last", torch.zeros_like(p))
                    self.state[p]["last"] = 0.9 * last + p.grad
                    p.sub_(group["lr"] * self.state[p]["last"].sign())


class Child(Elementwise):
    """Declare nothing itself, unlike its parent."""


@MANY
def test_custom_optimizer_must_declare_that_it_is_elementwise(hvd):
    ordinary, sharded = (train(hvd, 3, shard=s, kind=Elementwise)[0] for s in (None, "node"))
    assert_same_bits(ordinary, sharded)
    with pytest.raises(ConfigError, match=r"is not known of .*test_sharded_step\.Child;"):
        wrapped(hvd, Child, shard="node")


@MANY
def test_unsupported_uses_raise_on_all_ranks(hvd, world):
    def other_rate(_, optimizer, __):
        optimizer.param_groups[0]["lr"] += 0.1 * (hvd.rank() == 1)

    def clip(model, *_):
        if hvd.rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def edit(model, *_):
        with torch.no_grad():
            model[0].weight[0] += hvd.rank()

    def sparse(model, *_):
        grad = torch.zeros(5, dtype=torch.float64)
        model.unused.grad = grad.to_sparse() if hvd.rank() == 0 else grad

    wrong = {
        other_rate: "learning rates",
        clip: r"clip the average with",
        edit: "parted|must be the same",
        sparse: "sparse=False",
    }
    for script, match in wrong.items():
        with pytest.raises(HpctrainError, match=match):
            train(hvd, 3, script, shard="node")
        world.barrier()
    for op in ({"shard": "rank"}, {"shard": "node", "op": hvd.Adasum}):
        with pytest.raises(ConfigError, match="shard"):
            wrapped(hvd, **op)


@MANY
def test_different_weights_are_rejected_before_the_first_step(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    with torch.no_grad():
        model[2].bias += hvd.rank()
    backward(hvd, model, 0)
    with pytest.raises(MismatchError, match="broadcast_parameters"):
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    optimizer.step()


@MANY
def test_ranks_clip_identically_or_all_raise(hvd):
    def by_value(_, optimizer, __):
        if hvd.rank() == 0:
            optimizer.clip_grad_value_(0.01)

    def by_norm(_, optimizer, __):
        optimizer.clip_grad_norm_(1e-3 * (1 + hvd.rank()))

    for clip in (by_value, by_norm):
        with pytest.raises(MismatchError, match="and gradient clipping must be the same"):
            train(hvd, 3, clip, shard="node")


@MANY
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_rank_that_alone_clips_by_norm_has_no_partial_step(hvd):
    model, optimizer = train(hvd, 1, shard="node")
    optimizer.zero_grad()
    backward(hvd, model, 1)
    clip = lambda: optimizer.clip_grad_norm_(1.0)  # noqa: E731
    with pytest.raises(MismatchError, match="the same calls"):
        (optimizer.step if hvd.rank() else clip)()
    assert all(p.isnan().all() for p in model.parameters() if p.requires_grad)
    current().comm.rejoin()
    with pytest.raises(MismatchError, match="restart from a checkpoint"):
        optimizer.step()


@MANY
def test_step_that_fails_halfway_invalidates_the_model(hvd):
    model, optimizer = train(hvd, 1, shard="node")
    rule = optimizer._exchange._rule
    whole, calls = rule.step, []

    def failing(groups):
        calls.append(groups)
        if hvd.rank() == 0 and len(calls) == 1:
            raise MemoryError("a chunk is too much")
        whole(groups)

    rule.step = failing
    is_here = optimizer._exchange.reduction.num_nodes == 1 or hvd.rank() < 2
    optimizer.zero_grad()
    backward(hvd, model, 1)
    with pytest.raises((MemoryError, MismatchError)) if is_here else nullcontext():
        optimizer.step()
    if is_here:
        assert all(p.isnan().all() for p in model.parameters() if p.requires_grad)
        with pytest.raises(CommError, match="restart from a checkpoint"):
            optimizer.state_dict()
    with pytest.raises(MismatchError, match="restart from a checkpoint"):
        optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("per_node", [1, 2], indirect=True)
def test_a_rank_alone_on_its_node_and_process_sets_work(hvd):
    some = hvd.add_process_set(range(1, hvd.size()))
    for options in ({}, {"process_set": some}):
        ordinary, sharded = (train(hvd, 2, shard=s, **options)[0] for s in (None, "node"))
        assert_same_bits(ordinary, sharded)
