"""Compare PowerSGD with torch's hook step by step, on DistributedDataParallel over gloo."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
from torch.nn.parallel import DistributedDataParallel

from hpctrain.compress.power_sgd import PowerSGD
from tests.compress.nodes import Gradients, drawn, nodes

SHAPES = ((24, 32), (32,), (40, 30), (24, 32), (4, 2))
WARMUP = 2  # the minimum of torch's hook


class Weighted(nn.Module):
    """Define parameters whose gradients equal the arguments of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(s, dtype=torch.float64) for s in SHAPES)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return sum((w * v).sum() for w, v in zip(self.weights, values, strict=True))


def first_columns(rank, shape):
    """Return the initial columns that both implementations use for a matrix of this shape."""
    generator = torch.Generator().manual_seed(shape[1])
    return torch.randn(shape[1], rank, generator=generator, dtype=torch.float64)


def decaying(tensor):
    """Return a matrix with few large directions: with noise alone, rounding would change them."""
    if tensor.dim() < 2:
        return tensor
    left, _, right = torch.linalg.svd(tensor, full_matrices=False)
    return left * 10 * 0.3 ** torch.arange(left.shape[1]) @ right


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("rank", [2, 4])  # torch orthogonalizes two by Gram and Schmidt
def test_power_sgd_equals_that_of_torch(world, rank):
    model = DistributedDataParallel(Weighted())
    state = hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=WARMUP, min_compression_rate=2
    )

    def begin(state, bucket):
        if state.iter == WARMUP:
            shapes = [tuple(g.shape) for g in bucket.gradients() if g.dim() > 1 and len(g) > 4]
            alike = [shape for one in dict.fromkeys(shapes) for shape in shapes if shape == one]
            columns = [first_columns(rank, shape).reshape(-1) for shape in alike]
            state.q_memory_dict[0] = torch.cat(columns)
            state.p_memory_dict[0] = torch.empty(sum(rank * s[0] for s in alike)).double()
        return hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, begin)
    base = [decaying(each) for each in drawn(0, 99, SHAPES)]
    with nodes(1) as comm:
        ours = Gradients(PowerSGD(rank, warmup_steps=WARMUP), comm, SHAPES)
        for step in range(50):
            if step == WARMUP:
                alike = [SHAPES[0], SHAPES[3], SHAPES[2]]
                columns = [first_columns(rank, shape).mT.reshape(-1) for shape in alike]
                kept = ours.codec.state_dict()
                kept["0"]["memory"]["right"] = torch.cat(columns)
                ours.codec.load_state_dict(kept)
            noise = drawn(world.rank, step, SHAPES)
            values = [one + 0.1 * other for one, other in zip(base, noise, strict=True)]
            got = ours.reduce(values, 1 / world.size)
            model.zero_grad()
            model(*values).backward()
            expected = [weight.grad for weight in model.module.weights]
            for one, other in zip(got, expected, strict=True):
                assert (one - other).norm() <= 1e-10 * other.norm()
