"""Check simulated pipelines: duration and memory equal the closed forms."""

import random
from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from hpctrain.cost.layout_cost import ParallelLayout, Placed
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
    """Return the end of the last event, and the most micro-batches of each stage in memory."""
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


def of_torch(kind, stages, virtual, micro):
    """Return the order of work that torch plans for each rank, without starting processes."""
    theirs = object.__new__(kind)
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = stages, virtual, micro
    theirs.number_of_rounds = max(1, micro // stages)
    theirs.microbatches_per_round = micro // theirs.number_of_rounds
    theirs._num_stages = stages * virtual
    return [
        [each for each in theirs._calculate_single_rank_operations(rank) if each is not None]
        for rank in range(stages)
    ]


NEEDS = {
    "FORWARD": lambda stage, _: [("FORWARD", stage - 1)] * (stage > 0),
    "BACKWARD_INPUT": lambda stage, last: (
        [("FORWARD", stage)] + [("BACKWARD_INPUT", stage + 1)] * (stage < last)
    ),
    "BACKWARD_WEIGHT": lambda stage, _: [("BACKWARD_INPUT", stage)],
}


def played_of_torch(orders, seconds, last):
    """Simulate the orders of torch, also with split backward; ``seconds`` are by kind of work."""
    done, clock, most = {}, [0.0] * len(orders), [0] * len(orders)
    left, held = [[*order] for order in orders], [0] * len(orders)
    seconds = {**seconds, "FULL_BACKWARD": seconds["BACKWARD_INPUT"] + seconds["BACKWARD_WEIGHT"]}
    while any(left):
        for rank, order in enumerate(left):
            while order:
                kind, stage = order[0].computation_type.name, order[0].stage_index
                as_kind = "BACKWARD_INPUT" if kind == "FULL_BACKWARD" else kind
                needs = [(*n, order[0].microbatch_index) for n in NEEDS[as_kind](stage, last)]
                if not all(each in done for each in needs):
                    break
                start = max([clock[rank], *(done[each] for each in needs)])
                clock[rank] = done[as_kind, stage, order.pop(0).microbatch_index] = (
                    start + seconds[kind]
                )
                held[rank] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(kind, -1)
                most[rank] = max(most[rank], held[rank])
    return max(clock), most


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (2, 4), (3, 9), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 2), ("1f1b", 3), *(("zero_bubble", v) for v in (1, 2, 3))]
)
def test_interleaved_stages_take_the_time_and_memory_of_torchs(schedule, stages, micro, virtual):
    here, one, _ = planned(stages * virtual, stages, micro, heads=1)
    one = replace(one, virtual=virtual, schedule=schedule)
    forward_s = virtual * here._layer(one)["compute_s"] / 3
    weights_s = forward_s - virtual * here.model.attention_flops / 1e9
    parts = forward_s, 2 * forward_s - weights_s, weights_s
    seconds = {kind: each / virtual for kind, each in zip(NEEDS, parts, strict=True)}
    kind = {"1f1b": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}[
        schedule
    ]
    orders = of_torch(kind, stages, virtual, micro)
    whole_s, held = played_of_torch(orders, seconds, stages * virtual - 1)
    assert sum(here.terms(one)) == pytest.approx(whole_s, rel=2e-3)  # the output has one word
    bubble_s = (stages - 1) * (3 * forward_s - 2 * weights_s * (schedule != "1f1b")) / virtual
    assert whole_s == pytest.approx(3 * micro * forward_s + bubble_s, rel=1e-9)
    assert [held[0] / virtual, held[-1] / virtual] == pytest.approx(here._in_flight(one))
    equal = dict.fromkeys(NEEDS, 1.0)
    whole_s, _ = played_of_torch(orders, equal, stages * virtual - 1)
    assert here.bubble(one) == pytest.approx(1 - 3 * micro * virtual / whole_s, abs=1e-12)


def planned(layers, pp, micro, words=1, heads=4):
    """Return a pipeline on free links, and the forward seconds of each stage."""
    model = Transformer.of(layers=layers, hidden=64, heads=heads, sequence=32, vocabulary=words)
    free = Machine(nodes=pp, network=Link(0.0, 1e30), flops_per_s=1e9)
    one = ParallelLayout(pp=pp)
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
    theirs = object.__new__(of_torch)  # without processes: the order needs two numbers
    theirs._num_stages, theirs._n_microbatches = stages, micro
    for stage, actions in theirs._get_pipeline_order().items():
        names = [each.computation_type.name for each in actions if each is not None]
        kinds = ["FB"[name != "FORWARD"] for name in names if name in {"FORWARD", "FULL_BACKWARD"}]
        assert kinds == [kind for kind, _ in schedule(stage, stages, micro)]


@pytest.mark.parametrize("seed", range(20))
def test_a_predicted_step_equals_gpipe_events_and_bounds_1f1b_with_unequal_stages(seed):
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
def test_a_predicted_step_of_equal_stages_equals_its_events(stages, micro):
    here, one, forward_s = planned(2 * stages, stages, micro)
    whole_s, _ = played(one_f_one_b, forward_s, [2 * each for each in forward_s], micro)
    assert sum(here.terms(one)) == pytest.approx(whole_s, rel=1e-3)  # the output has one word
