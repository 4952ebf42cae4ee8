"""Check the search for layouts against brute force, and the reasons for rejected layouts."""

import math
import random
import re
import time
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.layout_search import LayoutRules, best_layouts
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.transformer import Transformer
from tests.cost.layout_oracle import Case

CLUSTER = Machine(
    nodes=8, ranks_per_node=8, node=Link(3e-6, 250e9), network=Link(5e-6, 25e9), nics=4
)
MODEL = Transformer.of(7.5e9)
RULES = LayoutRules(batch=512)
ALL = 1 << 30


def axes(choice):
    return (choice.layout.tp, choice.layout.pp, choice.layout.dp, choice.layout.cp)


def drawn(seed):
    """Draw a small case; each term of the time matters in some of the cases."""
    some = random.Random(seed)
    nodes, local = some.choice(
        [(1, 1), (1, 4), (2, 2), (2, 3), (3, 4), (2, 6), (4, 3), (5, 1), (2, 8)]
    )
    heads = some.choice([1, 2, 3, 4, 6, 12])
    layers, hidden = some.choice([*range(1, 10), 12, 16]), heads * some.choice([4, 16, 24])
    words, fused, tied = some.choice([16, 300]), some.random() < 0.3, some.random() < 0.5
    case = Case(
        nodes=nodes, local=local, layers=layers, heads=heads, hidden=hidden, vocabulary=words,
        sequence=some.choice([7, 16, 48, 96]), batch=some.choice([1, 5, 8, 12, 18]),
        parameters=12 * layers * hidden**2 + 2 * words * hidden, tied=tied, fused=fused,
        across=some.random() < 0.3, nics=some.randint(1, 3), flops=10 ** some.uniform(8, 12),
        node_latency=10 ** some.uniform(-7, -4), node_rate=10 ** some.uniform(7, 11),
        network_latency=10 ** some.uniform(-6, -3), network_rate=10 ** some.uniform(6, 10),
        capacity=0.0, per_core=some.choice([1, 1, 2, 3]), pass_s=some.choice([0, 1e-4, 0.1]),
        tensor_pass_s=some.choice([0, 1e-3, 0.1]),
    )  # fmt: skip
    least = case.everything()[2]
    case.capacity = (least if math.isfinite(least) else 1e9) * some.choice([0.5, 1.2, 2.0, 10.0])
    return case


def asked(case):
    machine = Machine(
        nodes=case.nodes,
        ranks_per_node=case.local,
        node=Link(case.node_latency, case.node_rate),
        network=Link(case.network_latency, case.network_rate),
        nics=case.nics,
        memory_bytes=case.capacity,
        flops_per_s=case.flops,
        ranks_per_core=case.per_core,
        pass_s=case.pass_s,
        tensor_pass_s=case.tensor_pass_s,
    )
    model = Transformer(
        parameters=case.parameters,
        layers=case.layers,
        hidden=case.hidden,
        heads=case.heads,
        sequence=case.sequence,
        vocabulary=case.vocabulary,
        tied=case.tied,
        fused_attention=case.fused,
    )
    return machine, model, LayoutRules(batch=case.batch, tp_across_nodes=case.across)


@cache
def of_brute_force(seed):
    case = drawn(seed)
    return case, case.everything()


@pytest.mark.parametrize("seed", range(50))
def test_the_search_finds_the_layouts_of_brute_force(seed):
    case, (fitting, num_layouts, least) = of_brute_force(seed)
    if not num_layouts:
        with pytest.raises(ConfigError, match="must obey all rules"):
            best_layouts(*asked(case))
        return
    if not fitting:
        with pytest.raises(ConfigError) as caught:
            best_layouts(*asked(case))
        assert f"needs {least / 1e9:.4g} GB" in str(caught.value)
        return
    found = best_layouts(*asked(case), keep=ALL)
    assert found.num_layouts == num_layouts
    assert len(found.best) == len(fitting)
    assert found.lost == (
        {"does not fit": num_layouts - len(fitting)} if num_layouts > len(fitting) else {}
    )
    by_layout = {one.layout: one for one in fitting}
    for choice in found.best:
        one = choice.layout
        key = (one.tp, one.pp, one.dp, one.cp, one.zero, one.micro_batch, one.recompute)
        key += (one.virtual, one.schedule)
        assert sum(choice.terms) == pytest.approx(by_layout[key].seconds, rel=1e-9)
        assert sum(choice.memory) == pytest.approx(by_layout[key].memory, rel=1e-9)
    five = best_layouts(*asked(case))
    assert [one.layout for one in five.best] == [one.layout for one in found.best[:5]]
    assert [sum(one.terms) for one in five.best] == pytest.approx(
        [one.seconds for one in fitting[:5]], rel=1e-8
    )
    assert sum(five.lost.values()) == num_layouts - len(five.best)


