"""The training loop."""

from dataclasses import asdict, dataclass
from time import perf_counter

from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.data.batch import Batch
from hpctrain.train.evaluate import Scores, evaluate
from hpctrain.train.metrics import Metrics
from hpctrain.train.progress import Progress
from hpctrain.train.tally import Interval, Tally
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a training has led to."""

    scores: Scores
    """Of the last test."""
    training_s: float
    """Duration of all steps, without tests."""


def train(task: Task, comm: Communicator, metrics: Metrics, progress: Progress) -> Outcome:
    """Train to the last epoch; collective."""
    config, optimizer = task.config, task.optimizer
    peaks = [group["lr"] for group in optimizer.param_groups]
    tally = Tally()
    scores, step, training_s = None, 0, 0.0
    for epoch in range(1, config.train.epochs + 1):
        task.train.set_epoch(epoch - 1)
        for batch in tally.inputs(task.train):
            factor = task.schedule(step)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            start = perf_counter()
            loss = train_step(task, batch, comm.size)
            tally.add(
                loss=loss,
                num_samples=batch.num_samples,
                work_s=perf_counter() - start,
                communication_s=optimizer.communication_seconds,
            )
            step += 1
            if ends_interval(step, len(task.train), config.log.every_steps):
                interval = tally.take(comm)
                training_s += interval.num_steps * interval.step_s
                _record(metrics, epoch, step, factor * peaks[0], interval)
                progress.advance(step, interval)
        if is_tested := epoch % config.test.every_epochs == 0 or epoch == config.train.epochs:
            scores = evaluate(task, comm)
            metrics.write("test", epoch=epoch, step=step, **asdict(scores))
        progress.epoch_ended(epoch, scores if is_tested else None)
    assert scores is not None
    return Outcome(scores=scores, training_s=training_s)


def ends_interval(step: int, epoch_steps: int, every_steps: int) -> bool:
    """Say whether a record is due after ``step``: epochs are cut into nearly equal intervals."""
    num_intervals = max(1, round(epoch_steps / every_steps))
    last = (step - 1) % epoch_steps + 1
    return last * num_intervals // epoch_steps > (last - 1) * num_intervals // epoch_steps


def train_step(task: Task, batch: Batch, size: int) -> float:
    """Learn from one global batch, of which this rank holds its part; return this part's loss.

    Collective. Parts are weighted by their samples, so the step is that of the global batch. A
    rank whose part of a short last batch is empty computes nothing and still takes the step.
    """
    config, optimizer = task.config.train, task.optimizer
    optimizer.zero_grad()
    optimizer.set_num_samples(batch.num_samples, nominal=config.global_batch / size)
    value = 0.0
    if batch.num_samples:
        inputs, labels = task.split(batch)
        loss = task.loss(task.model(inputs), labels)
        loss.backward()
        value = loss.item()
    if config.clip_norm:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(task.model.parameters(), config.clip_norm)
    optimizer.step()
    return value


def _record(metrics: Metrics, epoch: int, step: int, lr: float, interval: Interval) -> None:
    metrics.write(
        "step",
        epoch=epoch,
        step=step,
        lr=lr,
        loss=interval.loss,
        samples_per_s=interval.samples_per_s,
        compute_s=interval.compute_s,
        communication_s=interval.communication_s,
        input_s=interval.input_s,
    )
