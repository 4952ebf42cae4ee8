"""Norms, clipping and optimizers over the whole range of a dtype."""

import copy
import math

import pytest
import torch

import hpctrain
from hpctrain.comm.norms import clip_grad_norm_, norms, row_norms, total_norm
from hpctrain.optim import LAMB, LARS, NoiseScale
from hpctrain.parallel import shard
from hpctrain.parallel.dtensor import whole

SIZES = (1e-45, 1e-40, 1e-25, 1e-19, 1.0, 1e19, 1e25, 1e37, 3.3e38)
BY_SIZE = pytest.mark.parametrize("size", SIZES)


def values(size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    found = torch.rand(30, 20, generator=generator, dtype=torch.float64) * 2 - 1
    return (found * size).to(dtype)


@BY_SIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_equal_those_in_float64(size, dtype, order):
    tensors = [values(size, dtype), values(1.0, dtype), torch.zeros(3, dtype=dtype)]
    wide = [tensor.double() for tensor in tensors]
    near = {"rtol": 1e-5 if dtype is torch.float32 else 2e-2, "atol": 0.0}
    assert torch.allclose(norms(tensors), torch.stack([each.norm() for each in wide]), **near)
    assert torch.allclose(row_norms(tensors[0]), wide[0].norm(dim=1), **near)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    total = total_norm(tensors[:1], order)
    expected = torch.linalg.vector_norm(wide[0], order)
    assert torch.allclose(total.double(), expected, rtol=near["rtol"], atol=2.0 * least)
    assert total.dtype is (dtype if expected.to(dtype).isfinite() else torch.float64)


def test_an_ordinary_norm_has_the_same_bits_as_in_torch():
    tensors = [values(size) for size in (1e-9, 1.0, 1e9)]
    for order in (1.0, 2.0, math.inf):
        assert torch.equal(
            total_norm(tensors, order), torch.nn.utils.get_total_norm(tensors, order)
        )
    assert total_norm([]) == 0.0
    for bad in (math.inf, math.nan):
        assert not total_norm([torch.tensor([1.0, bad])]).isfinite()


@BY_SIZE
def test_clipped_gradients_have_the_norm_and_the_direction(size):
    parameter = torch.nn.Parameter(torch.zeros(30, 20))
    parameter.grad = values(size)
    exact = parameter.grad.double()
    before = clip_grad_norm_([parameter], 1e-3)
    expected = exact * min(1.0, 1e-3 / float(exact.norm() + 1e-6))
    assert before.item() == pytest.approx(float(exact.norm()), rel=1e-5, abs=1e-44)
    assert torch.allclose(parameter.grad.double(), expected, rtol=1e-2, atol=1e-44)


def optimizers_of(kind):
    if kind == "parallel":
        yield lambda model, plain: shard(model, plain, stage=2)
        return
    for options in ({}, {"shard": "node"}, {"compression": "int8"}, {"op": hpctrain.Sum}):
        yield lambda _, plain, options=options: hpctrain.DistributedOptimizer(plain, **options)


@pytest.mark.ranks(2, 3)
@pytest.mark.requires("torch-2.7")
@pytest.mark.parametrize("kind", ["averaging", "parallel"])
def test_every_optimizer_clips_gradients_of_any_size(kind, gloo):  # noqa: ARG001
    hpctrain.init()
    for make in optimizers_of(kind):
        for size in (1e-30, 1.0, 1e25, 1e37):
            torch.manual_seed(0)
            model = torch.nn.Linear(20, 30, bias=False)
            start = model.weight.detach().clone()
            optimizer = make(model, torch.optim.SGD(model.parameters(), lr=1.0))
            (model(torch.eye(20)) * (values(size).T + 0.0)).sum().backward()
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            moved = (start - whole(model.state_dict()["weight"])).double()
            exact = values(size).double()
            assert math.isfinite(float(norm))
            assert moved.isfinite().all()
            if size >= 1.0:
                assert torch.allclose(moved, exact / exact.norm(), rtol=0.05, atol=2e-3)
    hpctrain.shutdown()


@pytest.mark.parametrize("weights", [1e-30, 1.0, 1e19, 1e30])
@BY_SIZE
def test_lars_steps_as_in_float64(size, weights):
    found = []
    for dtype in (torch.float32, torch.float64):
        parameter = torch.nn.Parameter(values(weights).to(dtype))
        optimizer = LARS([parameter], lr=0.5, momentum=0.9, weight_decay=1e-3)
        for _ in range(3):
            parameter.grad = values(size).flip(0).to(dtype)
            optimizer.step()
        found.append(parameter.detach().double())
    assert found[0].isfinite().all()
    rough = 0.5 if size < 1e-39 else 1e-4  # a subnormal gradient has few significant bits
    assert float((found[0] - found[1]).abs().max()) <= rough * 0.01 * weights


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("weights", [1e-30, 1.0, 1e19, 1e30])
@BY_SIZE
def test_lamb_stays_finite_and_steps_in_proportion_to_the_weights(size, weights, eps):
    parameter = torch.nn.Parameter(values(weights))
    optimizer = LAMB([parameter], lr=0.1, eps=eps)
    for step in range(4):
        before = parameter.detach().double()
        parameter.grad = values(size).flip(0) if step < 3 else torch.zeros(30, 20)
        optimizer.step()
        after = parameter.detach().double()
        assert after.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[parameter].values())
        if size > 1e-40:
            assert float((after - before).norm() / before.norm()) == pytest.approx(0.1, rel=0.01)
    states = copy.deepcopy(optimizer.state_dict())
    assert all(value.isfinite().all() for value in states["state"][0].values())


@BY_SIZE
def test_lamb_without_adaptation_moves_each_weight_by_the_learning_rate(size):
    parameter = torch.nn.Parameter(torch.zeros(30, 20))
    optimizer = LAMB([parameter], lr=0.1, eps=0.0, adapt=False)
    for step in range(3):
        parameter.grad = torch.full((30, 20), size)
        optimizer.step()
        if size > 1e-19:  # squares of smaller gradients are subnormal or zero
            assert torch.allclose(parameter, torch.tensor(-0.1 * (step + 1)), rtol=0.01)


@pytest.mark.ranks(2, 3)
def test_noise_of_gradients_of_any_size_is_measured():
    hpctrain.init()
    for size in (1e-25, 1.0, 1e25, 1e37):
        weights, noise = torch.nn.Parameter(torch.zeros(30, 20)), NoiseScale()
        plain = torch.optim.SGD([weights], lr=0.0)
        optimizer = hpctrain.DistributedOptimizer(plain)
        hpctrain.watch_noise(optimizer, noise)
        (weights * values(size)).sum().backward()
        optimizer.step()
        square = float(values(size).double().square().sum())
        assert noise.sums[2].item() == pytest.approx(square, rel=1e-4)
        assert noise.sums[5].item() == pytest.approx(square * hpctrain.size(), rel=1e-4)
    hpctrain.shutdown()
