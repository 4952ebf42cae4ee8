"""Rounds: their arguments, the weights of replicas, synchronization, and stops within rounds."""

import time

import pytest
import torch
from torch import nn

from hpctrain.core.errors import CommError, ConfigError, MismatchError, RankLostError
from hpctrain.local_sgd.sync_interval import SyncInterval
from tests.gradients.training import make_model, sgd
from tests.harness.pace import scaled
from tests.local_sgd.local_methods import (
    FEDERATED,
    LOSSY,
    METHODS,
    OPTIMIZERS,
    Normed,
    Run,
    num_kinds,
    state_of,
)

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 4)
FEW = pytest.mark.ranks(2, 3)

# -- arguments ----------------------------------------------------------------------------------

STAGED = {"warmup_steps": 3, "cooldown_start": 15}
WRONG = [
    ("LocalSGD", {"steps": 0}, "steps must be at least 1, got 0"),
    ("LocalSGD", {"steps": "often"}, "one of auto or an integer"),
    ("LocalSGD", {"state": "mean"}, "local, average, reset"),
    ("LocalSGD", {"steps": "auto", "share": 1.5}, "share must be below 1"),
    ("LocalSGD", {"steps": "auto", "most": 0}, "most=0"),
    ("PostLocalSGD", {"start": -1}, "start must be at least 0"),
    ("PostLocalSGD", {"start": "soon"}, "lr_drop"),
    ("HierarchicalLocalSGD", {"node_steps": 0}, "node_steps"),
    ("DiLoCo", {"outer_lr": 0.0}, "outer_lr"),
    ("DiLoCo", {"outer_momentum": 1.0}, "outer_momentum"),
    ("DiLoCo", {"fragments": 0}, "fragments"),
    ("DiLoCo", {"fragments": 7}, "7"),
    ("DiLoCo", {"delay": -1}, "delay"),
    ("DiLoCo", {"keep": 1.0}, "keep"),
    ("StagedSGD", STAGED | {"warmup_steps": 16}, "warmup_steps must be at most"),
    ("StagedSGD", STAGED | {"steps": 0}, "steps"),
    ("StagedSGD", STAGED | {"steps": 4, "delay": 5}, "delay must be .* got 5"),
    ("StagedSGD", STAGED | {"patience": 0}, "patience"),
    ("StagedSGD", STAGED | {"threshold": 1.0}, "threshold"),
]


@pytest.mark.ranks(1)
def test_invalid_arguments_are_rejected(hvd_nodes):
    for name, options, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            Run(hvd_nodes, name, **options)
    with pytest.raises(ConfigError, match="steps=2, fragments=3"):
        Run(hvd_nodes, "DiLoCo", 2, fragments=3).to(1)


