"""Evaluation of the model, with exact counts on any number of ranks."""

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

LOOK_S = 1.0  # seconds between two polls for stop requests


class StopPoll:
    """Polls all ranks for stop requests during a test, about every ``LOOK_S`` seconds.

    The ranks agree on the number of batches between polls, so all ranks poll before the same
    batches.

    Args:
        comm: all ranks.
        is_asked: returns whether this rank has a stop request.
    """

    def __init__(self, comm: Communicator, is_asked: Callable[[], bool]) -> None:
        self._comm, self._is_asked = comm, is_asked
        self._num_batches, self._every, self._since = 0, 0, monotonic()
        self.is_over = False  # whether any rank has a stop request; identical on all ranks

    def ask(self) -> bool:
        """Return whether any rank has a stop request; poll if due.

        Collective: all ranks call this method before each batch.
        """
        if self._num_batches >= self._every:
            is_first = not self._num_batches  # no batch was timed yet: poll after the next batch
            batch_s = LOOK_S if is_first else (monotonic() - self._since) / self._num_batches
            text = torch.tensor([float(self._is_asked()), batch_s], dtype=torch.float64)
            self._comm.allreduce_(text, op=Op.MAX).wait()
            asked, batch_s = text.tolist()
            self.is_over, self._every = asked > 0, max(1, int(LOOK_S / max(batch_s, 1e-6)))
            self._num_batches, self._since = 0, monotonic()
        self._num_batches += 1
        return self.is_over


@torch.no_grad()
def evaluate(task: Task, poll: StopPoll | None = None) -> Scores:
    """Test the model on ``task.test``. Collective.

    If ``train.ema`` or a local method averages weights, the model has the averaged weights during
    the test. Each rank tests its part of the samples, and each sample counts once. Sums are
    float64, so counts of correct predictions are exact. Rank 0 first broadcasts its buffers, such
    as running means, because checkpoints contain the buffers of rank 0. With reproducible steps
    the scores are bitwise identical on any number of ranks.

    Args:
        task: model, test samples and metrics.
        poll: ends the test early after a stop request.

    Returns:
        The scores, identical on all ranks; NaN if ``poll`` ended the test.

    Raises:
        DataError: model, loss or a metric does not fit the data; on all ranks.
    """
    with task.averaged():
        return _evaluate(task, poll)


def _evaluate(task: Task, poll: StopPoll | None) -> Scores:
    task.exchange.share_buffers()
    task.model.eval()
    means = [metric for metric in task.metrics if metric.values is not None]
    rows, counts = list[list[float]](), dict[str, Tensor]()
    refusal: DataError | None = None
    for inputs, labels, found in _parts(task, poll):
        if refusal is not None:
            continue  # all ranks must read the same number of batches
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
    """Compute the metrics of a batch, except the loss.

    Yields the batch sum of each metric that is a mean over samples. Adds the counts of each other
    metric to its entry in ``counts``.
    """
    for metric, name in zip(task.metrics, task.config.test.metrics, strict=True):
        with noted(f'test.metric = "{name}"', output, labels):
            if metric.values is not None:
                yield metric.sum_of(output, labels)
            elif metric.counts is not None:
                found = metric.counts(output, labels)
                counts[metric.name] = found.add_(counts.get(metric.name, torch.zeros(())))


def _score(metric: Metric, counts: Tensor | None, comm: Communicator) -> float:
    """Sum ``counts`` over all ranks, and return the score of the metric. Collective.

    ``counts`` is None on ranks without samples.
    """
    shapes = comm.allgather_object(None if counts is None else tuple(counts.shape))
    shape = next(shape for shape in shapes if shape is not None)
    counts = torch.zeros(shape, dtype=torch.float64) if counts is None else counts
    comm.allreduce_(counts).wait()
    assert metric.score is not None
    return metric.score(counts)


def _parts(task: Task, poll: StopPoll | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield ``(inputs, labels, output)`` for this rank's part of each test batch.

    ``output`` is None unless several ranks compute it together, see ``StepExchange.test_parts``.
    """
    loader = task.test
    for batch in loader:
        if poll is not None and poll.ask():
            loader.set_epoch(loader.epoch)
            return
        yield from task.exchange.test_parts(task.split(batch), loader)
