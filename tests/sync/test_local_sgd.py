"""Laws of local SGD: what equals synchronous training, what is averaged, and by which weights."""

import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.errors import ConfigError, MismatchError, NotFiniteError
from tests.sync.local_methods import Normed, train, weights_of
from tests.sync.training import global_batch, make_model, part_of, sgd, train_alone

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


def moving(hvd, size: int, *, rank: int, samples: int | None = None, part: bool = True) -> float:
    """Let this rank move a weight by its rank in each of two steps; return the round's mean."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.LocalSGD(model, optimizer, 2) as method:
        method.take_part(takes_part=part)
        for _ in range(2):
            if samples is not None:
                method.set_num_samples(samples, nominal=size)
            optimizer.zero_grad()
            (-model.weight.sum() * rank).backward()
            optimizer.step()
        return model.weight.item()


@MANY
def test_replicas_count_alike_or_by_their_samples(world, hvd_nodes):
    size, ranks = world.size, range(world.size)
    assert moving(hvd_nodes, size, rank=world.rank) == pytest.approx(size - 1, rel=1e-12)
    weighted = moving(hvd_nodes, size, rank=world.rank, samples=world.rank + 1)
    expected = sum(2 * r * (r + 1) for r in ranks) / sum(r + 1 for r in ranks)
    assert weighted == pytest.approx(expected, rel=1e-12)


@MANY
def test_a_rank_may_sit_a_round_out_whatever_it_holds(world, hvd_nodes):
    rank = float("nan") if world.rank == 0 else world.rank
    size = world.size
    mean = moving(hvd_nodes, size, rank=rank, samples=world.rank + 1, part=world.rank > 0)
    others = range(1, size)
    expected = sum(2 * r * (r + 1) for r in others) / sum(r + 1 for r in others)
    assert mean == pytest.approx(expected, rel=1e-12)


@MANY
def test_a_round_that_all_sit_out_changes_nothing(world, hvd_nodes):
    assert moving(hvd_nodes, world.size, rank=world.rank, part=False) == 2 * world.rank


@MANY
def test_samples_are_counted_by_all_or_by_none(world, hvd_nodes):
    samples = 1 if world.rank else None
    with pytest.raises(MismatchError, match=f"{world.size - 1} of {world.size}"):
        moving(hvd_nodes, world.size, rank=world.rank, samples=samples)


@MANY
def test_a_step_that_one_rank_does_not_take_is_an_error_or_is_counted(world, hvd_nodes):
    for is_counted in (True, False):
        model = make_model()
        optimizer = sgd(model)
        method = hvd_nodes.LocalSGD(model, optimizer, 3)
        train(hvd_nodes, model, optimizer, method, 0, 1)
        if world.rank:
            train(hvd_nodes, model, optimizer, method, 1, 2)
        elif is_counted:
            method.skip_step()
        if is_counted:
            train(hvd_nodes, model, optimizer, method, 2, 3)
            assert len({w.numpy().tobytes() for w in world.allgather(weights_of(model))}) == 1
        else:
            with pytest.raises(MismatchError, match="skip_step"):
                method.rounds.meet()
        method.close()


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


@SIZES
def test_flags_are_known_to_all_at_the_next_meeting(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 4) as method:
        method.raise_flags(2 if world.rank == world.size - 1 else 0)
        seen = []
        for step in range(8):
            method.rounds.must_meet = step == 5
            train(hvd_nodes, model, optimizer, method, step, step + 1)
            seen.append(method.raised_flags)
    alone = [2] * 8
    assert seen == (alone if world.size == 1 else [0, 0, 0, 2, 0, 2, 0, 2])


@MANY
def test_ranks_meet_within_the_time_that_was_asked_for(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 1000) as method:
        method.rounds.within_s = 0.05
        met = []
        for step in range(40):
            time.sleep(0.01)
            train(hvd_nodes, model, optimizer, method, step, step + 1)
            met.append(method.has_met)
    assert met[0]  # nothing is known of the time of a step yet
    assert 3 <= sum(met) <= 30


@MANY
def test_ranks_do_not_meet_behind_what_is_under_way(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.DiLoCo(model, optimizer, 8, delay=6)
    method.rounds.within_s = 1e-9  # in every step, if possible
    met = []
    for step in range(16):
        method.rounds.must_meet = step == 11
        train(hvd_nodes, model, optimizer, method, step, step + 1)
        met.append(method.has_met)
    assert met == [True] * 8 + [False] * 3 + [True] + [False] + [True] * 3
    method.close()


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
