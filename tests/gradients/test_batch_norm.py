"""Check that ``SyncBatchNorm`` on ranks equals ``BatchNorm`` on one process with all samples."""

import copy

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ConfigError
from tests.gradients.training import EVERY_SIZE, MANY, ONE_NODE

pytestmark = ONE_NODE
SHAPES = ((4,), (4, 5), (4, 3, 2))


def samples(hvd, shape, dtype=torch.float64):
    """Return the samples of all ranks, and the slice of this rank; rank 0 of several has none."""
    sizes = [0 if rank == 0 and hvd.size() > 1 else 2 + rank for rank in range(hvd.size())]
    generator = torch.Generator().manual_seed(len(shape))
    every = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64)
    start = sum(sizes[: hvd.rank()])
    return every.to(dtype), slice(start, start + sizes[hvd.rank()])


def pair(hvd, **options):
    together = hvd.SyncBatchNorm(4, **options).double()
    alone = nn.BatchNorm3d(4, **options).double()
    alone._check_input_dim = lambda _: None
    if together.affine:
        for module in (together, alone):
            module.weight.data = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
            module.bias.data = torch.tensor([0.0, 1.0, 2.0, -1.0]).double()
    return together, alone


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@EVERY_SIZE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"affine": False, "eps": 0.1},
        {"track_running_stats": False, "momentum": 0.3},
    ],
    ids=["default", "no momentum", "not affine", "no statistics"],
)
def test_outputs_statistics_and_gradients_are_those_of_one_process(hvd, options):
    for shape in SHAPES:
        compare(hvd, shape, *pair(hvd, **options))


def compare(hvd, shape, together, alone):
    every, own = samples(hvd, shape)
    for step in range(2):
        x_all = (every * (step + 1)).requires_grad_()
        x_own = (every[own] * (step + 1)).requires_grad_()
        factor = torch.arange(x_all.numel()).view(x_all.shape).double().sin()
        y_all, y_own = alone(x_all), together(x_own)
        close(y_own, y_all[own])
        for module in (together, alone):
            module.zero_grad()
        (y_all.square() * factor).sum().backward()
        (y_own.square() * factor[own]).sum().backward()
        close(x_own.grad, x_all.grad[own])
        for one, other in zip(together.parameters(), alone.parameters(), strict=True):
            close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad)
        for one, other in zip(together.buffers(), alone.buffers(), strict=True):
            close(one, other)
    for module in (together, alone):
        module.eval()
    close(together(every[own]), alone(every)[own])


@MANY
def test_halves_and_singles_are_close_to_doubles(hvd):
    every, own = samples(hvd, (4, 3))
    exact = hvd.SyncBatchNorm(4).double()(every[own])
    for dtype, atol in ((torch.float32, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        x = every[own].to(dtype).requires_grad_()
        y = hvd.SyncBatchNorm(4)(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype) == (dtype, dtype)
        torch.testing.assert_close(y.double(), exact, rtol=0.0, atol=atol)


@MANY
def test_a_model_with_batch_norm_trains_as_on_one_process(hvd):
    def make(norm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 1)).double()

    together, alone = make(hvd.SyncBatchNorm(4)), make(nn.BatchNorm1d(4))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, together.named_parameters())
    every, own = samples(hvd, (3,))
    for _ in range(3):
        for m, o, x, ranks in (
            (together, optimizer, every[own], hvd.size()),
            (alone, plain, every, 1),
        ):
            o.zero_grad()
            (m(x).square().sum() * ranks / len(every)).backward()
            o.step()
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@MANY
def test_process_set_has_separate_statistics(hvd):
    some = hvd.add_process_set(range(1, hvd.size()))
    if hvd.rank():
        norm = copy.deepcopy(hvd.SyncBatchNorm(1, process_set=some))
        y = norm(torch.tensor([[float(hvd.rank())], [-float(hvd.rank())]]))
        norm_of_all = sum(rank**2 for rank in range(1, hvd.size())) / (hvd.size() - 1)
        torch.testing.assert_close(
            float(y.square().mean()), hvd.rank() ** 2 / norm_of_all, rtol=1e-4, atol=0
        )
    hvd.remove_process_set(some)


@MANY
def test_single_value_per_channel_raises_on_every_rank(hvd):
    norm = hvd.SyncBatchNorm(4)
    with pytest.raises(ConfigError, match="more than one value"):
        norm(torch.ones(int(hvd.rank() == 0), 4))
    with pytest.raises(ConfigError, match=r"\(N, 4, ...\), got \(2, 3\)"):
        norm(torch.ones(2, 3))
    assert norm(torch.ones(0, 4)).shape == (0, 4)
    assert torch.equal(norm.running_mean, torch.zeros(4))