@pytest.mark.ranks(1, 2)
def test_an_optimizer_must_be_plain_and_have_one_method(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    message = "LocalSGD already uses the optimizer passed to DiLoCo"
    with hvd_nodes.LocalSGD(model, optimizer, 2), pytest.raises(ConfigError, match=message):
        hvd_nodes.DiLoCo(model, optimizer, 2)
    run = Run(hvd_nodes, "DiLoCo", 2, model=model, optimizer=lambda _: optimizer).to(2)
    hvd_nodes.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(ConfigError, match="leave DistributedOptimizer out"):
        run.to(3)
    run.method.close()
    with pytest.raises(ConfigError, match="leave DistributedOptimizer out"):
        hvd_nodes.LocalSGD(model, optimizer)


# -- weights of replicas ------------------------------------------------------------------------


def moving(hvd, size: int, *, rank: int, samples: int | None = None, part: bool = True) -> float:
    """Change a weight by ``rank`` in each of two steps; return the mean of the round."""
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
def test_replicas_have_equal_or_sample_weights_or_do_not_take_part(world, hvd_nodes):
    hvd, size, rank = hvd_nodes, world.size, world.rank

    def mean(ranks) -> float:
        return sum(2 * r * (r + 1) for r in ranks) / sum(r + 1 for r in ranks)

    assert moving(hvd, size, rank=rank) == pytest.approx(size - 1, rel=1e-12)
    weighted = moving(hvd, size, rank=rank, samples=rank + 1)
    assert weighted == pytest.approx(mean(range(size)), rel=1e-12)
    # Values of a rank that does not take part are ignored, NaN included. A round without
    # participants changes nothing.
    odd = rank or float("nan")
    without = moving(hvd, size, rank=odd, samples=rank + 1, part=rank > 0)
    assert without == pytest.approx(mean(range(1, size)), rel=1e-12)
    assert moving(hvd, size, rank=rank, part=False) == 2 * rank


@MANY
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("name", ["LocalSGD", "HierarchicalLocalSGD", "DiLoCo"])
def test_a_last_round_without_participants_averages_all_ranks(world, hvd_nodes, name, counts):
    run = Run(hvd_nodes, name, 4)
    run.method.take_part(takes_part=False)
    if counts:
        run.method.set_num_samples(1 + world.rank)
    assert run.to(2).num_kinds(world) > 1
    run.method.finish()
    assert run.num_kinds(world) == 1
    run.method.close()


@MANY
def test_set_num_samples_on_some_ranks_only_is_an_error(world, hvd_nodes):
    samples = 1 if world.rank else None
    with pytest.raises(MismatchError, match=f"{world.size - 1} of {world.size}"):
        moving(hvd_nodes, world.size, rank=world.rank, samples=samples)


@MANY
def test_a_missing_step_on_one_rank_is_an_error_unless_skipped(world, hvd_nodes):
    for is_counted in (True, False):
        run = Run(hvd_nodes, "LocalSGD", 3).to(1)
        if world.rank:
            run.to(2)
        elif is_counted:
            run.skip()
        if is_counted:
            assert run.to(3).num_kinds(world) == 1
        else:
            with pytest.raises(MismatchError, match="skip_step"):
                run.method.rounds.synchronize()
        run.method.close()


# -- synchronization ----------------------------------------------------------------------------


@SIZES
def test_flags_reach_all_ranks_at_the_next_synchronization(world, hvd_nodes):
    run, seen = Run(hvd_nodes, "LocalSGD", 4), []
    with run.method as method:
        method.raise_flags(2 if world.rank == world.size - 1 else 0)
        for step in range(8):
            method.clock.must_synchronize = step == 5
            run.to(step + 1)
            seen.append(method.raised_flags)
    alone = [2] * 8
    assert seen == (alone if world.size == 1 else [0, 0, 0, 2, 0, 2, 0, 2])


@MANY
def test_ranks_synchronize_within_the_requested_time(hvd_nodes):
    run, met = Run(hvd_nodes, "LocalSGD", 1000), []
    with run.method as method:
        method.clock.within_s = 0.05
        for step in range(20):
            time.sleep(0.01)
            run.to(step + 1)
            met.append(method.clock.has_synchronized)
    assert met[0]  # the duration of a step is not known yet
    assert 2 <= sum(met) <= 16


@MANY
def test_ranks_do_not_synchronize_while_an_average_is_in_flight(hvd_nodes):
    run, met = Run(hvd_nodes, "DiLoCo", 8, delay=6), []
    run.method.clock.within_s = 1e-9  # synchronize in every step, if possible
    for step in range(16):
        run.method.clock.must_synchronize = step == 11
        run.to(step + 1)
        met.append(run.method.clock.has_synchronized)
    assert met == [True] * 8 + [False] * 3 + [True] + [False] + [True] * 3
    run.method.close()


# -- steps per round ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_auto_takes_the_fewest_steps_below_the_share(share):
    def part(steps: int) -> float:
        return round_s / (round_s + steps * step_s)

    for step_s in (1e-3, 0.02, 1.0):
        for round_s in (1e-4, 0.03, 5.0):
            pace = SyncInterval("auto", share=share, most=10**6)
            for _ in range(3):
                assert pace.steps_of(0) == 1
                pace.learn(step_s, round_s)
            steps = pace.steps_of(3)
            assert part(steps) <= share * (1 + 1e-9)
            assert steps == 1 or part(steps - 1) > share * (1 - 1e-9)


def test_auto_respects_its_bounds_and_decides_once():
    pace, slow = SyncInterval("auto", least=4, most=16), SyncInterval("auto", most=16)
    for _ in range(3):
        pace.learn(1.0, 1e-6)
        slow.learn(1e-6, 1.0)
    assert (pace.steps_of(3), slow.steps_of(3)) == (4, 16)
    for _ in range(9):
        pace.learn(1e-6, 1.0)
    assert pace.steps_of(12) == 4


def test_auto_ignores_the_first_round_and_resumes_from_its_state():
    pace, again = SyncInterval("auto"), SyncInterval("auto")
    pace.learn(1e-3, 100.0)
    again.load_shared_state(pace.shared_state())
    for one in (pace, again):
        one.learn(1e-3, 1e-3)
        one.learn(1e-3, 1e-3)
    assert pace.steps_of(3) == again.steps_of(3) == 9


def test_a_schedule_gives_the_steps_of_each_round():
    pace = SyncInterval(lambda number: 2**number)
    assert [pace.steps_of(number) for number in range(4)] == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match=r"steps\(0\)"):
        SyncInterval(lambda _: 0).steps_of(0)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "options", "before"),
    [("LocalSGD", {"most": 64}, 3), ("DiLoCo", {"fragments": 3, "most": 24}, 9)],
    ids=["local", "diloco"],
)
def test_all_ranks_decide_identically_at_the_end_of_a_round(
    world, hvd_nodes, name, options, before
):
    run = Run(hvd_nodes, name, "auto", **options).to(before)
    steps = run.method.facts["steps"]
    assert (run.method.facts["rounds"], len(set(world.allgather(steps)))) == (3, 1)
    assert before // 3 <= steps <= options["most"]
    run.to(before + steps)
    assert run.method.facts["rounds"] == 4
    run.method.close()


