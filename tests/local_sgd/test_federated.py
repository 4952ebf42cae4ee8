"""Federated rounds: a weighted mean over drawn ranks, with a proximal term."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.local_sgd.federated import Draw
from tests.gradients.training import digits, make_model, sgd
from tests.local_sgd.local_methods import Normed, Run, adam, num_kinds, replica_of, weights_of

EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)
MANY = pytest.mark.ranks(2, 3, 4)
FEW = pytest.mark.ranks(2, 3)

NUM_STEPS, ROUND = 8, 3


def samples_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a rank in a step; number and digits differ between ranks."""
    images, labels = digits()
    mine = torch.nonzero(labels % 4 == rank)[:, 0]
    chosen = mine[(step * 7 + torch.arange(3 + 2 * rank + step % 2)) % len(mine)]
    return images[chosen], labels[chosen]


def learn(model, optimizer, rank: int, step: int, start=None, mu: float = 0.0) -> int:
    """Take a step with torch alone; with ``start``, the loss has the proximal term."""
    images, labels = samples_of(rank, step)
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    if start is not None:
        pairs = zip(model.parameters(), start, strict=True)
        loss = loss + mu / 2 * sum((p - own).square().sum() for p, own in pairs)
    loss.backward()
    optimizer.step()
    return len(labels)


def oracle(size: int, draws: Draw, make, mu: float, state: str) -> torch.Tensor:
    """Return the weights that one process computes with the replicas of all ranks."""
    shared = make_model()
    models = [copy.deepcopy(shared) for _ in range(size)]
    optimizers = [make(model) for model in models]
    for number, first in enumerate(range(0, NUM_STEPS, ROUND)):
        start = [p.detach().clone() for p in shared.parameters()]
        counts, sums = {}, [torch.zeros_like(p) for p in start]
        for rank in draws.ranks(number):
            model = models[rank]
            model.load_state_dict(shared.state_dict())
            steps = range(first, min(first + ROUND, NUM_STEPS))
            count = sum(learn(model, optimizers[rank], rank, s, start, mu) for s in steps)
            counts[rank] = count
            for of_one, p in zip(sums, model.parameters(), strict=True):
                of_one.add_(p.detach(), alpha=count)
        total = sum(counts.values())
        with torch.no_grad():
            for p, of_one in zip(shared.parameters(), sums, strict=True):
                p.copy_(of_one / total)
        if state == "reset":
            optimizers = [make(model) for model in models]
        if state == "average":
            share_state(models, optimizers, {rank: counts[rank] / total for rank in counts})
    return weights_of(shared)


