"""Check ``AsyncSGD`` and ``Downpour``: updates of servers, staleness, and stable rates."""

import copy
import logging
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.async_sgd.staleness import stable_rate
from hpctrain.core.errors import ConfigError
from tests.gradients.training import (
    EVERY_SIZE,
    LAST,
    MANY,
    TWO_NODES,
    digits,
    global_batch,
    make_model,
    part_of,
    sgd,
)
from tests.local_sgd.local_methods import num_kinds, weights_of


def delayed_descent(hvd, world, rate: float, num_turns: int, **options):
    """Minimize x^2 / 2 with N alternating ranks: each gradient is N - 1 updates old.

    Return x at the end relative to its start, and the method.
    """
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with hvd.AsyncSGD(model, optimizer, **options) as method:
        for turn in range(num_turns * world.size):
            if turn % world.size == world.rank:
                optimizer.zero_grad()
                (model.weight.square().sum() / 2).backward()
                optimizer.step()
            world.barrier()
    return abs(model.weight.item()), method


@MANY
@LAST
@TWO_NODES
def test_delayed_steps_are_stable_below_the_published_rate_only(hvd, world):
    """A worker reads after its own update; N - 1 others follow before its next one."""
    limit = stable_rate(world.size - 1)
    below, method = delayed_descent(hvd, world, 0.85 * limit, 40, staleness_aware=False)
    above, _ = delayed_descent(hvd, world, 1.2 * limit, 40, staleness_aware=False)
    assert below < 0.1
    assert above > 10
    most = max(method.staleness_histogram)
    assert most == world.size - 1
    assert method.staleness_histogram[most] >= 39


