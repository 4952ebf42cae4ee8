"""The noise scale is estimated from gradients of parts of batches of any sizes."""

import math
from itertools import pairwise

import pytest
import torch

from hpctrain.compress.codec import Identity
from hpctrain.core.errors import ConfigError
from hpctrain.optim import NoiseScale

DIM = 200
MEAN = torch.linspace(-1, 1, DIM, dtype=torch.float64)
SPREAD = torch.linspace(0.5, 2, DIM, dtype=torch.float64)
TRUE = float(SPREAD.square().sum() / MEAN.square().sum())


def samples(num, random):
    noise = torch.randn(num, DIM, generator=random, dtype=torch.float64)
    return MEAN + SPREAD * noise


def measured(gradients):
    return [(len(g), float(g.mean(dim=0).square().sum())) for g in gradients]


@pytest.mark.parametrize(
    ("batches", "num_parts"),
    [([(8, 8)], 2), ([(1, 2, 13)], 3), ([(0, 5, 20)], 3), ([(4, 8), (16, 32), (2, 5)], 1)],
)
def test_parts_of_any_sizes_give_the_true_noise_scale(batches, num_parts):
    """All parts of a batch or one part of each, with changing sizes."""
    noise, random = NoiseScale(decay=0.9999), torch.Generator().manual_seed(0)
    for step in range(2500):
        sizes = batches[step % len(batches)]
        batch = samples(sum(sizes), random)
        parts = [part for part in batch.split(sizes)[:num_parts] if len(part)]
        noise.add(measured(parts), *measured([batch]))
    assert noise.value() == pytest.approx(TRUE, rel=0.03)


def test_old_measurements_decay():
    noise = NoiseScale(decay=0.5)
    for squares in ((9.0, 5.0), (3.0, 2.0)):
        for _ in range(60):
            noise.add([(1, squares[0])], (2, squares[1]))
    # G2 + S = 3, G2 + S / 2 = 2
    assert noise.value() == pytest.approx(2.0)


def test_the_value_is_none_without_enough_measurements():
    noise = NoiseScale()
    assert noise.value() is None
    noise.add([], (8, 1.0))
    assert noise.value() is None
    noise.add([(8, 1.0)], (8, 1.0))  # only one batch size
    assert noise.value() is None
    noise = NoiseScale()
    noise.add([(4, 1.0)], (8, 2.0))  # impossible for gradients on average
    assert noise.value() is None
    noise = NoiseScale()
    noise.add([(4, math.inf)], (8, math.nan))
    assert not noise.sums.any()
    with pytest.raises(ConfigError, match="decay must be below 1"):
        NoiseScale(decay=1.0)


# -- measurements of ranks --


class Means(torch.nn.Module):
    """Several parameters, whose gradients are the means of the samples."""

    def __init__(self):
        super().__init__()
        sizes = [0, 3, 50, 60, DIM]
        self.places = [*pairwise(sizes)]
        self.parts = torch.nn.ParameterList(
            torch.zeros(b - a, dtype=torch.float64) for a, b in self.places
        )

    def forward(self, x):
        pairs = zip(self.parts, self.places, strict=True)
        return sum((x[:, a:b] * part).sum(dim=1) for part, (a, b) in pairs).mean()


def counts_of(step, size):
    """Return the numbers of samples of all ranks; they change with the step and may be 0."""
    return [(step + 3 * rank) % 5 + (rank + 1) * (step % 4 != rank) for rank in range(size)]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("overlap", ["thread", "end"])
def test_ranks_estimate_it_from_their_gradients_and_the_average(world, monkeypatch, overlap):
    import hpctrain as hvd  # noqa: PLC0415

    monkeypatch.setenv("HPCTRAIN_OVERLAP", overlap)
    monkeypatch.setenv("HPCTRAIN_BUCKET_BYTES", "512")
    hvd.init(ranks_per_node=2)
    model, random = Means(), torch.Generator().manual_seed(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )
    noise, expected = NoiseScale(decay=0.999), NoiseScale(decay=0.999)
    hvd.watch_noise(optimizer, noise)
    for step in range(100):
        counts = counts_of(step, hvd.size())
        batch = samples(sum(counts), random)
        parts = batch.split(counts)
        own = parts[hvd.rank()]
        optimizer.zero_grad()
        optimizer.set_num_samples(len(own), nominal=3.5)
        if len(own):
            model(own).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        expected.add(measured([own] if len(own) else []), *measured([batch]))
    torch.testing.assert_close(noise.sums, expected.sums, rtol=1e-10, atol=0)
    of_all = noise.value(hvd.allreduce(noise.sums))
    assert of_all == pytest.approx(TRUE, rel=0.2)
    assert len(set(world.allgather(of_all))) == 1
    hvd.shutdown()


@pytest.mark.ranks(2, 3)
def test_watching_the_noise_changes_no_results_and_costs_nothing_when_off(hvd):
    found = []
    for watches in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)).float()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        assert type(optimizer.codec) is Identity
        noise = NoiseScale()
        if watches:
            hvd.watch_noise(optimizer, noise)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + hvd.rank())
            model(torch.randn(6, 5)).square().mean().backward()
            optimizer.step()
        assert bool(noise.sums.any()) == watches
        assert optimizer.codec.state_dict() == {}
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks(2)
def test_an_optimizer_without_averages_in_backward_is_rejected(hvd):
    model = torch.nn.Linear(3, 2)
    for options in ({"op": hvd.Sum}, {"op": hvd.Adasum}, {"shard": "node"}):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        with pytest.raises(ConfigError, match='op=Average and without shard="node"'):
            hvd.watch_noise(optimizer, NoiseScale())
        del optimizer
    with pytest.raises(ConfigError, match="got SGD; wrap the optimizer,"):
        hvd.watch_noise(torch.optim.SGD(model.parameters(), lr=0.1), NoiseScale())
