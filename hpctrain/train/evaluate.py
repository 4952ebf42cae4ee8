"""How good the model is, exactly, on any number of ranks."""

from dataclasses import dataclass

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Means over all test samples."""

    loss: float
    metric: float
    """Equal to ``loss`` when the loss is the metric."""
    num_samples: int


@torch.no_grad()
def evaluate(task: Task, comm: Communicator) -> Scores:
    """Test the model: every rank its slice, then one sum over all ranks.

    Collective. Each sample counts once whatever the number of ranks; sums are float64, so counts
    of right answers are exact. Buffers such as running means become those of rank 0 first: every
    rank must test the model that rank 0 saves.
    """
    for buffer in task.model.buffers():
        comm.broadcast_(buffer).wait()
    task.model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in task.test:
        if batch.num_samples:
            inputs, labels = task.split(batch)
            output = task.model(inputs)
            loss = task.loss(output, labels).double() * batch.num_samples
            metric = loss if task.metric is None else task.metric(output, labels).double().sum()
            sums += torch.stack((loss, metric, torch.tensor(float(batch.num_samples))))
    task.model.train()
    comm.allreduce_(sums).wait()
    loss_sum, metric_sum, num_samples = sums.tolist()
    return Scores(
        loss=loss_sum / num_samples, metric=metric_sum / num_samples, num_samples=int(num_samples)
    )
