"""Evaluation of the model, exactly, on any number of ranks."""

from collections.abc import Callable, Iterator
from math import nan
from time import monotonic

import torch
from torch import Tensor

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import DataError
from hpctrain.core.user_error import noted
from hpctrain.train.scores import Metric, Scores
from hpctrain.train.stateful import widened
from hpctrain.train.task import Task

LOOK_S = 1.0  # between two questions whether a pass should end


class StopPoll:
    """Asks all ranks whether a pass over the test set should end, about every ``LOOK_S`` seconds.

    The ranks agree on how many batches that is, so they ask before the same ones.
    """

    def __init__(self, comm: Communicator, is_asked: Callable[[], bool]) -> None:
        """``is_asked`` returns whether this rank was asked to stop."""
        self._comm, self._is_asked = comm, is_asked
        self._num_batches, self._every, self._since = 0, 0, monotonic()
        self.is_over = False  # whether a rank was asked; the same on every rank

    def ask(self) -> bool:
        """Return ``is_over``; called before each batch. Collective every few batches."""
        if self._num_batches >= self._every:
            is_first = not self._num_batches  # no batch is measured: ask before the next one
            batch_s = LOOK_S if is_first else (monotonic() - self._since) / self._num_batches
            told = torch.tensor([float(self._is_asked()), batch_s], dtype=torch.float64)
            self._comm.allreduce_(told, op=Op.MAX).wait()
            asked, batch_s = told.tolist()
            self.is_over, self._every = asked > 0, max(1, int(LOOK_S / max(batch_s, 1e-6)))
            self._num_batches, self._since = 0, monotonic()
        self._num_batches += 1
        return self.is_over


@torch.no_grad()
def evaluate(task: Task, poll: StopPoll | None = None) -> Scores:
    """Test the model: every rank its slice, then one sum over all ranks.

    Collective. If ``poll`` is over the pass has ended early, and its scores are NaN. Each sample
    counts once whatever the number of ranks; sums are float64, so counts of right answers are
    exact. Buffers such as running means become those of rank 0 first: every rank must test the
    model that rank 0 saves. With reproducible steps all bits are the same on any number of ranks.
    """
    task.exchange.share_buffers()
    task.model.eval()
    means = [metric for metric in task.metrics if metric.values is not None]
    rows, counts = list[list[float]](), dict[str, Tensor]()
    refusal: DataError | None = None
    for inputs, labels, found in _parts(task, poll):
        if refusal is not None:
            continue  # the ranks read on together
        try:
            output, loss = task.forward(inputs, labels, output=found)
            row = [float(len(inputs)), loss.item() * len(inputs)]
            row += _judge(task, widened(output), labels, counts)
        except DataError as error:
            refusal = error
            continue
        rows.append(row)
    with agreed(task.comm):
        if refusal is not None:
            raise refusal
    task.model.train()
    if poll is not None and poll.is_over:
        return Scores(loss=nan, metric=nan, num_samples=0)
    num_samples, *totals = task.exchange.sum_rows(rows, 2 + len(means))
    names = ["loss", *(metric.name for metric in means)]
    found_means = {n: total / num_samples for n, total in zip(names, totals, strict=True)}
    metrics = {
        metric.name: found_means[metric.name]
        if metric.counts is None
        else _score(metric, counts.get(metric.name), task.comm)
        for metric in task.metrics
    }
    first = metrics[task.metric_name]
    loss_mean = found_means["loss"]
    return Scores(loss=loss_mean, metric=first, num_samples=int(num_samples), metrics=metrics)


def _judge(
    task: Task, output: Tensor, labels: Tensor, counts: dict[str, Tensor]
) -> Iterator[float]:
    """Yield the sums of metrics that are means, and add to the counts of others."""
    for metric, name in zip(task.metrics, task.config.test.metrics, strict=True):
        with noted(f'test.metric = "{name}"', output, labels):
            if metric.values is not None:
                yield metric.sum_of(output, labels)
            elif metric.counts is not None:
                found = metric.counts(output, labels)
                counts[metric.name] = found.add_(counts.get(metric.name, torch.zeros(())))


def _score(metric: Metric, counts: Tensor | None, comm: Communicator) -> float:
    """Return a score of the counts of all ranks, of which some may have no samples. Collective."""
    shapes = comm.allgather_object(None if counts is None else tuple(counts.shape))
    shape = next(shape for shape in shapes if shape is not None)
    counts = torch.zeros(shape, dtype=torch.float64) if counts is None else counts
    comm.allreduce_(counts).wait()
    assert metric.score is not None
    return metric.score(counts)


def _parts(task: Task, poll: StopPoll | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield what this rank judges at once: its part of a batch, or a micro-shard.

    With the output where ranks compute it together: one rank gets the output of a replica.
    """
    loader = task.test
    for batch in loader:
        if poll is not None and poll.ask():
            loader.set_epoch(loader.epoch)
            return
        yield from task.exchange.test_parts(task.split(batch), loader)
