"""LARS and LAMB take the steps of their papers and of timm."""

import json
from copy import deepcopy
from itertools import chain

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ConfigError
from hpctrain.optim import LAMB, LARS, exclusions
from tests.optim.timm_steps import CASES, DTYPES, FILE, trajectory

BOTH = pytest.mark.parametrize("kind", [LARS, LAMB])
TIMM = json.loads(FILE.read_text())


def weights_of(*sizes, dtype=torch.float64, factor=1.0):
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
    return [(factor * each).to(dtype).requires_grad_() for each in drawn]


def step(optimizer, weights, seed=1, factor=1.0):
    """Take a step with random gradients; return the change of each weight."""
    random = torch.Generator().manual_seed(seed)
    before = [w.detach().clone() for w in weights]
    for w in weights:
        drawn = torch.randn(w.shape, generator=random, dtype=torch.float64)
        w.grad = (factor * drawn).to(w.dtype)
    optimizer.step()
    return [w.detach() - b for w, b in zip(weights, before, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_equal_those_of_timm(case, dtype):
    kind = LARS if case.startswith("LARS") else LAMB
    make, falls = lambda weights: kind(weights, **CASES[case][0]), "falls" in case
    found = trajectory(make, DTYPES[dtype], falls=falls)
    within = 1e-10 if dtype == "float64" else 1e-6
    for one, other in zip(found, TIMM[f"{case}, {dtype}"], strict=True):
        assert one == pytest.approx(other, rel=within, abs=within)


def test_the_length_of_a_step_follows_rate_trust_coefficient_and_weights():
    for kind, options, num_steps in ((LARS, {"trust_coefficient": 0.02}, 1), (LAMB, {}, 5)):
        weights = weights_of((4, 3), (5,))
        optimizer = kind(weights, lr=0.7, weight_decay=0.0 if kind is LARS else 0.02, **options)
        for number in range(num_steps):
            before = [w.detach().norm() for w in weights]
            for moved, norm in zip(step(optimizer, weights, number), before, strict=True):
                length = 0.7 * options.get("trust_coefficient", 1.0)
                assert float(moved.norm() / norm) == pytest.approx(length, rel=1e-12)


@BOTH
@pytest.mark.parametrize(("c", "of_grads"), [(1.0, 1024.0), (8.0, 1 / 8)])
def test_steps_scale_with_the_weights_and_not_with_the_loss(kind, c, of_grads):
    options, found = {} if kind is LARS else {"eps": 0.0}, []
    for factor, times in ((1.0, 1.0), (c, of_grads)):
        weights = weights_of((4, 3), (5,), factor=factor)
        optimizer = kind(weights, lr=0.1, **options)
        found.append([step(optimizer, weights, number, times) for number in range(5)])
    for one, other in zip(*map(chain.from_iterable, found), strict=True):
        torch.testing.assert_close(c * one, other, rtol=1e-12, atol=1e-15)


@BOTH
def test_zero_weights_and_zero_gradients_have_a_ratio_of_one(kind):
    weights = [torch.zeros(3, dtype=torch.float64).requires_grad_(), *weights_of(3)]
    weights[0].grad, weights[1].grad = torch.ones_like(weights[0]), torch.zeros_like(weights[1])
    before = weights[1].detach().clone()
    kind(weights, lr=0.5).step()
    expected = torch.full_like(before, -0.5)
    torch.testing.assert_close(weights[0].detach(), expected, rtol=1e-5, atol=0)
    assert torch.equal(weights[1].detach(), before)


def test_only_phi_clips_the_norms_of_weights():
    for phi, length in (((0.0, 2.0), 2.0), ((50.0, 90.0), 50.0), (None, 6.0)):
        weight = torch.tensor([6.0, 0.0], dtype=torch.float64).requires_grad_()
        optimizer = LAMB([weight], lr=0.1, phi=phi)
        [moved] = step(optimizer, [weight])
        assert float(moved.norm()) == pytest.approx(0.1 * length, rel=1e-12)


@pytest.mark.parametrize("corrects", [False, True])
def test_momentum_correction_rescales_the_velocity(corrects):
    """The reference follows the two papers: the velocity contains the rate."""
    rates = [0.5, 1.0, 2.0, 2.0, 1.0, 0.25]
    [weights] = weights_of((4, 3))
    by_hand, v = weights.detach().clone(), torch.zeros_like(weights)
    optimizer = LARS([weights], 1.0, 0.9, 0.1, 0.02, momentum_correction=corrects)
    for number, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        step(optimizer, [weights], number)
        before = rates[max(number - 1, 0)]
        ratio = 0.02 * by_hand.norm() / (weights.grad.norm() + 0.1 * by_hand.norm())
        v = 0.9 * v * (lr / before if corrects else 1.0)
        v += lr * ratio * (weights.grad + 0.1 * by_hand)
        by_hand -= v
        torch.testing.assert_close(weights.detach(), by_hand, rtol=1e-12, atol=1e-14)


@BOTH
def test_exclusions_take_plain_steps(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    groups = exclusions(model)
    assert [(len(g["params"]), g.get("adapt"), g.get("weight_decay")) for g in groups] == [
        (2, None, None),
        (4, False, 0.0),
    ]
    optimizer = kind(groups, lr=0.1, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name in ("0.bias", "1.weight", "1.bias", "2.bias"):
        moved = dict(model.named_parameters())[name].detach() - before[name]
        torch.testing.assert_close(moved, torch.full_like(moved, -0.1), rtol=1e-5, atol=0)
    plain = exclusions(model, weight_decay=0)
    assert torch.optim.AdamW(plain).param_groups[1]["weight_decay"] == 0


@BOTH
def test_a_loaded_state_continues_with_the_same_bits(kind):
    weights = weights_of((4, 3), (5,))
    optimizer = kind(weights, lr=0.1, weight_decay=0.1)
    for number in range(3):
        step(optimizer, weights, number)
    state, copies = deepcopy(optimizer.state_dict()), [w.detach().clone() for w in weights]
    state["state"] = {n: dict(reversed(s.items())) for n, s in state["state"].items()}
    other = kind([c.requires_grad_() for c in copies], lr=0.5)
    other.load_state_dict(state)
    for number in range(3, 6):
        step(optimizer, weights, number)
        step(other, copies, number)
    assert all(map(torch.equal, weights, copies))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bit_weights_are_computed_in_float32(kind, dtype):
    """The norm of these weights overflows float16, and bfloat16 would round it to 1 %."""
    sixteen = weights_of((200, 300), dtype=dtype, factor=300.0)
    wide = [w.detach().float().requires_grad_() for w in sixteen]
    options = {"lr": 0.5, **({"trust_coefficient": 1.0} if kind is LARS else {})}
    moved = [step(kind(w, **options), w)[0].float() for w in (sixteen, wide)]
    assert moved[0].isfinite().all()
    assert float(moved[0].norm() / moved[1].norm()) == pytest.approx(1, abs=3e-3)
    assert sixteen[0].dtype is dtype


@BOTH
def test_complex_weights_are_stepped_as_pairs_of_real_numbers(kind):
    real = weights_of((4, 3, 2))
    whole = [torch.view_as_complex(w.detach().clone()).requires_grad_() for w in real]
    optimizers = kind(real, lr=0.1, weight_decay=0.1), kind(whole, lr=0.1, weight_decay=0.1)
    for number in range(3):
        step(optimizers[0], real, number)
        whole[0].grad = torch.view_as_complex(real[0].grad)
        optimizers[1].step()
    assert torch.equal(torch.view_as_real(whole[0].detach()), real[0].detach())


@BOTH
def test_sparse_gradients_are_rejected_before_any_change(kind):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = kind([*reversed([*model.parameters()])], lr=0.1)
    before = deepcopy(model.state_dict())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__} must get dense gradients.* sparse=False"
    ):
        optimizer.step()
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not optimizer.state


@BOTH
def test_a_closure_is_called_and_weights_without_gradient_do_not_change(kind):
    weights = weights_of(3, 3)
    optimizer = kind(weights, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weights[0].square().sum()
        loss.backward()
        return loss

    before = weights[1].detach().clone()
    assert torch.equal(optimizer.step(closure), weights_of(3)[0].square().sum())
    assert torch.equal(weights[1].detach(), before)
    assert weights[1] not in optimizer.state


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"lr": -1.0}, "lr must be at least 0, got -1"),
        (LARS, {"momentum": 1.0}, "momentum must be below 1, got 1.0"),
        (LARS, {"trust_coefficient": 0.0}, "trust_coefficient must be above 0, got 0.0"),
        (LARS, {"momentum": 0.0, "nesterov": True}, "momentum must be above 0 with nesterov"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
        (LAMB, {"betas": (0.9, 1.0)}, "betas must be two numbers"),
        (LAMB, {"phi": (2.0, 1.0)}, "phi must be None, or the smallest and largest norm"),
        (LAMB, {"eps": -1.0}, "eps must be at least 0"),
    ],
)
def test_invalid_arguments_are_rejected_also_in_groups(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(weights_of(3), **{"lr": 0.1, **options})
    with pytest.raises(ConfigError, match=message):
        kind([{"params": weights_of(3), **options}], lr=0.1)
