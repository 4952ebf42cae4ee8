"""``StagedSGD``: its phases, its cycles, and the bytes sent."""

import pytest
import torch

from hpctrain.core.errors import ConfigError
from tests.gradients.training import make_model, train_alone
from tests.local_sgd.local_methods import Normed, Run, adam, num_kinds, weights_of

NODES = pytest.mark.ranks(2, 3, 4)
SIZES = pytest.mark.ranks(1, 2, 3, 4)


def staged(hvd, **options) -> Run:
    return Run(
        hvd, "StagedSGD", **{"warmup_steps": 3, "cooldown_start": 15, "steps": 4, **options}
    )


@SIZES
def test_warm_up_and_cool_down_are_synchronous_and_nodes_diverge_between(world, hvd_nodes):
    run, nodes = staged(hvd_nodes), 1 if world.size == 1 else 2
    for step in range(1, 21):
        run.to(step)
        if step != 15:
            expected = 1 if step <= 3 or step >= 16 else nodes
            assert run.num_kinds(world) == expected, step
        else:  # the last step of the cycle, after which all replicas are identical
            assert num_kinds(world, run.replica) == 1
    assert run.method.facts["rounds"] == (3 if nodes == 2 else 0)


@NODES
@pytest.mark.parametrize("num_steps", [4, 5])
def test_diverged_replicas_are_averaged_at_the_end(world, hvd_nodes, num_steps):
    run = staged(hvd_nodes, steps=1, delay=1)
    # the update of the last step is still in flight, and its samples count
    for step in range(num_steps):
        run.method.set_num_samples(4 + 2 * world.rank, nominal=4)
        run.to(step + 1)
    run.method.finish()
    assert run.num_kinds(world) == 1


@SIZES
def test_without_a_cycle_it_is_synchronous_training(hvd_nodes):
    found = staged(hvd_nodes, warmup_steps=20, cooldown_start=20).end(20)
    assert float((found - weights_of(train_alone(20))).abs().max()) < 1e-12


@NODES
def test_cycles_get_shorter_while_the_loss_does_not_fall_and_then_restart(hvd_nodes):
    options = {"warmup_steps": 0, "cooldown_start": 100, "steps": 8, "patience": 2}
    method, seen = staged(hvd_nodes, threshold=0.1, **options).method, []
    for loss in (1.0, 0.8, 0.75, 0.74, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, float("nan"), 0.5):
        method.observe(loss)
        seen.append((method.facts["steps"], method.facts["delay"]))
    assert seen == [
        *[(8, 2)] * 3,  # 0.75 is more than 90 % of 0.8
        *[(4, 1)] * 3,  # so is 0.74; then 0.5 is an improvement, and the next 0.5 is not
        *[(2, 1)] * 2,
        *[(1, 1)] * 2,
        *[(8, 2)] * 2,
        (4, 1),
    ]
    method.close()


@NODES
def test_all_ranks_decide_by_their_mean_loss(world, hvd_nodes):
    method = staged(hvd_nodes, warmup_steps=0, patience=1).method
    method.observe(1.0)
    # The loss falls on rank 0 and rises on the others; the mean does not change.
    method.observe(0.0 if world.rank == 0 else world.size / (world.size - 1))
    assert world.allgather(method.facts["steps"]) == [2] * world.size
    method.close()
    with pytest.raises(ConfigError, match="StagedSGD must be open"):
        method.observe(1.0)


@NODES
def test_statistics_and_optimizer_state_are_averaged_before_the_cool_down(world, hvd_nodes):
    run = staged(hvd_nodes, model=Normed(), optimizer=adam)
    with run.method:
        run.to(14)
        statistics = torch.cat([b.double().view(-1) for b in run.model.buffers()])
        assert num_kinds(world, statistics) == world.size
        assert num_kinds(world, run.to(15).replica) == 1


@pytest.mark.ranks(2)
def test_bfloat16_halves_the_bytes_in_all_phases(hvd_nodes):
    sent = {}
    for name in ("none", "bf16"):
        how = {"compression": getattr(hvd_nodes.Compression, name)}
        run = staged(hvd_nodes, model=make_model(torch.float32), **how)
        sent[name] = [run.to(step + 1).method.facts["bytes_sent"] for step in range(18)]
        run.method.close()
    halves, wholes = torch.tensor(sent["bf16"]) * 2, torch.tensor(sent["none"])
    assert torch.equal(halves[:14], wholes[:14])
    # the state, sent once before the cool-down, is not compressed
    state = sum(p.nbytes for p in run.model.parameters())
    assert set((halves - wholes)[14:].tolist()) <= set(range(state, state + 6 * 64))