def test_cases_of_brute_force_have_different_results():
    best, shown, outcomes = set(), set(), set()
    for seed in range(50):
        _, (fitting, num_layouts, _) = of_brute_force(seed)
        outcomes.add((bool(num_layouts), bool(fitting)))
        best |= {one.layout for one in fitting[:1]}
        shown |= {one.layout[-2:] for one in fitting}
    assert {(True, True), (True, False)} <= outcomes
    for number, least in enumerate(
        (2, 2, 2, 2, 3, 3, 2)
    ):  # tp pp dp cp zero micro-batch recompute
        assert len({layout[number] for layout in best}) >= least, number
    assert shown == {*product((1, 2, 3, 4), ("1f1b", "zero_bubble"))}


def test_every_layout_uses_all_ranks_and_keeps_tensor_groups_inside_nodes_by_default():
    for machine in (CLUSTER, replace(CLUSTER, nodes=4, ranks_per_node=6)):
        rules = LayoutRules(batch=machine.num_ranks * 4)
        inside = best_layouts(machine, MODEL, rules, keep=ALL).best
        across = best_layouts(machine, MODEL, replace(rules, tp_across_nodes=True), keep=ALL).best
        for one in (*inside, *across):
            tp, pp, dp, cp = axes(one)
            assert tp * pp * dp * cp == machine.num_ranks
            assert rules.batch % (dp * one.layout.micro_batch) == 0
            assert MODEL.heads % tp == 0
        assert all(machine.ranks_per_node % one.layout.tp == 0 for one in inside)
        assert any(machine.ranks_per_node % one.layout.tp for one in across)