@pytest.mark.ranks(1)
def test_stable_rate_equals_that_of_the_recursion():
    """Compare with the roots of z^(k + 1) - z^k + a: stable if all are inside the unit circle."""
    for delay in range(9):
        limit = stable_rate(delay)
        for factor, is_stable in ((0.99, True), (1.01, False)):
            polynomial = torch.zeros(delay + 1, delay + 1, dtype=torch.float64)
            polynomial[0, 0] = 1.0
            polynomial[0, delay] -= factor * limit
            for row in range(delay):
                polynomial[row + 1, row] = 1.0
            radius = torch.linalg.eigvals(polynomial).abs().max().item()
            assert (radius < 1) is is_stable, (delay, factor)
    assert stable_rate(0, curvature=4.0) == pytest.approx(0.5)
    for wrong in ((1, 0.0), (1, -2.0), (1, float("nan")), (-1, 1.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="must be"):
            stable_rate(*wrong)


@MANY
@LAST
@TWO_NODES
def test_rates_divided_by_staleness_are_stable_and_full_rates_diverge(hvd, world):
    rate = 1.2 * stable_rate(world.size - 1)
    found, _ = delayed_descent(hvd, world, rate, 40)
    assert world.size == 2 or found < 1  # a staleness of 1 leaves the rate unchanged


@pytest.mark.ranks(3)
@LAST
@TWO_NODES
def test_rate_too_large_for_the_measured_staleness_warns_once(hvd, world, caplog):
    with caplog.at_level(logging.WARNING):
        for factor, num_warnings in ((0.9, 0), (1.1, 1)):
            caplog.clear()
            rate = factor * stable_rate(2, curvature=1.0)
            delayed_descent(hvd, world, rate, 6, staleness_aware=False, curvature=1.0)
            assert caplog.text.count("learning rate should be below") == num_warnings


@MANY
def test_every_gradient_is_applied_once_with_the_full_rate(hvd_nodes, world):
    hvd, model = hvd_nodes, nn.Linear(world.size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.AsyncSGD(model, optimizer, staleness_aware=False) as method:
        for step in range(20 + 5 * world.rank):
            assert model.weight[0, world.rank].item() == step  # own updates are visible
            model.weight.grad = torch.zeros_like(model.weight)
            model.weight.grad[0, world.rank] = -1.0
            optimizer.step()
    assert model.weight[0].tolist() == [20.0 + 5 * rank for rank in range(world.size)]
    assert sum(method.total_histogram().values()) == sum(20 + 5 * r for r in range(world.size))


def train(hvd, model, optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        images, labels = part_of(global_batch(step), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("make", ["AsyncSGD", "Downpour"])
def test_method_learns_digits_and_all_ranks_end_with_one_model(hvd_nodes, world, make):
    hvd, model = hvd_nodes, make_model()
    options = {"n_push": 2, "n_fetch": 3, "rate": 0.02} if make == "Downpour" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with getattr(hvd, make)(model, optimizer, **options) as method:
        train(hvd, model, optimizer, 0, 120)
    images, labels = digits()
    assert num_kinds(world, weights_of(model)) == 1
    assert (model(images).argmax(1) == labels).double().mean() > 0.8
    assert sum(method.staleness_histogram.values()) >= 120 // options.get("n_push", 1)


@EVERY_SIZE
def test_downpour_sums_squares_on_the_servers_and_steps_a_replica_between(hvd, world):
    """Compare with Adagrad on one process; only rank 0 takes steps."""
    model, alone = make_model(), make_model()
    local = torch.optim.SGD(model.parameters(), lr=0.05)
    adagrad = torch.optim.Adagrad(alone.parameters(), lr=0.03)
    replica = make_model()
    steps = torch.optim.SGD(replica.parameters(), lr=0.05)
    with hvd.Downpour(model, local, n_push=2, n_fetch=4, rate=0.03) as method:
        for step in range(8 if world.rank == 0 else 0):
            images, labels = global_batch(step)
            assert torch.equal(weights_of(model), weights_of(replica)), step
            for one, how in ((model, local), (replica, steps)):
                how.zero_grad()
                cross_entropy(one(images), labels).backward()
            for theirs, ours in zip(alone.parameters(), replica.parameters(), strict=True):
                grad = ours.grad.clone()
                theirs.grad = grad if step % 2 == 0 else theirs.grad + grad
            local.step()
            steps.step()
            if step % 2:
                adagrad.step()
            if step % 4 == 3:
                replica.load_state_dict(alone.state_dict())
        with method.settled():
            states = method.server_optimizer.state
            for p, own in zip(model.parameters(), alone.parameters(), strict=True):
                if world.rank == 0:
                    assert torch.equal(states[p]["sum"], adagrad.state[own]["sum"])
        assert num_kinds(world, weights_of(model)) == 1
    assert world.rank or torch.equal(weights_of(model), weights_of(alone))


@MANY
@TWO_NODES
def test_first_worker_trains_alone_during_warm_up(hvd, world):
    model = make_model()
    optimizer = sgd(model)
    before, seen = weights_of(model).clone(), 0
    with hvd.Downpour(model, optimizer, warmup_steps=10):
        if world.rank == 0:
            time.sleep(0.15)  # a rank that does not wait reads the first values
        else:
            model(global_batch(0)[0])
            assert not torch.equal(weights_of(model), before)  # fetched, after ten steps
        for step in range(15):
            train(hvd, model, optimizer, step, step + 1)
            seen += 1
    assert seen == 15


def own_elements(world, method_of, loaded, num_steps: int):
    """Push gradients of 1 for this rank's element; return saved state and values."""
    model = nn.Linear(world.size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if loaded:
        model.load_state_dict(loaded[0])
        optimizer.load_state_dict(loaded[1])
    with method_of(model, optimizer) as method:
        if loaded and world.rank == 0:
            world.barrier()  # the others do not wait for this rank: they begin no warm-up
        for _ in range(num_steps):
            optimizer.zero_grad()
            model.weight[0, world.rank].backward()
            optimizer.step()
        if loaded and world.rank:
            world.barrier()
        with method.settled():
            saved = model.state_dict(), optimizer.state_dict()
        saved = copy.deepcopy(saved)  # later gradients must not change it
    assert not any("server_sum" in state for state in optimizer.state.values())
    return saved, model.weight[0].tolist()


@MANY
@TWO_NODES
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_sums_are_restored_with_the_optimizer_and_every_gradient_counts(hvd, world, warmup_steps):
    def method_of(model, optimizer):
        return hvd.Downpour(model, optimizer, rate=0.1, warmup_steps=warmup_steps)

    exact = -0.1 * sum(step**-0.5 for step in range(1, 13))
    saved, _ = own_elements(world, method_of, None, 6)
    _, found = own_elements(world, method_of, saved, 6)
    assert found == pytest.approx([exact] * world.size)
    _, whole = own_elements(world, method_of, None, 12)
    assert whole == pytest.approx([exact] * world.size)


@MANY
@TWO_NODES
def test_state_of_servers_is_restored_bitwise(hvd):
    model = make_model()
    optimizer = sgd(model)
    method = hvd.Downpour(model, optimizer, n_fetch=2)
    with method:
        train(hvd, model, optimizer, 0, 7)
        with method.settled():
            weights = weights_of(model).clone()
            state = optimizer.state_dict()
            sums = [one["server_sum"] for one in state["state"].values()]
    again = hvd.Downpour(model, optimizer, n_fetch=2)
    train(hvd, model, optimizer, 0, 2)
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights, model.parameters())
    optimizer.load_state_dict(state)
    again.reload()
    with again.settled():
        assert torch.equal(weights_of(model), weights)
        found = again.server_optimizer.state_dict()["state"].values()
        assert all(torch.equal(a["sum"], b) for a, b in zip(found, sums, strict=True))
    again.finish()
    again.close()


@MANY
@TWO_NODES
def test_most_ahead_bounds_workers_that_do_not_wait_otherwise(hvd, world):
    model = nn.Linear(world.size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.AsyncSGD(model, optimizer, most_ahead=2, staleness_aware=False):
        for step in range(30):
            assert model.weight.min().item() >= step - 2
            model.weight.grad = torch.zeros_like(model.weight)
            model.weight.grad[0, world.rank] = -1.0
            optimizer.step()


@pytest.mark.ranks(2)
@LAST
def test_arguments_are_checked(hvd):
    model = make_model()
    optimizer = sgd(model)
    for options in ({"n_push": 0}, {"n_fetch": 1.5}, {"rate": 0.0}, {"warmup_steps": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            hvd.Downpour(model, optimizer, **options)
    with pytest.raises(ConfigError, match="most_ahead"):
        hvd.AsyncSGD(model, optimizer, most_ahead=-1)
