"""Model, data and losses of runs with ``[parallel]``: ``examples/lm`` on random bytes."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import hpctrain
from hpctrain.data.loader import Loader
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from hpctrain.runtime.world import current
from tests.parallel.training import lm, loss_of, transformer

STEPS, BATCH, LENGTH, CLIP = 5, 8, 16, 0.1
CLIP_VALUE = 0.002
SPIKING = 27  # a sample of step 4
NUM_SAMPLES = 4 * BATCH + 3  # The last batch is short, and replicas divide it unequally.

SETTINGS = (
    "model.target=tests.train.divided:model",
    "data.target=tests.train.divided:data",
    "loss.target=tests.train.divided:loss",
    "test.metric=tests.train.divided:right",
    "data.input=given",
    "data.label=following",
    "optimizer.name=AdamW",
    "optimizer.lr=0.01",
    "optimizer.args.weight_decay=0.1",
    "optimizer.exempt_norms_and_biases=true",
    "schedule.name=constant",
    "train.epochs=1",
    f"train.global_batch={BATCH}",
    f"train.clip_norm={CLIP}",
    f"train.clip_value={CLIP_VALUE}",
    "log.every_steps=1",
)


def joined():
    """Initialize the world once per module, because torch caches the groups of a mesh."""
    if dist.is_initialized():  # an earlier test has left a group of a world that has ended
        dist.destroy_process_group()
    hpctrain.init(ranks_per_node=2)
    yield current()
    if dist.is_initialized():
        dist.destroy_process_group()
    hpctrain.shutdown()


def model(**shape) -> nn.Module:
    return transformer(**shape)


def spare_model() -> nn.Module:
    """Return a model with a layer that forward does not use."""
    found = transformer()
    found.spare = nn.Linear(2, 2).double()
    return found


def odd_model() -> nn.Module:
    """Return a model whose matrices two ranks cannot divide."""
    found = nn.Sequential(nn.Embedding(256, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    found.parallel_roles = {"1": "column", "2": "row"}
    return found


loss = loss_of
layers, roles = lm.LAYERS, lm.ROLES


def windows() -> np.ndarray:
    return np.random.default_rng(3).integers(256, size=(NUM_SAMPLES, LENGTH + 1))


def flawed(scores, following):
    """Return the loss, which is NaN for one sample."""
    hit = (following == torch.from_numpy(windows()[13, 1:])).all(1).any()
    return loss(scores, following) * (torch.nan if hit else 1.0)


def spiking(scores, following):
    """Return the loss, which is 1000 times too large for one sample."""
    hit = (following == torch.from_numpy(windows()[SPIKING, 1:])).all(1).any()
    return loss(scores, following) * (1e3 if hit else 1.0)


def right(scores, following):
    """Return whether the predicted last byte of each sample is below the true one."""
    return scores[:, -1].argmax(-1) < following[:, -1]


def data(comm, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    if comm.rank == 0 and not Path(folder).exists():
        arrays = {"given": windows()[:, :-1].copy(), "following": windows()[:, 1:].copy()}
        write_arrays(Path(folder), arrays, samples_per_shard=20)
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def alone(dataset, *, epochs: int = 1, **shape):
    """Train with a plain loop in this process; return losses, parameters and test scores."""
    one = transformer(**shape)
    decayed = [[p for p in one.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (1, 0)]
    groups = [{"params": decayed[0]}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1), []
    loader = Loader(dataset, global_batch=BATCH)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            mean = loss(one(batch.given), batch.following)
            mean.backward()
            assert nn.utils.clip_grad_norm_(one.parameters(), CLIP) > CLIP
            assert max(p.grad.abs().max() for p in one.parameters()) > CLIP_VALUE
            nn.utils.clip_grad_value_(one.parameters(), CLIP_VALUE)
            optimizer.step()
            losses.append(mean.item())
    whole = dataset.take(np.arange(len(dataset)))
    given, following = (torch.as_tensor(whole[name]) for name in ("given", "following"))
    with torch.no_grad():
        scores = one(given)
    tested = loss(scores, following).item(), right(scores, following).double().mean().item()
    return losses, one.state_dict(), tested
