"""Synchronous SGD: ranks that average gradients are equivalent to one process.

    hpctrain launch -n 2 -- python examples/tour/03_synchronous.py

Each rank computes the gradient of its part of a batch of 64 examples, `DistributedOptimizer`
averages, and all ranks take the same step. The weights agree with a loop in one process, to 1e-13
in float64 after 200 steps with momentum; only the order of additions differs. Every step takes as
long as the slowest rank.
"""

import time

import torch
from claim import claim
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hvd

NUM_STEPS, BATCH, NUM_LATE, DELAY_S = 200, 64, 20, 0.01


def train(dtype: torch.dtype, *, is_distributed: bool) -> nn.Module:
    """Train a small network with whole batches, or with the part of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)).to(dtype)
    x, y = torch.randn(1000, 20, dtype=torch.float64).to(dtype), torch.randint(5, (1000,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if is_distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(NUM_STEPS):
        part = torch.randint(1000, (BATCH,))
        if is_distributed:
            part = part[hvd.rank() :: hvd.size()]
            optimizer.set_num_samples(len(part), nominal=BATCH / hvd.size())
        optimizer.zero_grad()
        cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model


def main() -> None:
    """Compare the ranks with one process, then delay one rank."""
    hvd.init()
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 5e-6)):
        alone, together = (train(dtype, is_distributed=which) for which in (False, True))
        error = max(
            (one - other).abs().max().item()
            for one, other in zip(alone.parameters(), together.parameters(), strict=True)
        )
        claim(
            f"ranks ({hvd.size()} here) have the weights of one process after {NUM_STEPS} steps, "
            f"in {str(dtype).removeprefix('torch.')} to {error:.0e}",
            holds=error <= limit,
        )
    hvd.check_replicas(together)  # an error on all ranks if they differ in one bit

    gradient = torch.ones(1000)
    begin = time.perf_counter()
    for _ in range(NUM_LATE):
        if hvd.rank() == hvd.size() - 1:
            time.sleep(DELAY_S)
        hvd.allreduce(gradient)
    step_s = (time.perf_counter() - begin) / NUM_LATE
    claim(
        f"a rank that is {DELAY_S * 1e3:.0f} ms late makes the step of rank 0 take "
        f"{step_s * 1e3:.0f} ms",
        holds=step_s > 0.9 * DELAY_S,
    )


if __name__ == "__main__":
    main()
