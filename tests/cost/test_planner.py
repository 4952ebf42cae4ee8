"""Check the planner: its choice is the best, and its statements about more nodes are correct."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost import control
from hpctrain.cost.collectives import CODECS
from hpctrain.cost.failures import goodput
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.planner import GAIN, PAYS, Goal, _payoffs, advise
from hpctrain.cost.step import Model, step_time

MACHINE = Machine(
    nodes=64,
    ranks_per_node=4,
    node=Link(1e-6, 20e9),
    network=Link(3e-6, 3e9),
    reduce_bytes_per_s=20e9,
    jitter=0.02,
)
MODEL = Model(parameters=25.6e6, samples_per_s=250)
GOAL = Goal(samples=1e8, batch=2048)
FREE = Link(0.0, math.inf)


def test_all_nodes_are_worthwhile_if_communication_is_free():
    ideal = replace(MACHINE, node=FREE, network=FREE, jitter=0, reduce_bytes_per_s=math.inf)
    found = advise(ideal, MODEL, GOAL)
    assert found.best.nodes == found.pays_up_to == 64
    assert found.best.seconds == pytest.approx(1e8 / 250 / 256)
    assert found.best.node_hours == pytest.approx(found.by_nodes[0].node_hours)


def test_a_slower_network_makes_fewer_nodes_worthwhile():
    limits = [
        advise(replace(MACHINE, network=Link(3e-6, rate)), MODEL, GOAL).pays_up_to
        for rate in (1e11, 1e9, 1e8, 1e7)
    ]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]


def test_more_nodes_are_worthwhile_exactly_while_the_rule_holds():
    found = advise(replace(MACHINE, network=Link(3e-6, 3e8)), MODEL, GOAL)
    for fewer, more in pairwise(found.by_nodes):
        pays = more.seconds <= fewer.seconds * PAYS ** math.log2(more.nodes / fewer.nodes)
        if more.nodes <= found.pays_up_to:
            assert pays
        elif fewer.nodes == found.pays_up_to:
            assert not pays
    assert found.pays_up_to < 64


def test_no_candidate_within_reach_has_a_better_score():
    found = advise(MACHINE, MODEL, replace(GOAL, max_local_steps=8))
    reach = [c for c in found.by_nodes if c.nodes <= found.pays_up_to]
    assert found.best.score == min(c.score for c in reach)
    assert found.best not in found.next_best
    assert len(found.next_best) == 3
    assert all(found.best.score <= c.score for c in found.next_best)
    kinds = {(c.spec.codec, c.local_steps > 1) for c in (found.best, *found.next_best)}
    assert len(kinds) == 4


def test_a_codec_and_local_steps_have_to_gain_enough():
    for rate in (1e8, 1e9, 1e10, 1e12):
        machine = replace(MACHINE, network=Link(3e-6, rate))
        best = advise(machine, MODEL, replace(GOAL, max_local_steps=8)).best
        plain = advise(machine, MODEL, GOAL).by_nodes
        same = next(c for c in plain if c.nodes == best.nodes)
        more = departures(best) - departures(same)
        assert best.seconds <= same.seconds * GAIN**more
        assert rate < 1e12 or departures(best) == 0


def departures(candidate):
    return (candidate.spec.codec != "none") + (candidate.local_steps > 1)


def test_codec_is_faster_below_its_bandwidth_only():
    machine = replace(MACHINE, nodes=16, reduce_bytes_per_s=2e9, jitter=0)
    codecs = (*CODECS, "int8:1:4e-10", "slow:3:1")
    goal = replace(GOAL, max_local_steps=8, codecs=codecs)

    def payoffs(bytes_per_s):
        here = replace(machine, network=Link(3e-6, bytes_per_s))
        found = advise(here, MODEL, replace(goal, deadline_s=1e9))
        assert found.best.nodes == 1  # a deadline makes the comparison use all nodes
        return {
            (one.codec, one.local_steps): one for one in _payoffs(found.by_nodes[-1], MODEL, goal)
        }

    found = payoffs(3e9)
    assert {how for how in found if how[1] == 1} == {(codec, 1) for codec in codecs[1:]}
    assert any(local_steps > 1 for _, local_steps in found)
    assert found["slow:3:1", 1].pays_below == 0 > found["slow:3:1", 1].saves
    assert found["bf16", 1] == replace(found["fp16", 1], codec="bf16")
    for how, one in found.items():
        assert (one.saves > 0) == (one.pays_below > 3e9)
        if 0 < one.pays_below < math.inf:
            assert (
                payoffs(0.98 * one.pays_below)[how].saves
                > 0
                >= payoffs(1.02 * one.pays_below)[how].saves
            )


def test_without_a_noise_scale_the_batch_stays_and_with_it_large_ones_cost_samples():
    kept = advise(MACHINE, MODEL, GOAL)
    assert {c.batch for c in kept.by_nodes} == {2048}
    assert GOAL.samples_at(8192) == GOAL.samples
    noisy = replace(GOAL, batch=256, noise_scale=4000)
    assert noisy.samples_at(256) == pytest.approx(noisy.samples)
    assert noisy.samples_at(4000) / noisy.samples_at(1) == pytest.approx(2, rel=1e-3)
    batches = [c.batch for c in advise(MACHINE, MODEL, noisy).by_nodes]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]


def test_the_plan_meets_a_deadline_with_the_fewest_node_hours():
    everything = advise(MACHINE, MODEL, GOAL).by_nodes
    deadline_s = 2 * min(c.seconds for c in everything)
    found = advise(MACHINE, MODEL, replace(GOAL, deadline_s=deadline_s)).best
    assert found.seconds <= deadline_s
    in_time = [c for c in everything if c.seconds <= deadline_s]
    assert found.score * found.nodes <= min(c.score * c.nodes for c in in_time)
    with pytest.raises(ConfigError, match="the time of the fastest candidate"):
        advise(MACHINE, MODEL, replace(GOAL, deadline_s=1.0))


def test_more_nodes_fail_more_often_and_are_saved_more_often():
    frail = replace(MACHINE, mtbf_s=1e6, checkpoint_s=20, restart_s=60)
    by_nodes = advise(frail, MODEL, GOAL).by_nodes
    every = [c.checkpoint_every_s for c in by_nodes]
    assert every == sorted(every, reverse=True)
    goodputs = [c.goodput for c in by_nodes]
    assert goodputs == sorted(goodputs, reverse=True)
    assert goodputs[-1] < 0.97
    assert {c.goodput for c in advise(MACHINE, MODEL, GOAL).by_nodes} == {1.0}


def test_predictions_include_start_up_agreement_checkpoints_and_recovery():
    slow = replace(MACHINE, network=Link(1e-3, 3e9), mtbf_s=1e6, checkpoint_s=1.0, restart_s=10)
    (best,) = (one for one in advise(slow, MODEL, GOAL).by_nodes if one.nodes == 64)
    start, step, stop, save, _, recovery = (
        part.seconds(best.machine) for part in control.PARTS.values()
    )
    share = best.batch / best.machine.num_ranks
    assert best.step.total_s - step_time(best.machine, MODEL, share, best.spec).total_s == (
        pytest.approx(step + stop)
    )
    useful = goodput(best.checkpoint_every_s, 1 + save, 10 + recovery, 1e6 / 64)
    assert best.goodput == pytest.approx(useful)
    assert best.seconds == pytest.approx(start + best.num_steps * best.step.total_s / useful)


def test_a_batch_too_small_for_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="got 3 samples for the 4 ranks of a node"):
        advise(MACHINE, MODEL, replace(GOAL, batch=3))
    assert max(c.nodes for c in advise(MACHINE, MODEL, replace(GOAL, batch=40)).by_nodes) == 8
    with pytest.raises(ConfigError, match="samples must be above 0, got 0"):
        Goal(samples=0, batch=1)


def test_a_goal_takes_a_step_and_what_is_not_finite_is_refused():
    assert advise(MACHINE, MODEL, replace(GOAL, samples=1)).best.num_steps == 1
    for name in ("parameters", "samples_per_s"):
        with pytest.raises(ConfigError, match=f"{name} must be below inf, got inf"):
            replace(MODEL, **{name: math.inf})


def test_node_counts_without_progress_are_omitted_and_it_is_an_error_if_none_remains():
    failing = replace(MACHINE, mtbf_s=10.0, checkpoint_s=60.0, restart_s=300.0)
    found = advise(failing, MODEL, GOAL)
    assert 0 < found.by_nodes[-1].goodput < found.best.goodput < 1e-9
    assert found.best.nodes == 1
    assert found.by_nodes[-1].nodes < 64
    with pytest.raises(ConfigError, match=r"got mtbf_s=0.1 per node and restart_s=300"):
        advise(replace(failing, mtbf_s=0.1), MODEL, GOAL)
