"""Who counts in a round, by how much, and what is known to all ranks when."""

import time

import pytest
import torch
from torch import nn

from hpctrain.core.errors import MismatchError
from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import num_kinds, train, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 4)


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
            assert num_kinds(world, weights_of(model)) == 1
        else:
            with pytest.raises(MismatchError, match="skip_step"):
                method.rounds.meet()
        method.close()


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
        for step in range(20):
            time.sleep(0.01)
            train(hvd_nodes, model, optimizer, method, step, step + 1)
            met.append(method.rounds.has_met)
    assert met[0]  # nothing is known of the time of a step yet
    assert 2 <= sum(met) <= 16


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
        met.append(method.rounds.has_met)
    assert met == [True] * 8 + [False] * 3 + [True] + [False] + [True] * 3
    method.close()
