"""Layers go from slow ranks to fast ones, and training goes on as if they had been there."""

import itertools
import random
import re
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain import ConfigError, MismatchError
from hpctrain.parallel import Pipeline, build_mesh, gradient_mesh
from hpctrain.parallel.rebalance import speeds
from tests.parallel.conftest import started
from tests.parallel.test_stages import Slow, dearest, least
from tests.parallel.training import CLIP, adamw, batches, check, lm, loss_of, transformer


def test_a_slow_rank_is_told_from_a_dear_layer():
    some = random.Random(0)
    for _ in range(50):
        num = some.randint(2, 5)
        slow = [some.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(num)]
        cost_of = {kind: some.uniform(0.1, 5) for kind in "abc"}
        kinds = [["a", *some.choices("abc", k=some.randint(0, 3))] for _ in range(num)]
        found, costs, number = [], [], 0
        for factor, of_rank in zip(slow, kinds, strict=True):
            found.append({})
            for kind in of_rank:
                found[-1][number] = (kind, factor * cost_of[kind])
                costs.append(cost_of[kind])
                number += 1
        if any(len({r for r, ks in enumerate(kinds) if k in ks}) not in (0, num) for k in "bc"):
            continue  # the median of a kind is of the same ranks for all
        slowness, usual = speeds(found)
        for one, other in ((slowness, slow), (usual, costs)):
            assert [each / one[0] for each in one] == pytest.approx([x / other[0] for x in other])
    alone = speeds([{0: ("a", 3.0)}, {1: ("b", 1.0)}])
    assert alone == ([1.0, 1.0], [3.0, 1.0])


def state_by_name(pipeline, optimizer):
    """Parameters, gradients and state of all ranks, by name."""
    mine = [
        (name, {"": p.detach(), "gradient": p.grad, **optimizer.state[p]})
        for name, p in pipeline.model.named_parameters(remove_duplicate=False)
    ]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [pair for of_rank in found for pair in of_rank]


def moved(pipeline, optimizer, ends):
    """Cut otherwise, and see that what there is stays what it was, to the bit."""
    before = dict(state_by_name(pipeline, optimizer))
    pipeline._move([*itertools.starmap(range, itertools.pairwise(ends))], optimizer)
    after = state_by_name(pipeline, optimizer)
    assert {name for name, _ in after} == set(before)
    for name, told in after:
        assert told.keys() == before[name].keys()
        assert all(torch.equal(told[key], before[name][key]) for key in told)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert set(held) == set(optimizer.state) == set(pipeline.model.parameters())
    assert len(held) == len(set(held))


def trained(pipeline, mesh, cuts):
    """Train, with another cut behind each step; return the losses."""
    optimizer, losses = adamw(pipeline.model.parameters()), []
    model, (dp, cp) = pipeline.model, (mesh["dp"], mesh["cp"])
    for (given, following), ends in zip(batches(), cuts, strict=True):
        optimizer.zero_grad()
        mine = [
            x.chunk(dp.size())[dp.get_local_rank()].chunk(cp.size(), 1)[cp.get_local_rank()]
            for x in (given, following)
        ]
        loss = pipeline.step(*mine)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=gradient_mesh(mesh).get_group())
        losses.append(loss.item())
        pipeline.clip_grad_norm_(CLIP)
        optimizer.step()
        if ends:
            moved(pipeline, optimizer, ends)
    assert pipeline.model is model
    return losses


CUTS = {
    "1f1b": [(0, 6, 8), (0, 1, 8), None, (0, 4, 8), (0, 3, 8)],
    "zbv": [(0, 1, 2, 7, 8), (0, 3, 4, 5, 8), None, (0, 2, 4, 6, 8), (0, 5, 6, 7, 8)],
    "interleaved": [(0, 1, 2, 7, 8), (0, 3, 4, 5, 8), None, (0, 2, 4, 6, 8), (0, 5, 6, 7, 8)],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", CUTS)
def test_training_with_moves_is_that_of_one_process(schedule):
    shape = {"depth": 5, "tied": schedule != "interleaved"}
    with started():
        mesh = build_mesh(pp=2)
        options = {"loss": loss_of, "num_microbatches": 4, "schedule": schedule}
        pipeline = Pipeline(transformer(**shape), mesh["pp"], lm.LAYERS, **options)
        losses = trained(pipeline, mesh, CUTS[schedule])
        check(losses, pipeline.model.named_parameters(remove_duplicate=False), **shape)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["replicas", "context"])
def test_stages_of_several_ranks_move_alike(inner):
    with started():
        mesh = build_mesh(pp=2, cp=2 if inner == "context" else 1)
        model, cp = transformer(depth=3), mesh["cp"]
        if inner == "context":
            model.parallel_context(cp)
        wrap = partial(DistributedDataParallel, process_group=gradient_mesh(mesh).get_group())
        options = {"loss": loss_of, "num_microbatches": 2, "wrap": wrap}
        pipeline = Pipeline(model, mesh["pp"], lm.LAYERS, **options)
        losses = trained(pipeline, mesh, [(0, 4, 6), None, (0, 2, 6), (0, 3, 6), None])
        check(losses, pipeline.model.named_parameters(), depth=3)


def mean(out, target):
    return (out - target).square().mean()


