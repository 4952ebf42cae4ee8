"""Check that the header of a step detects ranks that diverge, or that share data by mistake."""

import logging
import re
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hpctrain.core.errors import ConfigError, MismatchError
from tests.gradients.training import (
    LAST,
    MANY,
    ONE_NODE,
    OVERLAPS,
    distributed,
    largest_difference,
    make_model,
    wrapped,
)

pytestmark = ONE_NODE


def step(hvd, model, optimizer, *, value=None):
    optimizer.zero_grad()
    x = torch.full((2, 64), 0.1 * (1 + hvd.rank()) if value is None else value).double()
    model(x).square().sum().backward()
    optimizer.step()


def warnings_of(caplog, text):
    return [r for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


@MANY
def test_equal_gradients_in_the_first_step_are_reported_once_by_rank_0(hvd, caplog):
    model, optimizer = wrapped(hvd)
    for _ in range(3):
        step(hvd, model, optimizer, value=0.5)
    output = warnings_of(caplog, "hvd.shard_data")
    assert len(output) == (hvd.rank() == 0)


def messages_of_an_epoch(hvd, caplog, remedy=""):
    """Return the warnings about equal gradients in an epoch of a loader, after ``remedy``."""
    model, optimizer = wrapped(hvd)
    samples = torch.arange(5 * 64, dtype=torch.float64).reshape(5, 64) / 100
    names = {"hvd": hvd, "optimizer": optimizer, "loader": DataLoader(samples, batch_size=5)}
    exec(remedy, names)
    caplog.clear()
    for x in names["loader"]:
        model(x).square().sum().backward()
        optimizer.step()
    return [record.getMessage() for record in warnings_of(caplog, "hvd.shard_data")]


@MANY
def test_the_remedy_for_equal_gradients_divides_the_samples(hvd, caplog):
    (output,) = hvd.broadcast_object(messages_of_an_epoch(hvd, caplog))
    (remedy,) = re.findall("`(.*)`", output)
    assert messages_of_an_epoch(hvd, caplog, remedy) == []


@MANY
@pytest.mark.parametrize("value", [None, 0.0], ids=["own samples", "zeros"])
def test_gradients_of_different_samples_and_zeros_are_not_reported(hvd, caplog, value):
    model = nn.Linear(64, 2, bias=False).double()
    hvd.broadcast_parameters(model.state_dict())
    step(hvd, model, distributed(hvd, model), value=value)
    assert not warnings_of(caplog, "hvd.shard_data")


@MANY
@pytest.mark.parametrize(
    ("change", "output"), [(1e-9, r"rank 1: \w+"), (torch.nan, r"rank 1: \w+ \(not finite\)")]
)
def test_diverged_replica_is_reported_at_the_next_step(hvd, change, output):
    model, optimizer = wrapped(hvd)
    step(hvd, model, optimizer)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].bias[0] += change
    with pytest.raises(MismatchError, match=rf"before step 1.*2\.bias.*{output}") as caught:
        step(hvd, model, optimizer)
    assert "HPCTRAIN_CHECK_WEIGHTS=warn" in str(caught.value)


@MANY
@OVERLAPS
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_second_step_on_old_gradients_raises_with_rank_and_step(hvd, op):
    model, optimizer = wrapped(hvd, op=getattr(hvd, op))
    for _ in range(2):
        step(hvd, model, optimizer)
    output = "rank 1: step 2 of optimizer [0-9]+, gradients of the previous step"
    with pytest.raises(MismatchError, match=f"must not use gradients.*{output}"):
        optimizer.step() if hvd.rank() == 1 else step(hvd, model, optimizer)


