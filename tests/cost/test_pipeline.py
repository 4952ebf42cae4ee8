"""A pipeline played event by event takes as long, and holds as much, as the closed forms say."""

import random

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from hpctrain.cost.layout import Layout, Placed
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.transformer import Transformer

SIZES = [(2, 4), (4, 4), (4, 8), (8, 32), (4, 2), (16, 64)]


def gpipe(stage, stages, micro):  # noqa: ARG001 - as the other one
    return [("F", number) for number in range(micro)] + [("B", number) for number in range(micro)]


def one_f_one_b(stage, stages, micro):
    ahead = min(micro, stages - 1 - stage)
    order = [("F", number) for number in range(ahead)]
    for number in range(micro):
        order += [("F", number + ahead)] if number + ahead < micro else []
        order += [("B", number)]
    return order


def played(schedule, forward_s, backward_s, micro):
    """When the last event ends, and how many micro-batches each stage holds at once at most."""
    stages, done, held = len(forward_s), {}, [0] * len(forward_s)
    orders = [schedule(stage, stages, micro) for stage in range(stages)]
    clock, at = [0.0] * stages, [0] * stages
    in_flight = [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            kind, number = orders[stage][at[stage]]
            if kind == "F":
                needs = [("F", stage - 1, number)] if stage else []
            else:
                needs = [("B", stage + 1, number)] if stage + 1 < stages else []
                needs += [("F", stage, number)]
            if all(each in done for each in needs):
                start = max([clock[stage], *(done[each] for each in needs)])
                clock[stage] = start + (forward_s if kind == "F" else backward_s)[stage]
                done[kind, stage, number] = clock[stage]
                at[stage] += 1
                in_flight[stage] += 1 if kind == "F" else -1
                held[stage] = max(held[stage], in_flight[stage])
    return max(clock), held


def planned(layers, pp, micro, words=1):
    """A pipeline on links that cost nothing, and the forward seconds of each stage."""
    model = Transformer.of(layers=layers, hidden=64, heads=4, sequence=32, vocabulary=words)
    free = Machine(nodes=pp, network=Link(0.0, 1e30), flops_per_s=1e9)
    one = Layout(pp=pp)
    here = Placed(free, model, one, micro)
    per_stage = [len(range(stage, layers, pp)) * model.layer_flops / 1e9 for stage in range(pp)]
    per_stage[-1] += model.output_flops / 1e9
    return here, one, per_stage


@pytest.mark.parametrize(("stages", "micro"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(schedule, stages, micro):
    whole_s, held = played(schedule, [1] * stages, [2] * stages, micro)
    assert 1 - 3 * micro / whole_s == pytest.approx((stages - 1) / (micro + stages - 1), abs=1e-12)
    one_by_one = schedule is one_f_one_b
    ahead = [min(micro, stages - stage) if one_by_one else micro for stage in range(stages)]
    assert held == ahead


@pytest.mark.parametrize(("stages", "micro"), [each for each in SIZES if each[1] >= each[0]])
@pytest.mark.parametrize(
    ("schedule", "of_torch"), [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)]
)
def test_the_order_is_that_of_torch(schedule, of_torch, stages, micro):
    theirs = object.__new__(of_torch)  # without processes: the order takes two numbers
    theirs._num_stages, theirs._n_microbatches = stages, micro
    for stage, actions in theirs._get_pipeline_order().items():
        names = [each.computation_type.name for each in actions if each is not None]
        kinds = ["FB"[name != "FORWARD"] for name in names if name in {"FORWARD", "FULL_BACKWARD"}]
        assert kinds == [kind for kind, _ in schedule(stage, stages, micro)]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_takes_as_long_as_its_events_and_unequal_stages_one_by_one_no_longer(seed):
    some = random.Random(seed)
    pp, micro = some.randint(2, 8), some.randint(1, 20)
    here, one, forward_s = planned(some.randint(pp, 30), pp, micro, some.choice([1, 3000]))
    backward_s = [2 * each for each in forward_s]
    step_s = sum(here.terms(one))
    assert played(gpipe, forward_s, backward_s, micro)[0] == pytest.approx(step_s, rel=1e-9)
    one_by_one_s, held = played(one_f_one_b, forward_s, backward_s, micro)
    assert 3 * micro * max(forward_s) <= one_by_one_s <= step_s * (1 + 1e-9)
    assert held == [min(micro, pp - stage) for stage in range(pp)]


@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_a_step_of_equal_stages_takes_as_long_as_its_events_one_by_one(stages, micro):
    here, one, forward_s = planned(2 * stages, stages, micro)
    whole_s, _ = played(one_f_one_b, forward_s, [2 * each for each in forward_s], micro)
    assert sum(here.terms(one)) == pytest.approx(whole_s, rel=1e-3)  # the output is of one word
