"""Laws of local SGD: what equals synchronous training, what is averaged, and by which weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import ConfigError, NotFiniteError
from tests.gradients.training import global_batch, make_model, part_of, sgd, train_alone
from tests.local_sgd.local_methods import Normed, train, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 4)


def gap(model: nn.Module, other: nn.Module) -> float:
    return float((weights_of(model) - weights_of(other)).abs().max())


@SIZES
@pytest.mark.parametrize("steps", [1, 3, 5])
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
        train(hvd_nodes, model, optimizer, method, 0, 30)
    assert gap(model, train_alone(30)) < 1e-12


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
    assert len({w.numpy().tobytes() for w in world.allgather(weights_of(model))}) == world.size
    others = world.allgather(weights_of(model))
    train(hvd_nodes, model, optimizer, method, 3, 4)
    assert len({w.numpy().tobytes() for w in world.allgather(weights_of(model))}) == 1
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
    assert len({m.numpy().tobytes() for m in world.allgather(own)}) == world.size
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
def test_half_precision_sends_half_the_bytes_and_loses_little(world, hvd_nodes):
    found = {}
    for name in ("none", "bf16", "fp16"):
        model = make_model(torch.float32)
        optimizer = sgd(model)
        compression = getattr(hvd_nodes.Compression, name)
        with hvd_nodes.LocalSGD(model, optimizer, 4, compression=compression) as method:
            for step in range(40):
                images, labels = part_of(global_batch(step, torch.float32), world.rank, world.size)
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                optimizer.step()
            found[name] = method.facts["bytes_sent"], weights_of(model)
    sent, weights = found["none"]
    for name, most in (("bf16", 4e-3), ("fp16", 5e-4)):
        assert found[name][0] * 2 == sent
        moved = weights - weights_of(make_model(torch.float32))
        assert float((found[name][1] - weights).norm() / moved.norm()) < most


@MANY
def test_parameters_that_come_later_travel_too(world, hvd_nodes):
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 2) as method:
        train(hvd_nodes, model, optimizer, method, 0, 2)
        before = method.facts["bytes_sent"]
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
        train(hvd_nodes, model, optimizer, method, 2, 4)
        assert method.facts["bytes_sent"] > 2 * before
        assert len({w.numpy().tobytes() for w in world.allgather(weights_of(model))}) == 1


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
    assert len({w.numpy().tobytes() for w in world.allgather(weights_of(model))}) == world.size
    optimizer.step()
    assert method.rounds.step == 2  # the hooks are gone


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least 1 step"),
        ({"steps": "often"}, '"auto"'),
        ({"state": "mean"}, "local, average, reset"),
        ({"steps": "auto", "share": 1.5}, "between 0 and 1"),
        ({"steps": "auto", "most": 0}, "most=0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(hvd_nodes, options, message):
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        hvd_nodes.LocalSGD(model, sgd(model), **options)


@MANY
def test_an_optimizer_that_averages_gradients_is_refused(hvd_nodes):
    model = make_model()
    optimizer = hvd_nodes.DistributedOptimizer(sgd(model), model.named_parameters())
    with pytest.raises(ConfigError, match="leave DistributedOptimizer out"):
        hvd_nodes.LocalSGD(model, optimizer)
