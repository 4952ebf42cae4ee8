"""Train a small convolutional network on handwritten digits with Horovod.

    python digits.py
    horovodrun -np 4 python digits.py
    hpctrain launch -n 4 -- hpctrain shim digits.py --epochs 5
    mpirun -n 4 python digits.py --fp16-allreduce
    mpirun -n 4 python digits.py --use-adasum

The last line is the mean loss on the test digits.
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NUM_TRAIN = 1437
"""Number of training samples of 1797; the others are for tests."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often each digit is seen (%(default)s)")
    add("--batch-size", type=int, default=16, help="digits of a rank in a step (%(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate of one rank (%(default)s)")
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    add("--use-adasum", action="store_true", help="combine steps by Adasum, do not average")
    add("--seed", type=int, default=42, help="of weights, order and dropout (%(default)s)")
    add("--log-interval", type=int, default=10, help="steps between lines (%(default)s)")
    return parser.parse_args()


class Network(nn.Module):
    """Two convolutions, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(n, 10)`` scores for ``(n, 1, 8, 8)`` images."""
        return self.head(self.convolutions(x).flatten(1))


def datasets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test digits, identical on all ranks."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    learn, check = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return TensorDataset(images[learn], labels[learn]), TensorDataset(images[check], labels[check])


def train(
    args: argparse.Namespace,
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader,
) -> None:
    """Train on the part of this rank of one epoch."""
    model.train()
    batches.sampler.set_epoch(epoch)  # another order in each epoch
    for number, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % args.log_interval == 0 and hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  step {number}/{len(batches)}  "
                f"loss {loss.item():.4f}",
                flush=True,
            )


def average(value: float, name: str) -> float:
    """Average a metric over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Return the loss and the accuracy on the test digits of all ranks."""
    model.eval()
    loss = num_right = num_digits = 0.0
    for images, labels in batches:
        scores = model(images)
        loss += cross_entropy(scores, labels, reduction="sum").item()
        num_right += (scores.argmax(dim=1) == labels).sum().item()
        num_digits += len(labels)
    # The sampler gives every rank as many digits, so the mean of the means is the mean.
    return average(loss / num_digits, "test loss"), average(num_right / num_digits, "accuracy")


def main(args: argparse.Namespace) -> None:
    """Train, and print the results."""
    hvd.init()
    torch.manual_seed(args.seed)

    train_set, test_set = datasets(args.seed)
    train_sampler, test_sampler = (
        DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
        for data, shuffle in ((train_set, True), (test_set, False))
    )
    train_batches = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_batches = DataLoader(test_set, 120, sampler=test_sampler)

    model = Network()
    # Averaging makes a batch of all ranks, which bears a larger step; Adasum scales by itself.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    loss = float("nan")
    for epoch in range(args.epochs):
        train(args, epoch, model, optimizer, train_batches)
        loss, accuracy = evaluate(model, test_batches)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {accuracy:.4f}", flush=True)
    if hvd.rank() == 0:
        print(f"final loss {loss:.9f}")


if __name__ == "__main__":
    main(arguments())
