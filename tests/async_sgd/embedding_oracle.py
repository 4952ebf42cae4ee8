"""Compute the reference of a sharded embedding: a torch table in one process, the whole batch."""

import torch
from torch import nn

ROWS, DIM = 5000, 3


def model_of(table, seed=1):
    """Return a table and dense layers after it, with equal weights on every rank."""
    torch.manual_seed(seed)
    dense = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return nn.ModuleList([table, dense])


def copy_of(table, num_rows=ROWS):
    """Return a copy of all rows of a table. Collective."""
    with torch.no_grad():
        return table(torch.arange(num_rows))


class RowwiseAdagrad(torch.optim.Optimizer):
    """Reference optimizer: Adagrad with one number of state per row, for sparse gradients."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                total = state.setdefault("total", torch.zeros(len(p), 1, dtype=p.dtype))
                grad = p.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                total[rows] += values.square().mean(dim=1, keepdim=True)
                p[rows] -= group["lr"] * values / (total[rows].sqrt() + 1e-8)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": RowwiseAdagrad,
    "adam": torch.optim.SparseAdam,
}


def ids_of(rank, step, *shape):
    """Return ids; some are equal on all ranks, and some occur twice."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    own = torch.randint(0, ROWS, shape or (6, 2), generator=generator)
    return torch.where(own % 3 == 0, own % 11, own)
