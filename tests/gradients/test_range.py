"""Check that means weighted by sample counts are finite and close to float64 for each dtype."""

import math

import pytest
import torch
from torch import nn

import hpctrain
from hpctrain.gradients.sample_count import exponent_of, exponent_of_peaks, peak_of

# Per dtype: the part of its range that gradients fill, and the tolerance of a mean. Sums of
# float32 over ranks must fit; between nodes they may begin before all weights are known.
DTYPES = {torch.float16: (0.99, 3e-3), torch.bfloat16: (0.2, 2e-2), torch.float32: (1e-5, 1e-5)}
COUNTS = {
    "ascending": lambda rank: 64 * (rank + 1),
    "far apart": lambda rank: 10_000.0 if rank else 1,
    "none on rank 0": lambda rank: 96 * rank,
    "fractions": lambda rank: 2.0**-20 * (rank + 1),
}
COUNTED = ("averaged", "predivided", "node", "sparse", "local", "anchored", "server")


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def forward(self, values):
        rows = torch.arange(8)
        return (nn.functional.embedding(rows, self.weight, sparse=True) * values).sum()


class Dense(Sparse):
    def forward(self, values):
        return (self.weight * values).sum()


def wrapped(kind, model):
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "local":
        return plain, hpctrain.LocalSGD(model, plain, 1)
    if kind == "anchored":
        return plain, hpctrain.LocalSGD(model, plain, 1, compression="bf16")
    if kind == "server":
        return plain, hpctrain.StaleSynchronous(model, plain, 0)
    options = {"node": {"shard": "node"}, "predivided": {"gradient_predivide_factor": 2.0}}
    made = hpctrain.DistributedOptimizer(plain, **options.get(kind, {}))
    return made, made


def values_of(rank, dtype, part):
    generator = torch.Generator().manual_seed(rank)
    signs = torch.randint(0, 2, (8, 4), generator=generator) * 2.0 - 1.0
    values = signs * torch.finfo(dtype).max * part
    values[4:] *= torch.rand(4, 4, generator=generator)
    return values.to(dtype)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("world_of", [(None, ""), (1, ""), (1, "thread")])
def test_a_weighted_mean_is_finite_and_close_to_float64(worlds, kind, world_of):
    worlds.enter(*world_of)
    rank, ranks = hpctrain.rank(), range(hpctrain.size())
    for dtype, (part, off) in DTYPES.items():
        model = (Sparse() if kind == "sparse" else Dense()).to(dtype)
        optimizer, method = wrapped(kind, model)
        for name, count in COUNTS.items():
            if kind == "anchored":  # writes to parameters keep the anchor
                method.close()
                model = Dense().to(dtype)
                optimizer, method = wrapped(kind, model)
            start = model.weight.detach().double()
            method.set_num_samples(count(rank))
            optimizer.zero_grad()
            model(values_of(rank, dtype, part)).backward()
            optimizer.step()
            total = sum(map(count, ranks))
            mean = sum(count(r) / total * values_of(r, dtype, part).double() for r in ranks)
            moved = start - model.weight.detach().double()
            most = (2e-2 if kind == "anchored" else off) * part * torch.finfo(dtype).max
            assert moved.isfinite().all(), (dtype, name)
            assert float((moved - mean).abs().max()) <= most, (dtype, name)
            with torch.no_grad():
                model.weight.zero_()
            if kind == "server":
                method.reload()
        getattr(method, "close", int)()


@pytest.mark.parametrize("weights", [[1.0], [0.0, 3.0], [1e-9, 1e9], [2.0**60] * 1000, [0.0]])
def test_largest_exponent_is_recovered_from_a_sum(weights):
    exponent = exponent_of_peaks(math.fsum(map(peak_of, weights)))
    assert exponent == exponent_of(max(weights))
    assert max(weights) <= 2.0**exponent
    assert not max(weights) or 2.0**exponent < 2 * max(weights)
