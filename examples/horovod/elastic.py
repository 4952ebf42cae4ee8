"""Elastic training with Horovod, which resumes from the last commit after a failed operation.

    python elastic.py
    horovodrun -np 4 python elastic.py
    hpctrain launch -n 4 -- hpctrain shim elastic.py --fail-at 50
    mpirun -n 4 python elastic.py --fail-at 50 --commit-interval 5

With --fail-at, which needs two ranks, the ranks pass tensors of different lengths at that step.
All ranks return to the last commit, and the result is the same as without a failure. The last line
is the mean loss on the test digits.
"""

import argparse
import contextlib

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

# If Horovod initializes MPI, it also finalizes MPI at a restart, and MPI cannot be initialized
# twice; so mpi4py initializes MPI first. Horovod over Gloo does not need mpi4py.
with contextlib.suppress(ImportError, RuntimeError):
    from mpi4py import MPI  # noqa: F401 - initializes MPI

NUM_TRAIN = 1280
"""Number of training samples of 1797; divisible by 2, 4, 5 and 8 ranks."""

failed: list[int] = []
"""Steps that failed; not part of the state, so that each step fails once."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=5, help="how often each digit is seen (%(default)s)")
    add("--batch-size", type=int, default=16, help="digits of a rank in a step (%(default)s)")
    add("--lr", type=float, default=0.02, help="learning rate of one rank (%(default)s)")
    add("--commit-interval", type=int, default=20, help="steps between commits (%(default)s)")
    add("--fail-at", type=int, metavar="STEP", help="let an operation fail there, once")
    add("--seed", type=int, default=42, help="of weights and order (%(default)s)")
    return parser.parse_args()


def datasets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test digits, identical on all ranks."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    learn, check = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return TensorDataset(x[learn], y[learn]), TensorDataset(x[check], y[check])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, args: argparse.Namespace, batches: DataLoader) -> None:
    """Train from ``state`` to the last epoch."""
    while state.epoch < args.epochs:
        for number, (x, y) in enumerate(batches):
            state.optimizer.zero_grad()
            loss = cross_entropy(state.model(x), y)
            loss.backward()
            state.optimizer.step()
            if state.step == args.fail_at:
                disagree(state.step)
            state.step += 1
            state.sampler.record_batch(number, len(x))
            if state.step % args.commit_interval == 0:
                state.commit()
                if hvd.rank() == 0:
                    print(f"step {state.step}  loss {loss.item():.4f}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def disagree(step: int) -> None:
    """Reduce tensors of different lengths under one name once, which fails on all ranks."""
    if step not in failed:
        failed.append(step)
        hvd.allreduce(torch.zeros(1 + hvd.rank()), name="tensors that do not fit")


@torch.no_grad()
def test_loss(model: nn.Module, data: TensorDataset) -> float:
    """Return the mean loss on ``data``, which the ranks divide."""
    x, y = (tensor[hvd.rank() :: hvd.size()] for tensor in data.tensors)
    mine = cross_entropy(model(x), y, reduction="sum")
    total = hvd.allreduce(torch.stack([mine, torch.tensor(float(len(y)))]), op=hvd.Sum)
    return (total[0] / total[1]).item()


def main(args: argparse.Namespace) -> None:
    """Train, and print the results."""
    hvd.init()
    torch.manual_seed(args.seed)
    train_set, test_set = datasets(args.seed)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_set)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0
    )

    def on_reset() -> None:
        if hvd.rank() == 0:
            print(f"goes on from step {state.step}", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()  # there may be other ranks now

    state.register_reset_callbacks([on_reset])
    train(state, args, DataLoader(train_set, args.batch_size, sampler=sampler))

    loss = test_loss(model, test_set)
    if hvd.rank() == 0:
        print(f"final loss {loss:.9f}")


if __name__ == "__main__":
    main(arguments())
