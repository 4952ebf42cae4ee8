"""PyTorch script for handwritten digits: four lines distribute it, a fifth divides its data.

    python examples/01_four_lines.py
    hpctrain launch -n 4 --nodes 2 python examples/01_four_lines.py

The global batch is 64 samples on any number of ranks, so the learning rate does not change. The
average is exact also if the ranks have different numbers of samples. Only rank 0 prints and
writes.
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as hvd  # 1

EPOCHS, BATCH, LEARNING_RATE = 30, 64, 0.05


def main(output: Path | None) -> None:
    """Train a small network and print how often it is right on digits it has not seen."""
    hvd.init()  # 2
    order = torch.Generator().manual_seed(0)  # the same on every rank
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = torch.randperm(len(x), generator=order).split([1437, 360])
    loader = DataLoader(TensorDataset(x[train], y[train]), BATCH, shuffle=True, drop_last=True)

    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # 3
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 4
    loader = hvd.shard_data(loader, optimizer)  # 5: this rank's part of every batch

    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    if hvd.rank() == 0:
        if output is not None:
            write_metrics(output, accuracy)
        print(f"test accuracy {accuracy:.4f}")


def write_metrics(output: Path, accuracy: float) -> None:
    """Write one record with the result and the communication of gradients."""
    world = hvd.current()
    record = {
        "event": "finished",
        "accuracy": accuracy,
        "world_size": world.topology.size,
        "nodes": world.topology.num_nodes,
        "path": world.plan.node_memory,
        "rails": world.plan.num_rails,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.jsonl").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for metrics.jsonl")
    main(parser.parse_args().output)
