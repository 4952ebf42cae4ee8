"""``LocalSGD``, ``PostLocalSGD``, ``HierarchicalLocalSGD``: equivalences and averaging times."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.errors import ConfigError, MismatchError, NotFiniteError
from tests.gradients.training import make_model, sgd, train_alone
from tests.local_sgd.local_methods import Normed, Run, num_kinds, train, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 4)
NODES = pytest.mark.ranks(3, 4)


def gap(weights: torch.Tensor, num_steps: int) -> float:
    """Return the largest difference from the plain loop on one process."""
    return float((weights - weights_of(train_alone(num_steps))).abs().max())


@SIZES
@pytest.mark.parametrize("steps", [1, 4])
def test_on_a_quadratic_loss_any_number_of_steps_is_mini_batch_sgd(hvd_nodes, steps):
    """Gradients are affine in the parameters, so the mean of replicas follows mean gradients."""
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
    assert gap(Run(hvd_nodes, "LocalSGD", 1, state="average").end(12), 12) < 1e-12


@pytest.mark.ranks(1)
def test_one_rank_equals_the_plain_loop_bitwise(hvd_nodes):
    assert gap(Run(hvd_nodes, "LocalSGD", 3).end(10), 10) == 0
    bf16 = hvd_nodes.Compression.bf16
    assert gap(Run(hvd_nodes, "LocalSGD", 3, compression=bf16).end(10), 10) < 1e-3


@MANY
def test_replicas_diverge_within_a_round_and_drift_is_their_distance_from_the_mean(
    world, hvd_nodes
):
    run = Run(hvd_nodes, "LocalSGD", 4, model=Normed()).to(3)
    others = world.allgather(run.weights)
    mean = sum(others) / world.size
    spread = (sum(float((w - mean).square().sum()) for w in others) / world.size) ** 0.5
    assert run.num_kinds(world) == world.size
    # Batch-norm statistics are averaged; the integer counter is not.
    buffers = dict(run.model.named_buffers())
    assert num_kinds(world, buffers["layers.1.running_mean"]) == world.size
    assert run.to(4).num_kinds(world) == 1
    assert num_kinds(world, buffers["layers.1.running_mean"]) == 1
    assert buffers["layers.1.num_batches_tracked"].item() == 4
    # Drift is that of the round before: ranks exchange it at the next synchronization.
    assert (run.method.facts["rounds"], run.method.facts["drift"]) == (1, 0.0)
    drift = run.to(8).method.facts["drift"]
    assert spread < drift < 3 * spread  # The drift includes one more step, on another batch.
    run.method.close()


@MANY
def test_a_nan_is_an_error_that_names_rank_and_parameter(world, hvd_nodes):
    run = Run(hvd_nodes, "LocalSGD", 2).to(1)
    if world.rank == 1:
        with torch.no_grad():
            run.model[2].weight[3, 4] = float("nan")
    with pytest.raises(NotFiniteError, match=r"rank 1: 2\.weight"):
        run.skip()


@MANY
@pytest.mark.parametrize("state", ["local", "average", "reset"])
def test_momentum_is_local_averaged_or_reset(world, hvd_nodes, state):
    run = Run(hvd_nodes, "LocalSGD", 2, state=state).to(2)
    own = [s["momentum_buffer"].numpy().tobytes() for s in run.optimizer.state.values()]
    kinds = len(set(world.allgather(b"".join(own))))
    expected = {"local": (6, world.size), "average": (6, 1), "reset": (0, 1)}
    assert (len(own), kinds) == expected[state]


@MANY
def test_half_precision_sends_half_the_bytes_with_a_small_error(hvd_nodes):
    found = {}
    for name in ("none", "bf16", "fp16"):
        how = {"compression": getattr(hvd_nodes.Compression, name)}
        run = Run(hvd_nodes, "LocalSGD", 4, model=make_model(torch.float32), **how)
        found[name] = run.end(20), run.method.facts["bytes_sent"]
    weights, sent = found["none"]
    moved = weights - weights_of(make_model(torch.float32))
    for name, most in (("bf16", 4e-3), ("fp16", 5e-4)):
        assert found[name][1] * 2 == sent
        assert float((found[name][0] - weights).norm() / moved.norm()) < most


@SIZES
def test_the_error_is_inversely_proportional_to_the_number_of_ranks(world, hvd_nodes):
    """K ranks need 1/K of the steps.

    With learning rates a/t on x^2/2 and gradients of variance 1, T K E[x^2] -> a^2 / (2 a - 1).
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


