"""Laws of local SGD: what equals synchronous training, what is averaged, and by which weights."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import NotFiniteError
from tests.gradients.training import make_model, sgd, train_alone
from tests.local_sgd.local_methods import Normed, num_kinds, train, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 4)


def gap(model: nn.Module, other: nn.Module) -> float:
    return float((weights_of(model) - weights_of(other)).abs().max())


@SIZES
@pytest.mark.parametrize("steps", [1, 4])
def test_on_a_quadratic_with_one_hessian_any_number_of_steps_is_mini_batch_sgd(hvd_nodes, steps):
    """Gradients are affine in the parameters, so the mean of runs is the run by mean gradients."""
    hvd, lr, num_steps = hvd_nodes, 0.1, 15
    generator = torch.Generator().manual_seed(3)
    half = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    hessian = half @ half.T / 6 + torch.eye(6, dtype=torch.float64)
    noise = torch.randn(num_steps, hvd.size(), 6, generator=generator, dtype=torch.float64)
    whole = torch.zeros(6, dtype=torch.float64)
    for of_ranks in noise:
        whole -= lr * (hessian @ whole - of_ranks.mean(dim=0))
    model = nn.Linear(6, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with hvd.LocalSGD(model, optimizer, steps):
        for step in range(num_steps):
            optimizer.zero_grad()
            x = model.weight[0]
            (x @ hessian @ x / 2 - x @ noise[step, hvd.rank()]).backward()
            optimizer.step()
    assert float((model.weight.detach()[0] - whole).abs().max()) < 1e-12


@SIZES
def test_one_step_with_averaged_momentum_is_synchronous_sgd(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 1, state="average") as method:
        train(hvd_nodes, model, optimizer, method, 0, 12)
    assert gap(model, train_alone(12)) < 1e-12


@pytest.mark.ranks(1)
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_one_rank_is_the_plain_loop_bit_for_bit(hvd_nodes, compression):
    model = make_model()
    optimizer = sgd(model)
    compression = getattr(hvd_nodes.Compression, compression)
    with hvd_nodes.LocalSGD(model, optimizer, 3, compression=compression) as method:
        train(hvd_nodes, model, optimizer, method, 0, 10)
    if compression is hvd_nodes.Compression.none:
        assert gap(model, train_alone(10)) == 0
    else:
        assert gap(model, train_alone(10)) < 1e-3


@MANY
def test_ranks_part_in_a_round_and_drift_is_their_distance_from_the_mean(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 4)
    train(hvd_nodes, model, optimizer, method, 0, 3)
    assert num_kinds(world, weights_of(model)) == world.size
    others = world.allgather(weights_of(model))
    train(hvd_nodes, model, optimizer, method, 3, 4)
    assert num_kinds(world, weights_of(model)) == 1
    assert method.facts["rounds"] == 1
    assert method.facts["drift"] == 0.0  # of the last round: all ranks know it at the next
    train(hvd_nodes, model, optimizer, method, 4, 8)
    mean = sum(others) / world.size
    spread = (sum(float((w - mean).square().sum()) for w in others) / world.size) ** 0.5
    assert spread < method.facts["drift"] < 3 * spread  # one more step, and another batch


@MANY
def test_what_is_not_finite_is_an_error_that_names_rank_and_parameter(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 2)
    train(hvd_nodes, model, optimizer, method, 0, 1)
    if world.rank == 1:
        with torch.no_grad():
            model[2].weight[3, 4] = float("nan")
    with pytest.raises(NotFiniteError, match=r"rank 1: 2\.weight"):
        method.skip_step()


@MANY
def test_statistics_are_averaged_and_counters_stay(world, hvd_nodes):
    model = Normed()
    optimizer = sgd(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 2)
    train(hvd_nodes, model, optimizer, method, 0, 1)
    own = dict(model.named_buffers())["layers.1.running_mean"].clone()
    assert num_kinds(world, own) == world.size
    train(hvd_nodes, model, optimizer, method, 1, 2)
    buffers = dict(model.named_buffers())
    means = world.allgather(buffers["layers.1.running_mean"])
    assert len({mean.numpy().tobytes() for mean in means}) == 1
    assert buffers["layers.1.num_batches_tracked"].item() == 2


@MANY
@pytest.mark.parametrize("state", ["local", "average", "reset"])
def test_momentum_is_local_averaged_or_forgotten(world, hvd_nodes, state):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 2, state=state)
    train(hvd_nodes, model, optimizer, method, 0, 2)
    own = [s["momentum_buffer"].numpy().tobytes() for s in optimizer.state.values()]
    kinds = len(set(world.allgather(b"".join(own))))
    expected = {"local": (6, world.size), "average": (6, 1), "reset": (0, 1)}
    assert (len(own), kinds) == expected[state]


@MANY
def test_half_precision_sends_half_the_bytes_and_loses_little(hvd_nodes):
    found = {}
    for name in ("none", "bf16", "fp16"):
        model = make_model(torch.float32)
        optimizer = sgd(model)
        compression = getattr(hvd_nodes.Compression, name)
        with hvd_nodes.LocalSGD(model, optimizer, 4, compression=compression) as method:
            train(hvd_nodes, model, optimizer, method, 0, 20)
            found[name] = method.facts["bytes_sent"], weights_of(model)
    sent, weights = found["none"]
    for name, most in (("bf16", 4e-3), ("fp16", 5e-4)):
        assert found[name][0] * 2 == sent
        moved = weights - weights_of(make_model(torch.float32))
        assert float((found[name][1] - weights).norm() / moved.norm()) < most


@MANY
def test_the_last_steps_of_a_block_that_fails_are_not_averaged(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 4)

    def fail() -> None:
        with method:
            train(hvd_nodes, model, optimizer, method, 0, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert num_kinds(world, weights_of(model)) == world.size
    optimizer.step()
    assert method.rounds.step == 2  # the hooks are gone


@SIZES
def test_the_error_falls_with_the_number_of_ranks(world, hvd_nodes):
    """K ranks need a K-th of the steps.

    With steps a/t on x^2/2 and gradients of variance 1, T K E[x^2] -> a^2 / (2 a - 1).
    """
    num_steps, dim, a = 128, 4000, 2.0
    model = nn.Linear(dim, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: a / (step + 2 * a))
    noise = torch.Generator().manual_seed(world.rank)
    with hvd_nodes.LocalSGD(model, optimizer, 8):
        for _ in range(num_steps):
            gradient = torch.randn(1, dim, generator=noise, dtype=torch.float64)
            model.weight.grad = model.weight.detach() + gradient
            optimizer.step()
            rate.step()
    error = model.weight.detach().square().mean().item()
    assert error * num_steps * world.size == pytest.approx(a**2 / (2 * a - 1), rel=0.15)