# -- stops and errors ---------------------------------------------------------------------------

NUM_STEPS = 18


def stop_of(name: str) -> int:
    """Return the step at which a method is stopped; different methods stop at different steps."""
    return (5 * [*METHODS, *LOSSY, *FEDERATED].index(name) + 2) % NUM_STEPS or 7


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", [*METHODS, *LOSSY, *FEDERATED])
def test_a_resumed_run_has_the_same_bits_and_identical_replicas_after_the_block(
    world, hvd_nodes, name
):
    make_optimizer = OPTIMIZERS["adam" if "reset" in name or "schedule" in name else "sgd"]
    found, state = [], {}
    for first in (0, stop_of(name)):
        run = Run(hvd_nodes, name, model=Normed(), optimizer=make_optimizer)
        parts = {"model": run.model, "optimizer": run.optimizer, "method": run.method}
        with run.method as method:
            for part, own in state.items():
                parts[part].load_state_dict(own)
            run.at = first
            if not state:
                run.to(stop_of(name), observed=True)
                state = state_of(*parts.values())
            run.to(NUM_STEPS, observed=True)
            found.append((run.replica, method.facts))
            with method.averaged():
                inside = run.weights.clone()
            assert torch.equal(found[-1][0], run.replica)
            assert num_kinds(world, inside) == 1
        assert run.num_kinds(world) == 1
        buffers = torch.cat([b.double().view(-1) for b in run.model.buffers()])
        assert num_kinds(world, buffers) == 1
    (whole, facts), (again, same_facts) = found
    assert torch.equal(whole, again)
    assert facts == same_facts


@FEW
@pytest.mark.usefixtures("last")
def test_an_error_in_a_block_on_one_rank_ends_the_wait_of_the_others(world, hvd_nodes):
    start = time.monotonic()

    def fail() -> None:
        run = Run(hvd_nodes, "LocalSGD", 4)
        with run.method:
            run.to(2)
            if world.rank == 1:
                raise ZeroDivisionError("no samples")
            run.to(4)

    expected = ZeroDivisionError if world.rank == 1 else RankLostError
    with pytest.raises(expected, match="no samples") as caught:
        fail()
    if world.rank != 1:
        assert "rank 1 has left a block of LocalSGD by ZeroDivisionError" in str(caught.value)
    # A program that catches the error gets further errors: the ranks are no longer in step.
    for _ in range(2):
        with pytest.raises(CommError, match=r"has failed on rank|failed before|rank \d has left"):
            Run(hvd_nodes, "HierarchicalLocalSGD", 4)
    assert time.monotonic() - start < scaled(30)


@FEW
@pytest.mark.usefixtures("last")
def test_blocks_that_all_ranks_leave_by_errors_are_not_averaged(world, hvd_nodes):
    def fail(run: Run) -> None:
        with run.method:
            run.to(2)
            raise ZeroDivisionError

    for _ in range(3):
        run = Run(hvd_nodes, "LocalSGD", 4)
        with pytest.raises(ZeroDivisionError):
            fail(run)
        assert run.num_kinds(world) == world.size
        run.optimizer.step()
        assert run.method.rounds.step == 2  # the hooks have been removed
    time.sleep(2.1)
    assert num_kinds(world, Run(hvd_nodes, "LocalSGD", 2).end(3)) == 1
