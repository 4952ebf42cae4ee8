"""Each repeat has every point once, in an order that depends on the seed."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError
from hpctrain.studies.points import Placement, PointRepeat, attempts_of, layout_of
from hpctrain.studies.study_file import CommandTable, StudyConfig, StudyTable

TEXT = "run {ranks} {nodes} {batch} {codec}"


def config(factors, command=TEXT, **table) -> StudyConfig:
    for name in ("batch", "codec"):
        command = command if name in factors else command.replace(f"{{{name}}}", "")
    how = CommandTable(run=command, launcher="")
    return StudyConfig(factors=factors, study=StudyTable(**table), command=how)


def points_of(asked):
    """Return the points of a study."""
    return [each.point for each in attempts_of(asked) if each.repeat == 0]


@given(
    st.fixed_dictionaries(
        {
            "ranks": st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
            "codec": st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
        }
    ),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_each_repeat_is_a_permutation_of_all_points_given_by_the_seed(factors, repeats, seed):
    asked = config(factors, repeats=repeats, seed=seed)
    attempts = attempts_of(asked)
    num = len(attempts) // repeats
    assert [attempt.order for attempt in attempts] == list(
        range(len(factors["ranks"]) * len(factors["codec"]) * repeats)
    )
    for repeat in range(repeats):
        block = attempts[repeat * num : (repeat + 1) * num]
        assert {attempt.repeat for attempt in block} == {repeat}
        found = [tuple(attempt.point.values()) for attempt in block]
        assert sorted(found) == sorted(itertools.product(*factors.values()))
    assert attempts == attempts_of(asked)
    more = replace(asked, study=replace(asked.study, repeats=repeats + 1))
    assert attempts_of(more)[: len(attempts)] == attempts  # so that repeats can be added later


def test_repeats_and_seeds_have_different_orders():
    factors = {"ranks": list(range(1, 17))}
    one, other = (attempts_of(config(factors, repeats=2, seed=seed)) for seed in (1, 2))
    orders = [[a.point["ranks"] for a in each] for each in (one[:16], one[16:], other[:16])]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(
    ("point", "layout"),
    [
        ({"ranks": 4}, (4, 1, 4)),
        ({"ranks": 4, "nodes": 2}, (4, 2, 2)),
        ({"ranks": 3, "nodes": 2}, (3, 2, 2)),
        ({"ranks": 8, "ranks_per_node": 4}, (8, 2, 4)),
        ({"ranks": 1, "ranks_per_node": 4}, (1, 1, 1)),
        ({"nodes": 2, "ranks_per_node": 3}, (6, 2, 3)),
        ({"batch": 8}, (1, 1, 1)),
        ({"ranks": 4, "nodes": 2, "ranks_per_node": 2}, (4, 2, 2)),
        ({"ranks": 4, "nodes": 2, "ranks_per_node": 4}, None),
        ({"ranks": 1, "nodes": 2}, None),
    ],
)
def test_a_point_defines_ranks_and_nodes_or_is_contradictory(point, layout):
    assert layout_of(point) == (layout and Placement(*layout))


def test_contradictory_points_are_omitted_and_it_is_an_error_if_none_remain():
    asked = config({"ranks": [1, 2, 4], "nodes": [1, 2]})
    assert len(points_of(asked)) == 5
    with pytest.raises(ConfigError, match="add such a combination"):
        points_of(config({"ranks": [1], "nodes": [2]}))


def test_the_batch_is_global_in_a_strong_study_and_per_rank_in_a_weak_one():
    attempt = PointRepeat(point={"ranks": 4, "batch": 64}, repeat=0, order=0)
    strong, weak = (attempt.names(mode, Path("f")) for mode in ("strong", "weak"))
    assert (strong["global_batch"], strong["rank_batch"]) == (64, 16)
    assert (weak["global_batch"], weak["rank_batch"]) == (256, 64)
    factors = {"ranks": [3], "batch": [64]}
    with pytest.raises(ConfigError, match="batch of 64 for 3 ranks"):
        points_of(config(factors, "run {ranks} {rank_batch}"))
    assert points_of(config(factors, "run {ranks} {rank_batch}", mode="weak"))


def test_more_ranks_than_cores_of_the_hosts_are_oversubscribed():
    attempt = PointRepeat(point={"ranks": 8, "nodes": 4}, repeat=0, order=0)
    assert attempt.is_oversubscribed(cores=2, hosts=1)
    assert attempt.is_oversubscribed(cores=2, hosts=3)
    assert not attempt.is_oversubscribed(cores=2, hosts=4)
    assert not attempt.is_oversubscribed(cores=8, hosts=1)