# -- PostLocalSGD: synchronous steps first -------------------------------------------------------

NUM_STEPS, START, STEPS = 18, 5, 3


def torchs(hvd) -> list[torch.Tensor]:
    """Return this rank's weights after each step of torch's post-local SGD."""
    with warnings.catch_warnings():
        # a warning of torch.jit, raised by torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415
    model = DistributedDataParallel(make_model())
    state = hook.PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=START,
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, hook.post_localSGD_hook)
    # torch averages in the first step after the warm-up, PostLocalSGD after the first round.
    averager = PeriodicModelAverager(period=STEPS, warmup_steps=START + STEPS - 1)
    optimizer = PostLocalSGDOptimizer(optim=sgd(model), averager=averager)
    after = []
    for step in range(NUM_STEPS):
        train(hvd, model, optimizer, None, step, step + 1)
        after.append(weights_of(model).clone())
    return after


@MANY
@pytest.mark.conformance
@pytest.mark.usefixtures("gloo")
def test_every_step_equals_torchs_post_local_sgd(world, hvd_nodes):
    expected = torchs(hvd_nodes)
    run = Run(hvd_nodes, "PostLocalSGD", STEPS, start=START)
    with run.method:
        for step, weights in enumerate(expected):
            torch.testing.assert_close(run.to(step + 1).weights, weights, rtol=0, atol=1e-10)
    assert num_kinds(world, expected[-1]) == world.size


@SIZES
@pytest.mark.parametrize("seen_by", ["all", "one"])
def test_it_becomes_local_after_the_learning_rate_drops(world, hvd_nodes, seen_by):
    run, phases = Run(hvd_nodes, "PostLocalSGD", 4), []
    sees = seen_by == "all" or world.rank == world.size - 1
    rate = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [6] if sees else [], gamma=0.1)
    with run.method as method:
        for step in range(12):
            run.to(step + 1)
            rate.step()
            phases.append(method.facts["phase"])
    # Step 7 is the first with the lower rate; all ranks know in step 8.
    assert phases == ["synchronous"] * 7 + ["local"] * 5
    assert method.rounds.number == 1


@pytest.mark.ranks(1, 2)
def test_a_drop_is_detected_in_a_parameter_group_added_later(hvd_nodes):
    run = Run(hvd_nodes, "PostLocalSGD", 4, optimizer=lambda model: sgd(model[0]))
    with run.method as method:
        late = {"params": run.to(2).model[2].parameters(), "lr": 0.1}
        run.optimizer.add_param_group(late)
        assert run.to(4).method.facts["phase"] == "synchronous"
        run.optimizer.param_groups[1]["lr"] = 0.05
        run.to(6)
        assert method.facts["phase"] == "local"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ends", ["next", "end"])
def test_one_rank_that_skips_a_synchronous_step_gets_an_error(world, hvd_nodes, ends):
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = hvd_nodes.PostLocalSGD(model, optimizer, 4, start=9)
    for step in range(2):
        if step == 1 and world.rank == 0:
            method.skip_step()
            continue
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
    assert model.weight.grad.item() == pytest.approx(1 - 1 / world.size)
    with pytest.raises(MismatchError, match=r"skip_step\(\) in a step of averaged gradients"):
        model.weight.sum().backward() if ends == "next" else method.finish()
    method.close()


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_may_skip_a_synchronous_step(world, hvd_nodes):
    run = Run(hvd_nodes, "PostLocalSGD", 4, start=9)
    with run.method:
        before = run.to(2).weights.clone()
        run.skip()
        assert run.weights.equal(before)
        run.to(5)
    assert run.num_kinds(world) == 1