def test_more_memory_never_makes_a_step_slower_nor_fewer_layouts_fit():
    found = [
        best_layouts(replace(CLUSTER, memory_bytes=size * 1e9), MODEL, RULES)
        for size in (6, 10, 20, 40, 80, 640)
    ]
    seconds = [sum(one.best[0].terms) for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.05 * seconds[-1]
    misfits = [one.lost.get("does not fit", 0) for one in found]
    assert misfits == sorted(misfits, reverse=True)
    assert misfits[0] > misfits[-1]


@pytest.mark.parametrize("name", ["node", "network"])
def test_a_faster_link_never_makes_a_step_slower(name):
    frugal = replace(CLUSTER, memory_bytes=12e9)
    machines = [replace(frugal, **{name: Link(5e-6, rate)}) for rate in (1e9, 1e10, 1e11, 1e13)]
    seconds = [sum(best_layouts(one, MODEL, RULES).best[0].terms) for one in machines]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_a_micro_batch_more_never_needs_less_memory():
    """The search may therefore stop at the first that does not fit."""
    found = best_layouts(replace(CLUSTER, memory_bytes=1e15), MODEL, RULES, keep=ALL).best
    by_rest = {}
    for one in found:
        rest = replace(one.layout, micro_batch=1)
        by_rest.setdefault(rest, []).append((one.layout.micro_batch, sum(one.memory)))
    for sizes in by_rest.values():
        memory = [size for _, size in sorted(sizes)]
        assert memory == sorted(memory)


def test_a_layout_that_is_fixed_is_kept_and_nothing_faster_is_hidden():
    free = best_layouts(CLUSTER, MODEL, RULES)
    fixed = {"tp": 4, "zero": 1, "recompute": "full", "micro_batch": 2}
    found = best_layouts(CLUSTER, MODEL, replace(RULES, fixed=fixed), keep=ALL)
    for one in found.best:
        assert {name: getattr(one.layout, name) for name in fixed} == fixed
    assert sum(found.best[0].terms) >= sum(free.best[0].terms)
    more = {"pp": 2, "cp": 1, "virtual": 3, "schedule": "zero_bubble"}
    both = {"recompute": "selective", "schedule": "zero_bubble"}
    with pytest.raises(ConfigError, match="selective recomputation with zero_bubble: "):
        best_layouts(CLUSTER, MODEL, replace(RULES, fixed=both))
    (only,) = best_layouts(CLUSTER, MODEL, replace(RULES, fixed=fixed | more)).best
    assert axes(only) == (4, 2, 8, 1)


def test_search_for_a_thousand_ranks_takes_less_than_two_seconds():
    machine, model = replace(CLUSTER, nodes=128), Transformer.of(175e9)
    begin = time.process_time()
    found = best_layouts(machine, model, LayoutRules(batch=8192))
    assert time.process_time() - begin < 2
    assert found.num_layouts > 60_000


@pytest.mark.parametrize(
    ("wrong", "output"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"fixed": {"tp": 0}}, "tp must be at least 1, got 0"),
        ({"fixed": {"zero": 4}}, "zero must be below 4, got 4"),
        ({"fixed": {"recompute": "all"}}, "must be one of none, selective, full, got 'all'"),
        ({"fixed": {"pp": "two"}}, "pp must be an integer, got 'two'"),
        ({"fixed": {"ep": 2}}, "recompute, virtual, schedule, got 'ep'"),
        ({"memory_part": 0}, "memory_part must be above 0, got 0"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused(wrong, output):
    with pytest.raises(ConfigError, match=re.escape(output)):
        LayoutRules(**{"batch": 8} | wrong)


def test_model_that_fits_nowhere_raises_with_the_missing_memory():
    small = replace(CLUSTER, nodes=1)
    with pytest.raises(ConfigError) as caught:
        best_layouts(small, Transformer.of(70e9), RULES)
    output = str(caught.value)
    assert "a layout must need at most 72 GB per rank (90% of 80 GB)" in output
    least, missing = (
        float(re.search(rf"([\d.]+) GB{word}", output)[1]) for word in (", ", " too much")
    )
    assert missing == pytest.approx(least - 72, abs=0.1)
    nodes, gigabytes = (
        int(re.search(rule, output)[1]) for rule in (r"use (\d+) nodes", r"GPUs of (\d+) GB")
    )
    for enough in (replace(small, nodes=nodes), replace(small, memory_bytes=gigabytes * 1e9)):
        assert best_layouts(enough, Transformer.of(70e9), RULES).best
    for less in (
        replace(small, nodes=nodes // 2),
        replace(small, memory_bytes=(gigabytes - 1) * 1e9),
    ):
        with pytest.raises(ConfigError, match="too much"):
            best_layouts(less, Transformer.of(70e9), RULES)


def test_violations_are_counted_if_no_layout_is_valid():
    prime = Machine(nodes=7, ranks_per_node=1)
    model = Transformer.of(layers=2, hidden=64)
    with pytest.raises(
        ConfigError, match=r"4 divisions of 7 ranks break one: .*does not divide the batch: 1"
    ):
        best_layouts(prime, model, LayoutRules(batch=1))
    assert axes(best_layouts(prime, model, LayoutRules(batch=7)).best[0]) == (1, 1, 7, 1)


def test_one_rank_divides_nothing():
    found = best_layouts(Machine(), Transformer.of(layers=2, hidden=64), LayoutRules(batch=4))
    assert {axes(one) for one in found.best} == {(1, 1, 1, 1)}
    assert {one.layout.zero for one in found.best} == {0}
    for one in found.best:
        assert not any(one.load)
        assert one.bubble == 0
    assert (
        found.best[0].layout.micro_batch == 4
    )  # among equally fast ones, the largest micro-batch