@MANY
def test_step_without_or_with_old_gradients_on_all_ranks_is_permitted(hvd):
    model, alone = make_model(), make_model()
    optimizer = distributed(hvd, model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    step(hvd, model, optimizer, value=0.3)
    optimizer.step()
    step(hvd, alone, plain, value=0.3)
    plain.step()
    assert largest_difference(model, alone) < 1e-12
    optimizer.zero_grad(set_to_none=False)
    if hvd.rank():
        model(torch.ones(2, 64).double()).sum().backward()
    optimizer.step()
    sums = [p.sum().item() for p in model.parameters()]
    assert hvd.allgather_object(sums) == [sums] * hvd.size()


def step_with_other_parameters_on_rank_1(hvd, num_steps, has_samples=None, **arguments):
    """Step a model whose parameters are replaced on one rank at the start of the fourth step."""
    model, optimizer = wrapped(hvd, **arguments)
    for number in range(num_steps):
        if number == 3 and hvd.rank() == 1:
            model.load_state_dict(deepcopy(model.state_dict()), assign=True)
        optimizer.zero_grad(set_to_none=number > 20)
        if has_samples:
            optimizer.set_num_samples(has_samples(number))
        model(torch.full((2, 64), 0.1 * (1 + hvd.rank())).double()).square().sum().backward()
        optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@OVERLAPS
def test_parameters_replaced_on_one_rank_are_reported_once(hvd, caplog, op):
    step_with_other_parameters_on_rank_1(hvd, 50, op=getattr(hvd, op))
    output = warnings_of(caplog, "assign=True")
    assert len(output) == (hvd.rank() == 0)
    assert not output or "rank 1: 0.bias (6 in all)" in output[0].getMessage()


@MANY
def test_untrained_parameters_and_ranks_without_samples_are_not_reported(hvd, caplog):
    model, optimizer = wrapped(hvd)
    for _ in range(50):
        optimizer.zero_grad()
        optimizer.set_num_samples(hvd.rank() != 1)  # also before the first gradients of others
        if hvd.rank() != 1:
            model[:3](torch.full((2, 64), 0.1).double()).square().sum().backward()
        optimizer.step()
    assert not warnings_of(caplog, "assign=True")


@pytest.mark.ranks(2)
def test_replaced_parameters_are_reported_if_the_rank_lacks_samples_in_some_steps(hvd, caplog):
    step_with_other_parameters_on_rank_1(hvd, 70, lambda number: not (hvd.rank() and number % 2))
    assert len(warnings_of(caplog, "assign=True")) == (hvd.rank() == 0)


@MANY
def test_equal_gradients_of_a_rank_without_samples_are_not_reported(hvd, caplog):
    model, optimizer = wrapped(hvd)
    optimizer.set_num_samples(hvd.rank() == 0)
    step(hvd, model, optimizer, value=0.5)
    assert not warnings_of(caplog, "hvd.shard_data")


@MANY
@OVERLAPS
@pytest.mark.parametrize("passes", [1, 2])
def test_results_modified_in_place_are_averaged_again(hvd, passes):
    """Also in the last step; equal changes on all ranks, as in clipping, are kept."""
    model, optimizer = wrapped(hvd, backward_passes_per_step=passes)
    for factor, wanted in [(2.0, 2.0), (1.0 + hvd.rank(), (1 + hvd.size()) / 2)]:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.full((2, 64), 0.1 * (1 + hvd.rank())).double()).square().sum().backward()
        average = [p.grad.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()
        for old, parameter, grad in zip(before, model.parameters(), average, strict=True):
            found = parameter.grad / torch.where(grad == 0, 1, grad)
            assert ((found - wanted).abs() < 1e-12)[grad != 0].all()
            assert not torch.equal(old, parameter)
    sums = [p.sum().item() for p in model.parameters()]
    assert hvd.allgather_object(sums) == [sums] * hvd.size()


@MANY
def test_weights_that_never_were_equal_warn_and_then_raise(hvd, caplog):
    model = make_model()
    with torch.no_grad():
        model[0].weight.add_(hvd.rank())
    optimizer = distributed(hvd, model)
    step(hvd, model, optimizer)
    output = warnings_of(caplog, "broadcast_parameters")
    assert len(output) == (hvd.rank() == 0)
    assert not output or "0.weight" in output[0].getMessage()
    with pytest.raises(MismatchError, match=r"from different weights at step 1.*0\.weight"):
        step(hvd, model, optimizer)


@MANY
def test_broadcast_weights_must_not_diverge_again(hvd):
    model = make_model()
    with torch.no_grad():
        model[0].weight.add_(hvd.rank())
    optimizer = distributed(hvd, model)
    step(hvd, model, optimizer)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    step(hvd, model, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + hvd.rank()
    step(hvd, model, optimizer)
    with pytest.raises(MismatchError, match="replicas must be equal"):
        step(hvd, model, optimizer)


@MANY
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("frozen", ["at the wrap", "later"])
def test_frozen_weights_are_part_of_the_replica(hvd, frozen, op):
    model = make_model()
    hvd.broadcast_parameters(model.state_dict())
    model[0].weight.requires_grad_(frozen == "later")
    optimizer = distributed(hvd, model, op=getattr(hvd, op))
    step(hvd, model, optimizer)
    model[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    step(hvd, model, optimizer)
    model[0].weight.data.add_(hvd.rank())
    with pytest.raises(MismatchError, match=r"replicas must be equal.*0\.weight"):
        step(hvd, model, optimizer)


@pytest.fixture
def setting(request, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", request.param)
    return request.param


@MANY
@LAST
@pytest.mark.parametrize("setting", ["warn", "off"], indirect=True)
def test_check_of_weights_can_warn_only_or_be_disabled(setting, hvd, caplog):
    model, optimizer = wrapped(hvd)
    step(hvd, model, optimizer)
    with torch.no_grad():
        model[0].bias.add_(hvd.rank())
    for _ in range(2):
        step(hvd, model, optimizer)
    output = warnings_of(caplog, "replicas must be equal")
    assert len(output) == (hvd.rank() == 0 and setting == "warn")


@MANY
def test_every_byte_of_the_weights_is_compared_eventually(hvd):
    model = nn.Linear(200, 1, bias=False).double()
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model.weight[0, 150] += hvd.rank()

    def step_through_all():
        for _ in range(1 + 200 * 8 // 256):
            optimizer.step()

    with pytest.raises(MismatchError, match="weight"):
        step_through_all()


@MANY
def test_later_of_two_wraps_averages_and_the_earlier_is_rejected(hvd):
    model, earlier = wrapped(hvd)
    later = distributed(hvd, model)
    step(hvd, model, later)
    with pytest.raises(ConfigError, match="step the later one"):
        earlier.step()
