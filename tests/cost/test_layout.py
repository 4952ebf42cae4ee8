"""Check the cost of a layout against tables and formulas of the papers."""

import math
from dataclasses import replace

import pytest

from hpctrain.cost.layout_cost import ParallelLayout, Placed, inside
from hpctrain.cost.layout_search import LayoutChoice
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.transformer import RECOMPUTE, Transformer

MODEL = Transformer.of(7.5e9)
PSI = MODEL.parameters


def placed(batch=64, model=MODEL, local=8, **axes):
    layout = ParallelLayout(**axes)
    world = layout.tp * layout.pp * layout.dp * layout.cp
    machine = Machine(
        nodes=max(1, world // local),
        ranks_per_node=min(local, world),
        node=Link(0.0, 100e9),
        network=Link(0.0, 10e9),
    )
    return Placed(machine, model, layout, batch)


def how(here, zero, micro_batch, recompute):
    return replace(here.axes, zero=zero, micro_batch=micro_batch, recompute=recompute)


def test_the_table_of_zero_is_that_of_the_paper():
    """For 7.5e9 parameters on 64 ranks, in GB."""
    here = placed(dp=64)
    states = [here.memory(how(here, zero, 1, "full"))[:3] for zero in range(4)]
    assert [round(sum(each) / 1e9, 1) for each in states] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_state_of_a_rank_follows_the_formulas_of_zero(ranks):
    here = placed(dp=ranks, batch=ranks, local=1)
    expected = [16 * PSI, 4 * PSI + 12 * PSI / ranks, 2 * PSI + 14 * PSI / ranks, 16 * PSI / ranks]
    found = [sum(here.memory(how(here, zero, 1, "none"))[:3]) for zero in range(4)]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 4, "dp": 2}])
def test_ranks_together_hold_all_parameters_and_one_more_embedding_where_stages_share_it(axes):
    here = placed(**axes)
    per_layer = MODEL.layer_parameters
    held = sum(layers * per_layer + more for layers, more, _ in here._ends)
    if here.axes.pp > 1:
        held += (here.axes.pp - 2) * MODEL.layers / here.axes.pp * per_layer
    assert held == pytest.approx(PSI + (here.axes.pp > 1) * MODEL.embedding, rel=1e-12)
    assert max(here._parameters) * here.axes.tp < PSI + 1


@pytest.mark.parametrize("local", [1, 4, 8])
def test_bytes_of_data_parallel_ranks_are_two_psi_and_three_where_parameters_are_shared(local):
    here = placed(dp=8, batch=8, local=local)  # one micro-batch
    for zero, times in enumerate((2, 2, 2, 3)):
        load = here.load(how(here, zero, 1, "none"))
        sent = (
            load.node_bytes + load.network_bytes / local
        )  # all ranks of a node share a network adapter
        assert sent == pytest.approx(times * 2 * PSI * 7 / 8, rel=1e-12)
        assert load.handled_bytes == load.network_bytes / local


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_bytes_are_those_of_four_sums_of_each_layer(tp):
    here, size = placed(tp=tp, batch=6), 2
    summed = 2 * (tp - 1) / tp * 2 * MODEL.sequence * size * MODEL.hidden
    plain = here.load(how(here, 0, size, "none")).node_bytes
    assert plain == pytest.approx(4 * summed * MODEL.layers * 3, rel=1e-12)
    assert here.load(how(here, 0, size, "selective")).node_bytes == plain
    assert here.load(how(here, 0, size, "full")).node_bytes == pytest.approx(
        1.5 * plain, rel=1e-12
    )


def test_a_ring_of_context_passes_keys_and_values_around_three_times():
    here = placed(cp=4, batch=1)
    keys = 2 * 2 * MODEL.sequence * MODEL.hidden * 3 / 4
    gradients = 2 * 2 * PSI * 3 / 4
    found = here.load(how(here, 1, 1, "none")).node_bytes
    assert found == pytest.approx(3 * keys * MODEL.layers + gradients, rel=1e-12)


