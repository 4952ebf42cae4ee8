"""A PyTorch script that records its steps for a scaling study, by one import and two calls.

    hpctrain launch -n 4 --nodes 2 python examples/measured.py
    hpctrain study init script.toml --command 'python examples/measured.py --batch {rank_batch}'
    hpctrain study run script.toml

Without a study the calls do nothing. The synthetic task is to find the nearest of ten points.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hvd

LEARNING_RATE = 0.05


def main(batch: int, steps: int) -> None:
    """Train on ``batch`` samples of each rank in every step."""
    hvd.init()
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(10, 64, generator=generator)  # the same on every rank
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    generator.manual_seed(1 + hvd.rank())
    for step in range(steps):
        x = torch.randn(batch, 64, generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), torch.cdist(x, points).argmin(dim=1))
        loss.backward()
        optimizer.step()
        hvd.record(step=step, samples=batch, loss=loss.item())  # on every rank

    x = torch.randn(1000, 64, generator=generator)
    with torch.no_grad():
        right = model(x).argmax(dim=1) == torch.cdist(x, points).argmin(dim=1)
    accuracy = hvd.allreduce(right.float().mean()).item()
    hvd.record(step=steps, accuracy=accuracy)  # final result, without a step
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    main(options.batch, options.steps)
