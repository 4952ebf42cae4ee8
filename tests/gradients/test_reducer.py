"""Check faults that would otherwise be silent: every rank gets the right average, or an error."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.core.errors import CommError, ConfigError, MismatchError
from hpctrain.runtime.world import current
from tests.gradients.training import (
    LAST,
    MANY,
    ONE_NODE,
    OVERLAPS,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    gradients,
    largest_difference,
    make_model,
    sgd,
    wrapped,
)

pytestmark = ONE_NODE


@MANY
@OVERLAPS
def test_several_optimizers_share_one_backward(hvd):
    model = make_model()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    both = [hvd.DistributedOptimizer(torch.optim.SGD(p, lr=0.0)) for p in (weights, biases)]
    for step in range(5):
        for optimizer in both:
            optimizer.zero_grad()
        backward(hvd, model, step)
        assert_close(gradients(model), expected_gradients(step))
        for optimizer in both:
            optimizer.step()


@pytest.mark.ranks(2)
def test_optimizers_in_different_orders_are_an_error_on_every_rank(hvd):
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    kept = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (one, two)]
    x = torch.ones(1, 1)
    with pytest.raises(MismatchError, match="same order on every rank"):
        (one(two(x)) if hvd.rank() == 0 else two(one(x))).sum().backward()
    assert kept


@MANY
def test_hooks_are_removed_with_the_optimizer(hvd):
    model = make_model()
    first = weakref.ref(distributed(hvd, model))
    gc.collect()
    assert first() is None
    distributed(hvd, model, op=hvd.Sum)
    kept = distributed(hvd, model, op=hvd.Sum)
    gc.collect()
    backward(hvd, model)
    assert_close(gradients(model), [g * hvd.size() for g in expected_gradients()])
    assert kept


@MANY
@OVERLAPS
@pytest.mark.parametrize("loads", [False, True], ids=["goes on", "loads a state"])
def test_after_a_backward_that_raised_the_next_step_is_right(hvd, loads):
    model, optimizer = wrapped(hvd)
    state = optimizer.state_dict()
    backward(hvd, model)  # the first backward only records the hooks
    optimizer.zero_grad()
    broken = model[-1].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(hvd, model)
    broken.remove()
    if loads:  # a new start, whatever was sent
        optimizer.load_state_dict(state)
    for step in range(3):
        try:
            optimizer.zero_grad()
            backward(hvd, model, step)
        except CommError as error:  # buckets that are sent early cannot be taken back
            assert not loads
            assert "travelled" in str(error)  # noqa: PT017
            return
        assert_close(gradients(model), expected_gradients(step))


@MANY
def test_passes_of_one_step_must_have_one_sample_count(hvd):
    model, optimizer = wrapped(hvd, backward_passes_per_step=2)
    optimizer.set_num_samples(5)
    backward(hvd, model)
    with pytest.raises(ConfigError, match="num_samples must be the same"):
        optimizer.set_num_samples(7)


@MANY
def test_a_model_that_changes_its_layout_is_laid_out_again(hvd):
    torch.manual_seed(0)
    model, alone = (nn.Conv2d(4, 8, 3).double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_parameters(alone.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, fused=True)
    model.to(memory_format=torch.channels_last)
    images = torch.randn(12, 4, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    own = images[hvd.rank() * (12 // hvd.size()) :][: 12 // hvd.size()]
    for _ in range(3):
        for m, o, x in ((model, optimizer, own), (alone, plain, images)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
    assert model.weight.grad.stride() == model.weight.stride()
    assert largest_difference(model, alone) < 1e-12


@MANY
@pytest.mark.parametrize(
    ("words", "op"),
    [("shape", "Average"), ("shape", "Adasum"), ("strides", "Sum"), ("group", "Average")],
)
def test_models_that_differ_between_ranks_are_an_error_on_every_rank(hvd, words, op):
    first = hvd.rank() == 0
    model = nn.Conv2d(4, 3 if words == "shape" and first else 8, 3)
    if words == "strides" and first:
        model.to(memory_format=torch.channels_last)
    options = {"groups": 1 if first else 2} if words == "group" else {}
    output = r"\(3, 4, 3, 3\)" if words == "shape" else words
    with pytest.raises(MismatchError, match=f"parameters must be the same.*{output}"):
        distributed(hvd, model, op=getattr(hvd, op), **options)


@MANY
def test_failed_wrap_can_be_repeated(hvd):
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    if hvd.rank() == 0:
        model.weight.requires_grad_(False)
    with pytest.raises(MismatchError):
        hvd.DistributedOptimizer(optimizer)
    model.weight.requires_grad_()
    optimizer = hvd.DistributedOptimizer(optimizer)
    model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((3, 4), sum(range(hvd.size())) / hvd.size()))


@MANY
@LAST
def test_bucket_of_a_world_that_was_shut_down_is_rejected(hvd):
    assert current().plan.node_memory != "none"
    _, optimizer = wrapped(hvd)
    hvd.shutdown()
    with pytest.raises(CommError, match="was closed; after shutdown"):
        optimizer.step()


@pytest.mark.ranks(1, 2)
def test_a_distributed_optimizer_is_not_copied(hvd):
    with pytest.raises(ConfigError, match="must not be copied"):
        copy.deepcopy(distributed(hvd, make_model()))


@MANY
def test_a_checkpointed_part_that_looks_like_a_whole_backward_does_not_end_it(hvd):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    hvd.broadcast_parameters(model.state_dict())
    optimizer = distributed(hvd, model)
    x = torch.ones(2, 3).double()
    for _ in range(3):
        optimizer.zero_grad()
        model[1](x).sum().backward()  # two hooks
        optimizer.step()
        optimizer.zero_grad()
        if hvd.rank():  # two hooks inside, then two more
            checkpoint(model[1], model[0](x), use_reentrant=True).sum().backward()
        optimizer.step()  # replaces a backward on rank 0, which synchronizes once
    sums = [p.sum().item() for p in model.parameters()]
    assert hvd.allgather_object(sums) == [sums] * hvd.size()