@pytest.mark.parametrize(("pp", "micro"), [(2, 4), (4, 4), (4, 8), (8, 32), (4, 2), (16, 64)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(pp, micro):
    model = Transformer(parameters=64 * 12 * 64**2, layers=64, hidden=64, heads=4, vocabulary=1)
    here = placed(pp=pp, batch=micro, model=model, local=1)
    terms = here.terms(how(here, 0, 1, "none"))
    part = terms.bubble_s / (sum(terms) - terms.imbalance_s)
    assert part == pytest.approx((pp - 1) / (micro + pp - 1), rel=1e-12)
    choice = LayoutChoice(
        how(here, 0, 1, "none"), here.memory(how(here, 0, 1, "none")), terms, here
    )
    assert choice.bubble == (pp - 1) / (micro + pp - 1)
    assert terms.imbalance_s == pytest.approx(
        0, abs=1e-4 * sum(terms)
    )  # from the output of one word


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_activations_in_flight_are_as_many_as_stages_or_micro_batches(recompute):
    model = Transformer.of(7.5e9, layers=36, vocabulary=1)  # its first stage is the fullest
    kept, again = model.activations(recompute)

    def held(pp, micro):
        here = placed(pp=pp, batch=micro, local=1, model=model)
        return (here.memory(how(here, 0, 1, recompute)).activations - again) / (kept * 36 / pp)

    for pp, micro in ((4, 8), (4, 4), (4, 2), (12, 6)):
        assert held(pp, micro) == pytest.approx(min(pp, micro), rel=1e-12)


def test_tensor_and_context_ranks_divide_activations_evenly():
    def held(**axes):
        here = placed(batch=1, **axes)
        return here.memory(how(here, 0, 1, "none")).activations

    for axes in ({"tp": 4}, {"cp": 4}, {"tp": 2, "cp": 2}):
        assert held(**axes) == held() / 4


def test_each_stage_of_zero_and_each_recomputation_needs_less_and_none_makes_a_step_faster():
    here = placed(tp=2, pp=2, dp=16, batch=128)
    states = [sum(here.memory(how(here, zero, 2, "none"))[:3]) for zero in range(4)]
    assert states == sorted(states, reverse=True)
    kept = [here.memory(how(here, 0, 2, recompute)).activations for recompute in RECOMPUTE]
    assert kept == sorted(kept, reverse=True)
    for steps in (
        [sum(here.terms(how(here, zero, 2, "none"))) for zero in (1, 2, 3)],
        [sum(here.terms(how(here, 1, 2, recompute))) for recompute in RECOMPUTE],
    ):
        assert steps == sorted(steps)


def test_recomputation_is_a_forward_pass_or_its_attention():
    here = placed()
    compute = MODEL.layers * MODEL.layer_flops * 64 / here.machine.flops_per_s
    attention = MODEL.layers * MODEL.attention_flops * 64 / here.machine.flops_per_s
    found = [here.terms(how(here, 0, 1, recompute)).recompute_s for recompute in RECOMPUTE]
    assert found == pytest.approx([0, attention, compute], rel=1e-12)


def test_selective_recomputation_saves_the_published_time():
    """Korthikanti et al. 2022, 530e9 parameters on 2240 A100: 54.2 % of peak, and full 42.1."""
    model = Transformer.of(layers=105, hidden=20480, heads=128)
    a100 = Machine(
        nodes=280, ranks_per_node=8, nics=8, node=Link(3e-6, 250e9), network=Link(5e-6, 25e9),
        flops_per_s=190e12,
    )  # fmt: skip
    here = Placed(a100, model, ParallelLayout(tp=8, pp=35, dp=8), 2240)
    full_s, selective_s = (
        sum(here.terms(how(here, 0, 1, recompute))) for recompute in ("full", "selective")
    )
    assert full_s / selective_s == pytest.approx(54.2 / 42.1, rel=0.03)


def test_all_ranks_compute_all_the_time_if_links_have_no_cost():
    free = Machine(nodes=8, ranks_per_node=8, node=Link(0, math.inf), network=Link(0, math.inf))
    here = Placed(free, MODEL, ParallelLayout(tp=4, dp=8, cp=2), 64)
    terms = here.terms(how(here, 3, 2, "none"))
    assert sum(terms) == terms.compute_s
    assert terms.compute_s == pytest.approx(
        3 * (MODEL.layers * MODEL.layer_flops + MODEL.output_flops) / free.flops_per_s
    )


def test_a_longer_pass_hides_more_and_never_the_last_layer():
    def exposed(flops):
        here = placed(dp=16)
        here.machine = replace(here.machine, flops_per_s=flops)
        return here.terms(how(here, 1, 1, "none")).data_s

    slow, fast, faster = exposed(1e9), exposed(1e15), exposed(1e18)
    assert slow == pytest.approx(faster / MODEL.layers, rel=1e-3)
    assert slow < fast < faster


@pytest.mark.parametrize(
    ("local", "inner", "size", "expected"),
    [
        (8, 1, 8, 8), (8, 1, 4, 4), (8, 2, 4, 4), (8, 2, 8, 4), (8, 4, 3, 1), (6, 1, 4, 2),
        (6, 4, 3, 1), (5, 1, 10, 5), (4, 8, 2, 1), (1, 1, 7, 1),
    ],
)  # fmt: skip
def test_neighbours_on_a_node_are_as_many_as_of_any_group_at_least(local, inner, size, expected):
    assert inside(local, inner, size) == expected