def chain():
    """Layers 1, 2 and 4 have one weight, the first and the last one another."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    for places in ((1, 2, 4), (0, 5)):
        for place in places:
            model[place].weight = model[places[0]].weight
    return model


def in_groups(model):
    """Of weights, which decay, and of biases, which do not; a bias is not trained."""
    named = dict(model.named_parameters())
    named.get("3.bias", torch.zeros(1, requires_grad=False)).requires_grad = False
    weights, biases = (
        [p for name, p in named.items() if name.endswith(what) and p.requires_grad]
        for what in ("weight", "bias")
    )
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)


@pytest.mark.ranks(2)
def test_weights_of_several_layers_come_together_and_part():
    some, batch = random.Random(0), torch.arange(16.0, dtype=torch.float64).view(4, 4) / 16
    one = chain()
    alone = in_groups(one)
    with started():
        mesh = build_mesh(pp=2)
        options = {"loss": mean, "num_microbatches": 2, "schedule": "zbv"}
        pipeline = Pipeline(chain(), mesh["pp"], ["*"], **options)
        optimizer = in_groups(pipeline.model)
        for _ in range(12):
            for each in (alone, optimizer):
                each.zero_grad()
            loss = mean(one(batch), 0 * batch)
            loss.backward()
            found = pipeline.step(batch, 0 * batch)
            torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
            for each in (alone, optimizer):
                each.step()
            cut = [
                range(*ends)
                for ends in itertools.pairwise([0, *sorted(some.sample(range(1, 6), 3)), 6])
            ]
            pipeline._move(cut, optimizer)
            held = [[*group["params"]] for group in optimizer.param_groups]
            assert [*map(len, held)] == [len({*map(id, each)}) for each in held]
            for name, parameter in pipeline.model.named_parameters(remove_duplicate=False):
                expected = one.get_parameter(name)
                torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-14)
                assert parameter.requires_grad == (name != "3.bias")
                assert (
                    any(parameter is p for p in held[name.endswith("bias")])
                    == parameter.requires_grad
                )


class SlowThere(Slow):
    """Slow on one rank: twice as long there."""

    rank = 1

    @property
    def seconds(self):
        return self.usual_s * (1 + (dist.get_rank() == self.rank))

    @seconds.setter
    def seconds(self, usual_s):
        self.usual_s = usual_s


@pytest.mark.ranks(4)
def test_a_stage_on_a_slow_rank_gives_layers_away_until_it_is_as_fast_as_by_the_best_cut():
    batch = torch.zeros(4, 3)
    with started():
        mesh = build_mesh(pp=4)
        model = nn.Sequential(*(SlowThere(0.006) for _ in range(16)))
        pipeline = Pipeline(model, mesh["pp"], ["*"], loss=mean, num_microbatches=4)
        optimizer = torch.optim.SGD(pipeline.model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="got none; call step before it"):
            pipeline.rebalance(optimizer)
        pipeline.step(batch, batch)
        assert "(rank 1, on " in pipeline.report()
        told = pipeline.rebalance(optimizer)
        pipeline.step(batch, batch)
        again = pipeline.rebalance(optimizer, least_gain=0.3)
    slowness, costs = [1, 2, 1, 1], [1] * 16
    best = least(costs, slowness)
    assert dearest(costs, pipeline.split, slowness) <= 1.1 * best
    ratio, host, moves = re.fullmatch(
        r"rank 1 of the pipeline is slowest, (.*) times the median of the others "
        r"\(rank 1, on (.*)\); (.*): the slowest stage, .*, .*", told
    ).groups()  # fmt: skip
    assert float(ratio) == pytest.approx(2, rel=0.3)
    assert host == socket.gethostname()
    assert "from rank 1 to" in moves
    assert again.endswith("; no other cut wins 30% of the slowest stage's time")


@pytest.mark.ranks(2)
def test_what_cannot_move_is_an_error_on_all_ranks_and_nothing_has_moved():
    batch, (given, following) = torch.zeros(4, 3), batches(1)[0]
    with started():
        mesh, rank = build_mesh(pp=2), dist.get_rank()
        options = {"loss": loss_of, "num_microbatches": 2}

        def refused(pipeline, error, told, optimizer=None):
            before = pipeline.split
            optimizer = optimizer or torch.optim.SGD(pipeline.model.parameters(), lr=0.1)
            with pytest.raises(error, match=told):
                pipeline.rebalance(optimizer)
            assert pipeline.split is before

        shards = partial(fully_shard, mesh=mesh["dp"])
        pipeline = Pipeline(transformer(), mesh["pp"], lm.LAYERS, wrap=shards, **options)
        pipeline.step(given, following)
        refused(pipeline, ConfigError, "moves whole parameters, got .*; write a distributed")
        model = nn.Sequential(*(SlowThere(0.004) for _ in range(6)))
        for layer in model:
            layer.register_forward_hook(lambda *_: None)  # nobody can pickle it
        pipeline = Pipeline(model, mesh["pp"], ["*"], **options | {"loss": mean})
        pipeline.step(batch, batch)
        refused(pipeline, ConfigError, r"rebalance pickles the layers that move, got \d: ")
        others = [*pipeline.model.parameters(), nn.Parameter(torch.ones(1))][
            : None if rank else -1
        ]
        refused(pipeline, ConfigError, "got 1 parameters of others", torch.optim.SGD(others))
        kind = torch.optim.AdamW if rank else torch.optim.SGD
        other = kind(pipeline.model.parameters(), lr=0.1)
        refused(pipeline, MismatchError, "the optimizer must be the same", other)
        pipeline.step(batch, batch)