@pytest.mark.ranks(2, 3)
def test_numbers_of_samples_remain_valid_after_a_skipped_synchronous_step(world, hvd_nodes):
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hvd_nodes.PostLocalSGD(model, optimizer, 4, start=9) as method:
        method.set_num_samples(world.rank + 1)
        method.skip_step()
        (model.weight.sum() * world.rank).backward()
        optimizer.step()
        numbers = range(world.size)
        mean = sum(r * (r + 1) for r in numbers) / sum(r + 1 for r in numbers)
        assert model.weight.grad.item() == pytest.approx(mean, rel=1e-12)


# -- HierarchicalLocalSGD: frequent averages in nodes, rare averages over all ranks --------------


def node_of(rank: int, size: int) -> range:
    return range(rank // 2 * 2, min(rank // 2 * 2 + 2, size))


@NODES
@pytest.mark.parametrize("node_steps", [1, 2])
def test_nodes_average_more_often_than_all_ranks(world, hvd_nodes, node_steps):
    run = Run(hvd_nodes, "HierarchicalLocalSGD", 6, node_steps=node_steps)
    with run.method:
        for step in range(1, 13):
            weights = [w.numpy().tobytes() for w in world.allgather(run.to(step).weights)]
            node = node_of(world.rank, world.size)
            found = len(set(weights)), len({weights[rank] for rank in node})
            if step % 6 == 0:
                assert found == (1, 1)
            elif step % node_steps == 0:
                assert found == (2, 1)
            else:
                assert found[0] == world.size


def pushed(hvd, steps: int):
    """Return a method for one weight, and a function that adds this rank's number per step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = hvd.HierarchicalLocalSGD(model, optimizer, steps, node_steps=2)

    def push(num_steps: int, num_samples: int) -> float:
        for _ in range(num_steps):
            method.set_num_samples(num_samples, nominal=2)
            optimizer.zero_grad()
            (-model.weight.sum() * hvd.rank()).backward()
            optimizer.step()
        return model.weight.item()

    return method, push


def mean(values: dict[int, float], weights: dict[int, float]) -> float:
    return sum(values[r] * weights[r] for r in values) / sum(weights[r] for r in values)


@NODES
def test_samples_are_weights_on_both_levels_and_count_once(world, hvd_nodes):
    method, push = pushed(hvd_nodes, 4)
    weights = {rank: rank + 1 for rank in range(world.size)}
    found = push(4, weights[world.rank])
    after = {
        rank: mean({r: 2 * r for r in node_of(rank, world.size)}, weights) + 2 * rank
        for rank in weights
    }
    assert found == pytest.approx(mean(after, weights), rel=1e-12)
    method.close()
    method, push = pushed(hvd_nodes, 8)
    push(1, world.rank + 1)
    method.finish()
    before = push(0, 0)
    # with other numbers of samples than in the round before
    moved = push(2, 9 - world.rank) - before
    node = node_of(world.rank, world.size)
    expected = mean({r: 2 * r for r in node}, {r: 9 - r for r in node})
    assert moved == pytest.approx(expected, rel=1e-12)
    method.close()


@MANY
@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo"])
def test_rounds_continue_after_finish_and_a_closed_method_is_rejected(world, hvd_nodes, name):
    run = Run(hvd_nodes, name, 4)
    with run.method as method:
        for step in (3, 4, 5):
            run.to(step)
            method.finish()
            assert run.num_kinds(world) == 1
        for step in (6, 7, 8, 9):
            assert run.num_kinds(world) == (1 if step == 6 else world.size)
            run.to(step)
        assert run.num_kinds(world) == 1
    for again in (
        method.__enter__,
        method.finish,
        method.skip_step,
        lambda: method.set_num_samples(1),
        lambda: method.set_backward_passes_per_step(2),
        lambda: method.take_part(takes_part=False),
        lambda: method.load_state_dict(method.state_dict()),
        lambda: method.load_own_state(method.own_state()),
        lambda: method.raise_flags(1),
        method.synchronize,
        method.averaged().__enter__,
    ):
        with pytest.raises(ConfigError, match=f"{name} must be open .* closed; create a new one"):
            again()
    Run(hvd_nodes, name, 4, model=run.model, optimizer=lambda _: run.optimizer).end(3)
    assert run.num_kinds(world) == 1
