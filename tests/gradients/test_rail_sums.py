"""Check ``shard="node"`` between nodes: sums that begin in backward equal sums in the step."""

import time

import pytest
import torch
from torch import nn

import hpctrain as hvd
from hpctrain.core.errors import MismatchError
from tests.gradients.test_sharded_step import MANY, assert_same_bits, backward, batch, wrapped
from tests.harness.pace import scaled

pytestmark = pytest.mark.requires("own-engine")


class Gate(torch.autograd.Function):
    """Block a gradient until an event has occurred."""

    @staticmethod
    def forward(ctx, values, happened):
        ctx.happened = happened
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        limit = time.monotonic() + 20.0
        while not ctx.happened():
            assert time.monotonic() < limit, "nothing has happened while backward was held up"
            time.sleep(1e-3)
        return grad, None


def in_thread(world, worlds, overlap="thread"):
    """Enter a world of nodes of 1 and 1, 2 and 1, or 2 and 2 ranks."""
    worlds.enter(1 if world.size == 2 else 2, overlap)


def rails_of(optimizer):
    return optimizer._exchange.reduction._rails


def num_early(optimizer):
    return rails_of(optimizer).num_sent


@MANY
def test_sum_of_a_bucket_completes_before_backward_reaches_the_next(world, worlds):
    in_thread(world, worlds)
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, torch.optim.AdamW, settings={"lr": 0.01}, shard=shard)

        def loss(step, shard=shard, model=model, optimizer=optimizer):
            def happened():
                works = rails_of(optimizer)._works
                return bool(works) and works[0].done()

            hidden = model[:3](batch(hvd, step, torch.float64))
            if shard and step:
                hidden = Gate.apply(hidden, happened)
            return model[3](hidden).square().mean()

        for step in range(4):
            optimizer.zero_grad()
            loss(step).backward()
            if shard and step:
                assert num_early(optimizer) > 1
            optimizer.step()
        models.append(model)
    assert_same_bits(*models)


def again(model, _, step):
    """Compute gradients more often than in the step before, or less often."""
    for number in range(1 + step % 3):
        backward(hvd, model, 3 * step + number)


def throw_away(model, optimizer, step):
    """Compute gradients of another batch, discard them, then compute the gradients of the step."""
    if step % 2:
        backward(hvd, model, 50 + step)
        optimizer.zero_grad(set_to_none=step < 3)
    backward(hvd, model, step)


def drop(model, _, step):
    """Drop a gradient on one rank while it is in flight."""
    backward(hvd, model, step)
    if step == 2 and hvd.rank() == 1:
        model[3].weight.grad = None
        model[2].bias.grad.zero_()


def leave_out(model, _, step):
    """Skip backward on another rank in each step."""
    if (hvd.rank() + step) % hvd.size():
        backward(hvd, model, step)


def count(model, optimizer, step):
    """Set sample counts, too late in one step."""
    if step == 3:
        backward(hvd, model, step)
    optimizer.set_num_samples((hvd.rank() + step) % 3 + 1, nominal=2)
    if step != 3:
        backward(hvd, model, step)


def freeze(model, optimizer, step):
    """Freeze parameters after their gradients were sent, thaw them, and add one late."""
    model[0].requires_grad_(step != 1)
    backward(hvd, model, step)
    if step == 2:
        model[2].requires_grad_(False)
    if step == 4:
        model.late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer.add_param_group({"params": [model.late]})


def hear(model, optimizer, step):
    """Synchronize between two backwards."""
    backward(hvd, model, step)
    if step > 1:
        optimizer.synchronize()
        backward(hvd, model, 10 + step)
    optimizer.clip_grad_value_(0.01)


def load(model, optimizer, step):
    """Load state while gradients are in flight."""
    backward(hvd, model, step)
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.ranks(3)
@pytest.mark.limit(180)
def test_changes_of_gradients_in_flight_keep_the_bits_of_the_step(world, worlds):

    scripts = (again, throw_away, drop, leave_out, count, freeze, hear, load)
    found = {}
    for overlap in ("thread", "end"):
        in_thread(world, worlds, overlap)
        for script in scripts:
            model, optimizer = wrapped(hvd, torch.optim.AdamW, settings={"lr": 0.01}, shard="node")
            rails, early = rails_of(optimizer), 0
            for step in range(6):
                optimizer.zero_grad()
                rails._num_late = 0  # no late gradients are known from the step before
                script(model, optimizer, step)
                early += num_early(optimizer) > 0
                optimizer.step()
            assert world.allreduce(early > 0) == world.size * (overlap == "thread")
            found[overlap, script] = model
    for script in scripts:
        assert_same_bits(found["thread", script], found["end", script])


@MANY
def test_rank_with_discarded_sums_starts_later_in_the_next_steps(world, worlds):
    in_thread(world, worlds)
    model, optimizer = wrapped(hvd, shard="node")
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(1 + (step == 1 and hvd.rank() == 0)):
            backward(hvd, model, step)
        seen.append(num_early(optimizer) > 0)
        optimizer.step()
    assert seen == [False, True, hvd.rank() > 0, hvd.rank() > 0]


@MANY
def test_sums_of_several_optimizers_need_no_order_and_reuse_communicators(world, worlds):
    in_thread(world, worlds)
    comm, lent = None, []
    for _ in range(3):
        model, one = wrapped(hvd, shard="node")
        comm = one._exchange.reduction._comm
        lent.append(len(comm._lent))
        other_model, other = wrapped(hvd, shard="node")
        for step in range(4):
            one.zero_grad()
            backward(hvd, model, step)
            other.zero_grad()
            if (hvd.rank() + step) % 2:  # the other ranks step this optimizer without gradients
                backward(hvd, other_model, step)
            if step % 2:
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
            other.step()
            one.step()
        assert_same_on_all_ranks(world, model, other_model)
        del model, one, other_model, other
    assert lent == [1, 2, 2]
    assert len(comm._lent) == 2


def assert_same_on_all_ranks(world, *models):
    mine = [p.detach().clone() for model in models for p in model.parameters()]
    assert all(map(torch.equal, mine, world.bcast(mine)))


@MANY
def test_error_with_gradients_in_flight_blocks_no_rank(world, worlds):
    in_thread(world, worlds)
    model, optimizer = wrapped(hvd, shard="node")
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() or step < 2:
            backward(hvd, model, step)
        if step == 2:
            optimizer.param_groups[0]["lr"] = 0.1 + hvd.rank()
            with pytest.raises(MismatchError, match="learning rates"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    assert_same_on_all_ranks(world, model)
    optimizer.zero_grad()
    if hvd.rank():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        backward(hvd, model, 3)  # no step uses these gradients
    start = time.monotonic()
    worlds.leave()
    assert time.monotonic() - start < scaled(20)