def share_state(models, optimizers, weights: dict[int, float]) -> None:
    """Set the momentum of all ranks to the weighted mean of some ranks."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(
            weight * optimizers[rank].state[parameters[rank]]["momentum_buffer"]
            for rank, weight in weights.items()
        )
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = mean.clone()


@EVERY_SIZE
@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("LocalSGD", {"fraction": 0.5, "proximal": 0.3}, sgd),
        ("LocalSGD", {"fraction": 0.7, "proximal": 0.3, "state": "reset", "seed": 3}, adam),
        ("LocalSGD", {"fraction": 0.5, "state": "average"}, sgd),
        ("PostLocalSGD", {"start": 0, "fraction": 0.01}, adam),
        ("HierarchicalLocalSGD", {"node_steps": 9, "proximal": 2.0}, sgd),
        ("DiLoCo", {"outer_lr": 1, "outer_momentum": 0, "fraction": 0.5, "proximal": 0.3}, sgd),
    ],
)
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_round_is_the_sample_weighted_mean_of_the_drawn_ranks(
    world, hvd_nodes, name, options, make, leaves_out
):
    run = Run(hvd_nodes, name, ROUND, optimizer=make, **options)
    rank, size = world.rank, world.size
    fraction = options.get("fraction", 1.0)
    draws = Draw(rank, size, fraction, options.get("seed", 0))
    drawn = []
    with run.method as method:
        for step in range(NUM_STEPS):
            method.set_num_samples(len(samples_of(rank, step)[1]), nominal=7)
            drawn.append(method.takes_part)
            assert fraction == 1 or method.facts["drawn"] == draws.ranks(step // ROUND)
            if leaves_out and not method.takes_part:
                method.skip_step()
            else:
                learn(run.model, run.optimizer, rank, step)
    wanted = oracle(size, draws, make, options.get("proximal", 0.0), options.get("state", "local"))
    torch.testing.assert_close(run.weights, wanted, rtol=1e-12, atol=1e-12)
    assert run.num_kinds(world) == 1
    for of_ranks in zip(*world.allgather(drawn), strict=True):
        assert sum(of_ranks) == max(1, math.floor(fraction * size + 0.5))


@FEW
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_step_of_a_rank_that_is_not_drawn_changes_nothing_but_gradients(world, hvd_nodes, make):
    run = Run(hvd_nodes, "LocalSGD", 5, optimizer=make, fraction=0.2, proximal=0.1)
    learn(run.model, run.optimizer, world.rank, 0)
    before = run.replica
    learn(run.model, run.optimizer, world.rank, 1)
    assert torch.equal(before, run.replica) is not run.method.takes_part
    model = copy.deepcopy(run.model)
    gradients = [p.grad for p in run.model.parameters()]
    if not run.method.takes_part:
        learn(model, make(model), world.rank, 1)
        for own, other in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(own, other.grad)
    assert all(g is not None for g in gradients)
    run.method.finish()
    assert run.num_kinds(world) == 1
    run.method.close()


@EVERY_SIZE
def test_full_participation_without_proximal_term_has_the_bits_of_local_sgd(hvd_nodes):
    ends = [
        Run(hvd_nodes, "LocalSGD", 3, model=Normed(), **options).end(7)
        for options in ({}, {"fraction": 1, "seed": 9, "proximal": 0})
    ]
    assert torch.equal(*ends)


@MANY
@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo"])
def test_a_round_whose_drawn_ranks_have_no_samples_keeps_the_model(world, hvd_nodes, name):
    run = Run(hvd_nodes, name, 2, fraction=0.5)
    before = run.weights
    with run.method as method:
        for step in range(4):
            method.set_num_samples(0 if method.takes_part else 5)
            learn(run.model, run.optimizer, world.rank, step)
            torch.testing.assert_close(run.weights, before, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(run.weights, before, rtol=1e-15, atol=1e-15)
    assert run.num_kinds(world) == 1


@FEW
def test_a_larger_proximal_term_reduces_the_drift_of_different_data(world, hvd_nodes):
    drifts = []
    for proximal in (0.0, 0.1, 1.0, 10.0):
        run = Run(hvd_nodes, "LocalSGD", 40, proximal=proximal)
        for step in range(40):
            learn(run.model, run.optimizer, world.rank, step)
        run.method.rounds.synchronize()
        drifts.append(run.method.facts["drift"])
        run.method.close()
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[-1] < drifts[0] / 2


@FEW
@pytest.mark.parametrize(
    ("name", "maximize"),
    [("LocalSGD", True), ("HierarchicalLocalSGD", False), ("PostLocalSGD", False)],
)
def test_the_proximal_term_pulls_to_the_model_of_the_round_with_scaler_and_maximize(
    hvd, name, maximize
):
    """After two steps with a gradient the loss is constant, so only the term moves the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, maximize=maximize, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    start = model.weight.detach().clone()
    options = {"start": 1} if name == "PostLocalSGD" else {}
    with getattr(hvd, name)(model, optimizer, 9, proximal=0.5, **options):
        for push in (1.0, 1.0, 0.0, 0.0):
            optimizer.zero_grad()
            scaler.scale((model.weight * push).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        sign = 1 if maximize else -1
        moved = sign * (0.5 + 0.5 * 0.75**2 if options else (0.5 * 0.75 + 0.5) * 0.75**2)
        torch.testing.assert_close(model.weight.detach(), start + moved)


@pytest.mark.ranks(3, 4)
def test_drift_is_the_mean_distance_of_the_drawn_ranks(world, hvd_nodes):
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd_nodes.LocalSGD(model, optimizer, 1, fraction=0.5) as method:
        for _ in range(2):  # ranks exchange the distances of a round at the end of the next round
            optimizer.zero_grad()
            (model.weight.sum() * world.rank).backward()
            optimizer.step()
        drawn = torch.tensor(Draw(world.rank, world.size, 0.5).ranks(0), dtype=torch.float64)
        assert len(drawn) == 2
        assert method.facts["drift"] == pytest.approx(drawn.std(correction=0).item(), rel=1e-9)


def test_ranks_are_drawn_uniformly_and_depend_on_the_seed():
    for size, fraction, num in ((7, 0.4, 3), (2, 0.1, 1), (5, 0.5, 3), (100, 0.29, 29)):
        draws = Draw(0, size, fraction, 1)
        assert {len(draws.ranks(number)) for number in range(50)} == {num}
        counts = [0] * size
        for number in range(2000):
            for rank in draws.ranks(number):
                counts[rank] += 1
        expected = 2000 * num / size
        assert max(abs(count - expected) for count in counts) < 5 * math.sqrt(expected)
    draws, others = Draw(0, 7, 0.4, 1), Draw(0, 7, 0.4, 2)
    assert [draws.ranks(n) for n in range(9)] != [others.ranks(n) for n in range(9)]
    others.load_shared_state(draws.shared_state())
    assert [draws.ranks(n) for n in range(9)] == [others.ranks(n) for n in range(9)]


@FEW
def test_a_state_restores_seed_and_round_and_old_states_can_be_loaded(world, hvd_nodes):
    options = {"fraction": 0.5, "proximal": 0.1}
    run = Run(hvd_nodes, "LocalSGD", 2, seed=11, **options).to(5)
    shared, own = run.method.shared_state(), run.method.own_state()
    drawn = run.method.facts["drawn"]
    run.method.close()
    assert drawn == Draw(world.rank, world.size, 0.5, 11).ranks(2)
    again = Run(hvd_nodes, "LocalSGD", 2, **options)
    again.method.load_shared_state(shared)
    assert again.method.facts["drawn"] == drawn
    del shared["draw"], own["round_model"]
    again.method.load_shared_state(shared)
    again.method.load_own_state(own)
    again.to(3).method.close()


WRONG = [
    ({"fraction": 0}, "above 0 and at most 1, got 0"),
    ({"fraction": 1.5}, "got 1.5"),
    ({"fraction": float("nan")}, "got nan"),
    ({"fraction": "half"}, "got 'half'"),
    ({"fraction": True}, "got True"),
    ({"proximal": -1}, "at least 0, got -1"),
    ({"proximal": float("inf")}, "got inf"),
    ({"seed": 1.5}, "seed must be an integer"),
]


@MANY
def test_invalid_or_different_arguments_are_rejected_on_every_rank(world, hvd_nodes):
    for options, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            Run(hvd_nodes, "LocalSGD", 2, **(options if world.rank == 1 else {}))
    for options in ({"fraction": 0.5}, {"seed": 1}, {"proximal": 0.1}):
        with pytest.raises(MismatchError, match="give all ranks the same"):
            Run(hvd_nodes, "DiLoCo", 2, **(options if world.rank == 1 else {}))
    for name, options in (
        ("HierarchicalLocalSGD", {"fraction": 0.5}),
        ("DiLoCo", {"fraction": 0.5, "fragments": 2}),
        ("DiLoCo", {"proximal": 0.5, "delay": 1}),
        ("DiLoCo", {"proximal": 0.5, "keep": 0.5}),
    ):
        with pytest.raises(ConfigError, match="fraction"):
            Run(hvd_nodes, name, 4, **options)
    run = Run(hvd_nodes, "LocalSGD", 2, fraction=0.5)
    with pytest.raises(ConfigError, match="without a closure"):
        run.optimizer.step(lambda: torch.zeros(()))
    run.method.close()
    assert num_kinds(world, replica_of(run.model, run.optimizer)) == 1
    other = ("DiLoCo", "LocalSGD")[world.rank == 1]
    own = {"state": "average" if world.rank else "local"}
    for name, options in ((other, {}), ("LocalSGD", own)):
        with pytest.raises(MismatchError, match=r"method, state, .* give all ranks the same"):
            Run(hvd_nodes, name, 2, **options)


@MANY
def test_inconsistent_numbers_of_samples_are_an_error_on_every_rank(world, hvd_nodes):
    rank = world.rank
    for output, message in (
        ([(5, 4 + rank)] * 2, "nominal of set_num_samples must be the same on every rank, but"),
        (
            [(5, 4), (5, 4) if rank else None],
            "must precede every step that a rank takes, but",
        ),
        ([(5, 4) if rank else None] * 2, r"have called it; call .* before skip_step\(\)"),
    ):
        run = Run(hvd_nodes, "LocalSGD", 3)
        for step, given in enumerate(output):
            if given:
                run.method.set_num_samples(*given)
            learn(run.model, run.optimizer, rank, step)
        with pytest.raises(MismatchError, match=message):
            run.method.finish()
        run.method.close()
    run = Run(hvd_nodes, "LocalSGD", 2)
    # identical calls on all ranks are valid, although only every second step has a number
    with run.method as method:
        for step in range(4):
            if step % 2 == 0:
                method.set_num_samples(1 + rank, nominal=0.1)
            learn(run.model, run.optimizer, rank, step)
    assert run.num_kinds(world) == 1


@MANY
def test_a_last_round_without_samples_takes_no_outer_step(world, hvd_nodes):
    run = Run(hvd_nodes, "DiLoCo", 1, fraction=0.5, model=Normed())
    before = run.weights
    with run.method as method:
        for step in range(3):
            method.set_num_samples(0 if step == 2 else 3, nominal=4)
            learn(run.model, run.optimizer, world.rank, step)
            before = run.weights if step < 2 else before
    assert torch.equal(run.weights, before)
    assert num_kinds(world, replica_of(run.model, sgd(run.model))) == 1
