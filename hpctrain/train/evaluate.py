"""Evaluation of the model, exactly, on any number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.gradients.fixed_tree import aligned_parts, exact_sum
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Means over all test samples."""

    loss: float
    metric: float  # equal to ``loss`` when the loss is the metric
    num_samples: int


@torch.no_grad()
def evaluate(task: Task) -> Scores:
    """Test the model: every rank its slice, then one sum over all ranks.

    Collective. Each sample counts once whatever the number of ranks; sums are float64, so counts
    of right answers are exact. Buffers such as running means become those of rank 0 first: every
    rank must test the model that rank 0 saves. With reproducible steps all bits are the same on
    any number of ranks.
    """
    for buffer in task.model.buffers():
        task.comm.broadcast_(buffer).wait()
    task.model.eval()
    rows = []
    for inputs, labels in _parts(task):
        output = task.model(inputs)
        loss = task.loss(output, labels).item() * len(inputs)
        metric = loss if task.metric is None else task.metric(output, labels).double().sum().item()
        rows.append((loss, metric, float(len(inputs))))
    task.model.train()
    if task.steps is not None:
        rows = [row for each in task.comm.allgather_object(rows) for row in each]
    # Rounded once at the end, so that the order of the terms does not count.
    sums = torch.tensor(
        [exact_sum(column) for column in zip(*rows, strict=True)] or [0.0] * 3, dtype=torch.float64
    )
    if task.steps is None:
        task.comm.allreduce_(sums).wait()
    loss_sum, metric_sum, num_samples = sums.tolist()
    return Scores(
        loss=loss_sum / num_samples, metric=metric_sum / num_samples, num_samples=int(num_samples)
    )


def _parts(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what this rank gives the model at once: its part of a batch, or a micro-shard."""
    loader = task.test
    for batch in loader:
        values = task.split(batch)
        if task.steps is not None:
            assert loader.micro_shards is not None
            yield from aligned_parts(
                values, loader.step_samples, loader.micro_shards, task.steps.own
            )
        elif batch.num_samples:
            yield values
