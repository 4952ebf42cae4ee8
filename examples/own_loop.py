"""A custom training loop that stops on request and resumes.

    hpctrain launch -n 2 -- python examples/own_loop.py
    hpctrain submit --nodes 2 --tasks 2 --requeue -- python examples/own_loop.py

After a signal, before the time limit of the job, or if the file STOP exists in the folder that the
variable RUN_DIRECTORY names, the script saves its state and exits with code 85 between two steps.
The same command resumes, with bitwise equal results on the same number of ranks.

The validation digits choose the weights: the script keeps those of the best epoch. The test digits
are used once, at the end.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import hpctrain as hvd
from hpctrain.checkpoint import Manager, state_hash

BATCH = 64  # samples of a step, over all ranks

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()

hvd.init()
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, validation, test = torch.randperm(len(images)).split([1293, 144, 360])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict())

folder = Path(os.environ.get("RUN_DIRECTORY", "runs/own_loop"))  # as hpctrain submit names it
checkpoints = Manager(folder / "checkpoints", hvd.current().comm, every=500)
step, best, best_accuracy = 0, {}, 0.0
if loaded := checkpoints.load_latest():
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    best, best_accuracy = loaded.state["best"], loaded.state["best_accuracy"]
    step = loaded.step


def state() -> dict:
    """Return the state on which the next step depends; the samples follow from its number."""
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return weights | {"best": best, "best_accuracy": best_accuracy}


@torch.no_grad()
def accuracy(samples: torch.Tensor) -> float:
    """Return the fraction of samples that the model classifies correctly."""
    return (model(images[samples]).argmax(1) == labels[samples]).float().mean().item()


steps_per_epoch = len(train) // BATCH
if hvd.rank() == 0:
    print(f"begins at step {step} of {options.epochs * steps_per_epoch}", flush=True)
while step < options.epochs * steps_per_epoch:
    epoch, number = divmod(step, steps_per_epoch)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
    batch = train[order][number * BATCH : (number + 1) * BATCH].tensor_split(hvd.size())[
        hvd.rank()
    ]
    optimizer.zero_grad()
    optimizer.set_num_samples(len(batch))
    functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    step += 1
    if step % steps_per_epoch == 0 and accuracy(validation) > best_accuracy:
        best = {name: value.clone() for name, value in model.state_dict().items()}
        best_accuracy = accuracy(validation)
    if hvd.should_stop():
        checkpoints.save(state(), step, wait=True)
        checkpoints.close()
        sys.exit(hvd.STOPPED)
    if checkpoints.due(step):
        checkpoints.save(state(), step)

checkpoints.save(state(), step, wait=True)
checkpoints.close()
weights = state_hash(model.state_dict())
model.load_state_dict(best)
if hvd.rank() == 0:
    print(f"validation accuracy {best_accuracy:.4f}, test accuracy {accuracy(test):.4f}")
    print(f"weights {weights}")
