"""Elastic training on handwritten digits, which recovers from failed operations and ranks.

    python examples/elastic_digits.py
    hpctrain launch -n 4 python examples/elastic_digits.py --fail-at 100
    hpctrain launch -n 4 --recover python examples/elastic_digits.py --kill-at 100
    hpctrain launch -n 4 --recover --spares 1 python examples/elastic_digits.py --kill-at 100

With --fail-at an operation of the last rank fails at that step: all ranks return to the last
commit and continue, with the same result. With --kill-at the process of the last rank is killed:
the others return to the last commit, divide the rest of the epoch and continue without that rank.
If a spare replaces the rank, the result is the same as without a failure.
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as hvd

BATCH, LEARNING_RATE, STEPS_PER_COMMIT = 16, 0.02, 20

failed: list[int] = []
"""Steps that failed; not part of the state, so that each step fails once."""


def main(epochs: int, fail_at: int | None, kill_at: int | None) -> None:
    """Train a small network and print how often it is right on digits it has not seen."""
    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = torch.randperm(len(x)).split([1437, 360])
    data = TensorDataset(x[train], y[train])

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)

    def say_so() -> None:
        if hvd.rank() == 0:
            print(f"goes on from step {state.step}")

    state.register_reset_callbacks([say_so])
    is_last = hvd.rank() == hvd.size() - 1 and hvd.current().is_first  # a spare lives on
    events = (fail_at, kill_at) if is_last else (None, None)
    learn(state, DataLoader(data, BATCH, sampler=sampler), epochs, *events)

    with torch.no_grad():
        accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f}")


@hvd.elastic.run
def learn(
    state: hvd.elastic.TorchState,
    batches: DataLoader,
    epochs: int,
    fail_at: int | None,
    kill_at: int | None,
) -> None:
    """Train from where ``state`` stands to the last epoch; fail, or die, at a step."""
    while state.epoch < epochs:
        for number, (x, y) in enumerate(batches):
            state.optimizer.zero_grad()
            cross_entropy(state.model(x), y).backward()
            if state.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == fail_at and fail_at not in failed:
                failed.append(fail_at)
                raise hvd.HorovodInternalError(f"step {fail_at} fails, as --fail-at wants it")
            state.optimizer.step()
            state.step += 1
            state.sampler.record_batch(number, len(x))
            if state.step % STEPS_PER_COMMIT == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15, help="how often each digit is seen")
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="let one rank fail there")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="let one rank die there")
    given = parser.parse_args()
    main(given.epochs, given.fail_at, given.kill_at)
