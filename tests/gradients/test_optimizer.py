"""Check optimizers with scripts, schedulers and scalers: averages, or a clear error."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import ConfigError, HpctrainDeprecationWarning
from hpctrain.core.torch_compat import VERSION
from tests.gradients.training import (
    EVERY_SIZE,
    MANY,
    ONE_NODE,
    OVERLAPS,
    assert_averages,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    largest_difference,
    make_model,
    part_of,
    sgd,
    train_alone,
    wrapped,
)

pytestmark = ONE_NODE


@MANY
def test_a_scaler_skips_the_step_on_all_ranks_together(hvd):
    model = make_model(torch.float32)
    optimizer = distributed(hvd, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for overflow in (True, False):
        optimizer.zero_grad()
        images, labels = part_of(global_batch(0, torch.float32), hvd.rank(), hvd.size())
        loss = cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, (p.detach() for p in model.parameters())))
        assert same is overflow
    assert scaler.get_scale() == 2.0


@MANY
@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.001, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.001, foreach=True),
    ],
    ids=["sgd foreach", "sgd fused", "adamw fused", "adam foreach"],
)
def test_foreach_and_fused_optimizers_step_on_averages(hvd, kind):
    model, alone = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(kind(model.parameters())), kind(alone.parameters())
    for step in range(5):
        for m, o, batch in (
            (model, optimizer, part_of(global_batch(step), hvd.rank(), hvd.size())),
            (alone, plain, global_batch(step)),
        ):
            o.zero_grad()
            cross_entropy(m(batch[0]), batch[1]).backward()
            o.step()
    assert largest_difference(model, alone) < 1e-9


@EVERY_SIZE
def test_schedulers_made_before_and_after_the_wrap_work(hvd):
    model = make_model()
    plain = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    backward(hvd, model)
    optimizer.step()
    before.step()
    after.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.1)
    assert_close(gradients(model), expected_gradients())


@MANY
def test_step_after_synchronize_warns_once_and_keeps_clipped_gradients(hvd):
    model, optimizer = wrapped(hvd)
    backward(hvd, model)
    optimizer.synchronize()
    for p in model.parameters():
        p.grad.fill_(0.0)
    with pytest.warns(
        UserWarning, match=r"called without optimizer\.skip_synchronize\(\)"
    ) as all_:
        optimizer.step()
    assert len(all_) == 1
    assert all_[0].filename == __file__
    assert_close(list(model.parameters()), list(make_model().parameters()))
    backward(hvd, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@MANY
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_rank_without_backward_clips_with_the_others(hvd, world, clip):
    model, optimizer = wrapped(hvd)
    for clears in (True, False):
        optimizer.zero_grad(clears)
        if hvd.rank():
            backward(hvd, model)
        getattr(optimizer, clip)(1e-3)
        optimizer.step()
    weights = [p.tolist() for p in model.parameters()]
    assert weights != [p.tolist() for p in make_model().parameters()]
    assert world.allgather(weights) == [weights] * hvd.size()


@MANY
@OVERLAPS
def test_groups_and_predivision_change_no_gradient(hvd):
    def some(model):
        first, *_, last = model.parameters()
        return [[first, last], [model[2].weight]]

    ways = [{"gradient_predivide_factor": factor} for factor in (1.0, 4.0, 0.25)]
    ways += [{"groups": groups} for groups in (1, 4, 99, [], some)]
    for options in ways:
        model = make_model()
        made = {"groups": some(model)} if options.get("groups") is some else options
        optimizer = distributed(hvd, model, **made)
        assert_averages(hvd, model, optimizer)


@MANY
def test_groups_are_messages(hvd):
    model = make_model()
    with pytest.warns(HpctrainDeprecationWarning, match="groups"):
        optimizer = distributed(hvd, model, num_groups=3)
    buckets = optimizer._exchange.reduction.layout.buckets
    named = [[slot.name for slot in bucket.slots] for bucket in buckets]
    assert named == [["4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]]


@MANY
@pytest.mark.parametrize(
    "options",
    [{}, {"op": "Adasum"}, {"compression": "fp16"}, {"compression": "int8"}, {"shard": "node"}],
    ids=str,
)
def test_a_parameter_of_one_element_may_have_any_stride(hvd, options):
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.zeros(1, 2)[:, 0])
    assert weight.is_contiguous()
    assert weight.stride() == (2,)
    named = {k: getattr(hvd, v) if k == "op" else v for k, v in options.items()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), **named)
    for _ in range(2):
        optimizer.zero_grad()
        (weight.sum() * (1.0 + hvd.rank())).backward()
        optimizer.step()
    if "op" not in options:
        mean = (1 + hvd.size()) / 2
        assert weight.item() == pytest.approx(-0.2 * mean, rel=0.02)
    hvd.check_replicas(model, optimizer)


@MANY
def test_a_process_set_averages_among_its_ranks_only(hvd):
    inside = hvd.rank() > 0
    some = hvd.add_process_set(range(1, hvd.size()))
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = distributed(hvd, model, process_set=some)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 1), float(hvd.rank())).double()).sum().backward()
        mean = hvd.size() / 2 if inside else 0.0
        assert model.weight.grad.item() == pytest.approx(mean)
        optimizer.step()
    removed = distributed(hvd, nn.Linear(1, 1), process_set=some)
    del removed
    hvd.remove_process_set(some)
    with pytest.raises(ConfigError, match="must be registered before use"):
        distributed(hvd, model, process_set=some)


@EVERY_SIZE
def test_state_is_exchanged_with_a_plain_optimizer(hvd):
    model, other = make_model(), make_model()
    optimizer = distributed(hvd, model)
    for step in range(2):
        optimizer.zero_grad()
        backward(hvd, model, step)
        optimizer.step()
    plain = sgd(other)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    resumed = hvd.DistributedOptimizer(plain, other.named_parameters())
    optimizer.load_state_dict(copy.deepcopy(resumed.state_dict()))
    for m, o in ((model, optimizer), (other, resumed)):
        o.zero_grad()
        backward(hvd, m, 2)
        o.step()
        assert largest_difference(m, train_alone(3)) < 1e-12


@EVERY_SIZE
def test_arguments_are_checked(hvd):
    model = make_model()
    named = list(model.named_parameters())
    first = named[0][1]

    def refused(match, *names, **options):
        with pytest.raises(ConfigError, match=match):
            hvd.DistributedOptimizer(sgd(model), *names, **options)

    refused("backward_passes_per_step", backward_passes_per_step=0)
    refused("got twice: a", [("a", p) for p in model.parameters()])
    refused(r"lacks 5: group 0, parameter 1 \(48,\)", named[:1])
    refused("lacks 6", [])
    refused("contain tuples", list(model.parameters()))
    refused("op must be Average", op=hvd.Min)
    refused("predivide", gradient_predivide_factor=2.0, op=hvd.Sum)
    refused("predivide", gradient_predivide_factor=0.0)
    refused("non-negative", groups=-1)
    refused("lists of parameters", groups="all")
    refused("lists of parameters", groups=[first])
    refused("groups must contain parameters, got str", groups=[["0.weight"]])
    refused("groups 0 and 1", groups=[[first], [first]])
    optimizer = distributed(hvd, model)
    with pytest.raises(ConfigError, match="wrap the optimizer once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match="backward_passes_per_step"):
        optimizer.set_backward_passes_per_step(0)
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3


@pytest.mark.ranks(2)
@pytest.mark.requires("torch-2.7")
@pytest.mark.limit(180)
@pytest.mark.parametrize("local", [False, pytest.param(True, marks=pytest.mark.conformance)])
def test_compiled_step_is_equal_to_the_plain_step(hvd, local):
    torch.compiler.reset()
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    hvd.broadcast_parameters(models[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    wrap = partial(hvd.LocalSGD, steps=2) if local else lambda _, o: hvd.DistributedOptimizer(o)
    wrapped = [wrap(*pair) for pair in zip(models, optimizers, strict=True)]
    x = torch.full((2, 4), 1.0 + hvd.rank()).double()

    def train(index):
        optimizers[index].zero_grad()
        loss = models[index](x).square().mean()
        loss.backward()
        optimizers[index].step()
        return loss.detach() if local else hvd.allreduce(loss.detach(), name=f"loss {index}")

    compiled = torch.compile(train, backend="eager")
    most = 0.0 if VERSION >= (2, 13) else 1e-12  # older compilers change the order of sums
    for _ in range(4):
        torch.testing.assert_close(compiled(0), train(1), rtol=most, atol=0.0)
    assert largest_difference(*models) <= most
    assert not local or [method.facts["rounds"] for method in wrapped] == [2, 2]
