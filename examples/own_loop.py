"""A custom training loop that stops on request and resumes.

    hpctrain launch -n 2 -- python examples/own_loop.py
    hpctrain submit --nodes 2 --tasks 2 --requeue -- python examples/own_loop.py

After a signal, before the time limit of the job, or if the file STOP exists in the run directory,
the script saves its state and exits with code 85 between two steps. The same command resumes, with
bitwise equal results on the same number of ranks.
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
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict())

folder = Path(os.environ.get("RUN_DIRECTORY", "runs/own_loop"))  # as hpctrain submit names it
checkpoints = Manager(folder / "checkpoints", hvd.current().comm, every=500)
step = 0
if loaded := checkpoints.load_latest():
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    step = loaded.step


def state() -> dict:
    """What the next step depends on; the samples follow from its number."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


steps_per_epoch = len(images) // BATCH
if hvd.rank() == 0:
    print(f"begins at step {step} of {options.epochs * steps_per_epoch}", flush=True)
while step < options.epochs * steps_per_epoch:
    epoch, number = divmod(step, steps_per_epoch)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    batch = order[number * BATCH : (number + 1) * BATCH].tensor_split(hvd.size())[hvd.rank()]
    optimizer.zero_grad()
    optimizer.set_num_samples(len(batch))
    functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    step += 1
    if hvd.should_stop():
        checkpoints.save(state(), step, wait=True)
        checkpoints.close()
        sys.exit(hvd.STOPPED)
    if checkpoints.due(step):
        checkpoints.save(state(), step)

checkpoints.save(state(), step, wait=True)
checkpoints.close()
if hvd.rank() == 0:
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"weights {state_hash(model.state_dict())}, accuracy {accuracy:.4f}")
