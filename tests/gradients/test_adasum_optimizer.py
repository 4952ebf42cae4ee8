"""Check steps combined by Adasum: equal steps count once, orthogonal steps are added."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ConfigError, MismatchError
from tests.gradients.training import MANY, ONE_NODE, backward, distributed, make_model, wrapped

pytestmark = ONE_NODE


KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@MANY
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equal_steps_are_taken_once(hvd, kind):
    model, alone = make_model(), make_model()
    optimizer, plain = kind(model.parameters()), kind(alone.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    for _ in range(3):
        for m, o in ((model, optimizer), (alone, plain)):
            o.zero_grad()
            m(torch.ones(2, 64).double()).square().sum().backward()
            o.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@MANY
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_steps_at_right_angles_are_added(hvd, compression):
    model = nn.Linear(hvd.size(), 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    how = getattr(hvd.Compression, compression)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=how, op=hvd.Adasum)
    model(torch.eye(hvd.size())[hvd.rank()]).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((1, hvd.size()), -0.5))


@MANY
def test_all_ranks_have_the_same_weights_after_any_steps(hvd):
    model, optimizer = wrapped(hvd, op=hvd.Adasum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() or step:
            backward(hvd, model, step)
        optimizer.synchronize()
        optimizer.raise_flags(1 << hvd.rank() % 2)
        optimizer.step()
        scheduler.step()
        assert optimizer.raised_flags == 0b11
        for p in model.parameters():
            assert torch.equal(hvd.broadcast(p.detach(), 0), p)


@MANY
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_scaler_of_one_rank_does_not_skip_the_common_step(hvd, kind, looks):
    model, alone = make_model(), make_model()
    optimizer, plain = kind(model.parameters()), kind(alone.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + hvd.rank()), growth_interval=2)
    some, everyone = 2, 4  # from here on, ranks other than 0, then all ranks, find inf
    x, last = torch.ones(2, 64).double(), []
    for step in range(5):
        flawed = step == everyone or (step == some and hvd.rank() > 0)
        optimizer.zero_grad()
        loss = model(torch.full_like(x, torch.inf) if flawed else x).square().sum()
        scaler.scale(loss).backward()
        if looks:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        alone(x).square().sum().backward()
        plain.step()
        now = [p.detach().clone() for p in model.parameters()]
        for one, other, before in zip(now, alone.parameters(), last or now, strict=True):
            assert torch.equal(hvd.broadcast(one, 0), one)
            if step <= some:
                torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12)
            assert step < everyone or torch.equal(one, before)
        last = now


@MANY
@pytest.mark.parametrize(
    ("action", "output"),
    [
        ("leaves a step out", "must take the same steps.*rank 1: step 2"),
        ("edits a weight", r"differ before step 1.*2\.bias.*rank 1"),
        ("steps once more", "must not use gradients.*rank 1: step 2"),
    ],
)
def test_divergence_of_one_rank_raises_on_all_ranks_at_the_next_step(hvd, action, output):
    model, optimizer = wrapped(hvd, op=hvd.Adasum)

    def train():
        for step in range(4):
            optimizer.zero_grad()
            backward(hvd, model, step)
            does = action if (step, hvd.rank()) == (1, 1) else ""
            if does == "edits a weight":
                model[2].bias.data[0] += 1e-9
            if does != "leaves a step out":
                optimizer.step()
            if does == "steps once more":
                optimizer.step()

    with pytest.raises(MismatchError, match=output):
        train()


@MANY
@pytest.mark.parametrize("to_none", [True, False])
def test_ranks_without_gradients_and_skipped_steps_keep_replicas_equal(hvd, to_none):
    model, optimizer = wrapped(hvd, op=hvd.Adasum)
    for step in range(6):
        optimizer.zero_grad(set_to_none=to_none)
        if step != 1 or hvd.rank():  # one rank has no samples
            backward(hvd, model, step)
        if step == 2 and hvd.rank() == 1:  # rank 1 discards its gradients
            optimizer.zero_grad(set_to_none=to_none)
        if step != 4:
            optimizer.step()
        if step == 5:  # the same gradients again
            optimizer.step()
    sums = [p.sum().item() for p in model.parameters()]
    assert hvd.allgather_object(sums) == [sums] * hvd.size()


def accumulates(hvd, model, optimizer):
    """Accumulate two passes on every rank, and a third one on some."""
    for step in range(2 + hvd.rank() % 2):
        backward(hvd, model, step)
    optimizer.step()


def freezes_and_thaws(hvd, model, optimizer):
    for is_trained in (False, True):
        model[0].requires_grad_(is_trained)
        optimizer.zero_grad()
        accumulates(hvd, model, optimizer)


def adds_parameters(hvd, model, optimizer):
    late = nn.Linear(10, 1).double()
    hvd.broadcast_parameters(late.state_dict())
    optimizer.add_param_group({"params": list(late.parameters())})
    for _ in range(2):
        optimizer.zero_grad()
        late(model(torch.full((2, 64), 0.1 * (1 + hvd.rank())).double())).sum().backward()
        optimizer.step()


def loads_its_state(hvd, model, optimizer):
    backward(hvd, model)
    optimizer.load_state_dict(optimizer.state_dict())
    if hvd.rank() == 0:
        optimizer.zero_grad()
    optimizer.step()


def forgets_before_one_has_no_samples(hvd, model, optimizer):
    backward(hvd, model)  # as for a loss that is not finite
    optimizer.zero_grad()
    if hvd.rank() != 1:
        backward(hvd, model)
    optimizer.step()


def steps_another_optimizer(hvd, model, optimizer):
    other, its_own = wrapped(hvd, op=hvd.Adasum)
    for step in range(3):
        backward(hvd, other, step)
        its_own.step()
        its_own.zero_grad()
    accumulates(hvd, model, optimizer)


@MANY
@pytest.mark.parametrize(
    "does",
    [
        accumulates,
        freezes_and_thaws,
        adds_parameters,
        loads_its_state,
        forgets_before_one_has_no_samples,
        steps_another_optimizer,
    ],
)
def test_permitted_differences_between_ranks_do_not_raise_in_later_steps(hvd, does):
    model, optimizer = wrapped(hvd, op=hvd.Adasum)
    for step in range(6):
        optimizer.zero_grad()
        backward(hvd, model, step)
        optimizer.step()
        if step == 2:
            optimizer.zero_grad()
            does(hvd, model, optimizer)
    sums = [p.sum().item() for p in model.parameters()]
    assert hvd.allgather_object(sums) == [sums] * hvd.size()


@pytest.mark.ranks(2, 3)
def test_closures_may_be_called_a_different_number_of_times_per_rank(hvd):
    model, calls = make_model(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((2, 64), 0.1 * (1 + hvd.rank())).double()).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(set(hvd.allgather_object(len(calls)))) > 1


@MANY
def test_options_unsupported_by_adasum_are_rejected(hvd):
    model = make_model()
    with pytest.raises(ConfigError, match="predivide"):
        distributed(hvd, model, op=hvd.Adasum, gradient_predivide_factor=2.0)
    optimizer = distributed(hvd, model, op=hvd.Adasum)
    with pytest.raises(ConfigError, match="inside step"):
        optimizer.skip_synchronize()
    with pytest.raises(ConfigError, match="set with op=Average, but op is Adasum"):
        optimizer.set_num_samples(3)


@pytest.mark.ranks(1)
def test_adasum_in_a_world_of_one_is_the_plain_optimizer(hvd):
    model, alone = make_model(), make_model()
    optimizer, plain = distributed(hvd, model, op=hvd.Adasum), distributed(hvd, alone)
    for m, o in ((model, optimizer), (alone, plain)):
        backward(hvd, m)
        with o.skip_synchronize():
            o.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
