"""A pipeline is cut at the fastest place, and reports its bubble and its slowest rank."""

import itertools
import time

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import ConfigError
from hpctrain.parallel import Pipeline, build_mesh
from hpctrain.parallel.split import cut
from tests.parallel.conftest import started


def dearest(costs, stages):
    return max(sum(costs[i] for i in part) for part in stages)


def least(costs, num):
    """Return the cost of the most expensive stage of the best cut, by exhaustive search."""
    inner = itertools.combinations(range(1, len(costs)), num - 1)
    every = (
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))] for cuts in inner
    )
    return min(dearest(costs, stages) for stages in every)


def test_no_other_cut_has_a_cheaper_most_expensive_stage():
    random = np.random.default_rng(0)
    for _ in range(50):
        costs, num = random.random(int(random.integers(4, 9))).tolist(), int(random.integers(2, 5))
        found = cut(costs, num)
        assert [i for stage in found for i in stage] == list(range(len(costs)))
        assert dearest(costs, found) == pytest.approx(least(costs, num), rel=1e-12)
    with pytest.raises(ConfigError, match="got 2 layers for 3 stages"):
        cut([1.0, 1.0], 3)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Sleep.apply(x * self.factor, self.seconds)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_follows_the_formula(schedule, world):
    with started():
        mesh, batch = build_mesh(pp=4), torch.zeros(8, 3)
        model = nn.Sequential(*(Slow(0.08) for _ in range(4)))
        options = {"num_microbatches": 8, "schedule": schedule}
        mean = lambda out, target: (out - target).square().mean()  # noqa: E731
        pipeline = Pipeline(model, mesh["pp"], ["*"], loss=mean, **options)
        pipeline.step(batch, batch)
        # Ranks that wake late on a busy machine lengthen the bubble. Without any overlap of the
        # stages it would be 3 / 4.
        for _ in range(5):
            pipeline.step(batch, batch)
            output, most = pipeline.report(), pipeline.most_in_flight
            bubble = float(output.split()[1].rstrip(","))
            assert bubble > 0.95 * 3 / 11
            if bubble < 1.5 * 3 / 11:
                break
    assert bubble < 1.5 * 3 / 11
    assert "(P - 1) / (M + P - 1) is 0.273" in output
    assert most == (8 if schedule == "gpipe" else min(8, 4 - world.rank))


@pytest.mark.ranks(2)
def test_layers_are_cut_by_measured_time_and_the_slowest_rank_is_named():
    with started():
        mesh, batch = build_mesh(pp=2), torch.zeros(4, 3)
        model = nn.Sequential(Slow(0.05), *(Slow(0.01) for _ in range(4)))
        mean = lambda out, target: (out - target).square().mean()  # noqa: E731
        options = {"num_microbatches": 4, "loss": mean}
        pipeline = Pipeline(model, mesh["pp"], ["*"], sample=batch[:1], **options)
        assert pipeline.split == [range(1), range(1, 5)]
        assert Pipeline(model, mesh["pp"], ["*"], **options).split != pipeline.split
        with pytest.raises(ConfigError, match="a multiple of the 4 micro-batches, got 3 sa"):
            pipeline.step(batch[:3], batch[:3])
        with pytest.raises(ConfigError, match=r"no layer has 1\.factor"):
            Pipeline(model, mesh["pp"], ["0", "2", "3", "4"], **options)
        with pytest.raises(ConfigError, match=r"schedule must be one of gpipe, .*, got '1f2b'"):
            Pipeline(model, mesh["pp"], ["*"], schedule="1f2b", **options)
        slow = nn.Sequential(Slow(0.01), Slow(0.03))
        other = Pipeline(slow, mesh["pp"], ["*"], **options)
        with pytest.raises(ConfigError, match="must be called after step"):
            other.report()
        other.step(batch, batch)
        assert "rank 1 of the pipeline is slowest" in other.report()
