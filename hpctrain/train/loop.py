"""The training loop."""

from dataclasses import asdict, dataclass
from time import perf_counter

from torch import Tensor, nn

from hpctrain.checkpoint.state_hash import state_hash
from hpctrain.comm.communicator import Communicator
from hpctrain.data.batch import Batch
from hpctrain.sync.reproducible import Reproducible
from hpctrain.train.boundary import SAVE, STOP, Boundary
from hpctrain.train.evaluate import Scores, evaluate
from hpctrain.train.metrics import Metrics
from hpctrain.train.progress import Progress
from hpctrain.train.state import RunState
from hpctrain.train.tally import Interval
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a training has led to."""

    scores: Scores
    """Of the last test."""
    training_s: float
    """Duration of all steps, without tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A training that was asked to stop, has saved its state, and wants to go on."""

    reason: str
    """Who asked, for people."""
    step: int
    """Steps that are done."""


def train(
    state: RunState,
    comm: Communicator,
    metrics: Metrics,
    progress: Progress,
    boundary: Boundary,
) -> Outcome | Stopped:
    """Train from where ``state`` is to the last epoch, or until a stop; collective."""
    task = state.task
    loader, last_epoch = task.train, task.config.train.epochs
    while loader.epoch < last_epoch:
        epoch, wishes = loader.epoch + 1, 0
        for batch in state.tally.inputs(loader):
            wishes = _step(state, batch, epoch, comm, metrics, progress, boundary)
            if wishes & STOP:
                return Stopped(reason=boundary.stop(state), step=state.step)
            if wishes & SAVE and loader.consumed < task.num_train_samples:
                boundary.save(state)
        # The loader is at the start of the next epoch now.
        if is_tested := epoch % task.config.test.every_epochs == 0 or epoch == last_epoch:
            state.scores = evaluate(task, comm)
            metrics.write("test", epoch=epoch, step=state.step, **asdict(state.scores))
        progress.epoch_ended(epoch, state.scores if is_tested else None)
        if wishes & SAVE or (is_tested and task.config.checkpoint.keep_best):
            boundary.save(state, score=_score(task, state.scores) if is_tested else None)
    assert state.scores is not None
    return Outcome(scores=state.scores, training_s=state.training_s)


def _step(  # noqa: PLR0913, PLR0917 - what belongs to a step
    state: RunState,
    batch: Batch,
    epoch: int,
    comm: Communicator,
    metrics: Metrics,
    progress: Progress,
    boundary: Boundary,
) -> int:
    """Take one step, record it where that is due, and return the ranks' wishes."""
    task, exchange = state.task, state.task.exchange
    lr = task.config.optimizer.lr * task.schedule(state.step)
    for group in task.optimizer.param_groups:
        group["lr"] = lr
    exchange.raise_flags(boundary.wishes(state.step + 1))
    start = perf_counter()
    loss, num_samples = train_step(task, batch, comm)
    state.tally.add(
        loss=loss,
        num_samples=num_samples,
        work_s=perf_counter() - start,
        communication_s=exchange.communication_seconds,
    )
    state.step += 1
    if ends_interval(state.step, len(task.train), task.config.log.every_steps):
        interval = state.tally.take(comm)
        state.training_s += interval.num_steps * interval.step_s
        _record(metrics, epoch, state.step, lr, interval)
        progress.advance(state.step, interval)
    every = task.config.log.hash_every
    if every and state.step % every == 0:
        metrics.write("hash", step=state.step, state_hash=hash_of(task, comm))
    flags: int = exchange.raised_flags
    return flags


def hash_of(task: Task, comm: Communicator) -> str:
    """Return the hash of weights and optimizer state, the same on every rank; collective."""
    state = {
        "model": dict(task.model.named_parameters()),
        "optimizer": task.optimizer.state_dict(),
    }
    return state_hash(state, comm)


def _score(task: Task, scores: Scores | None) -> float | None:
    """Return what is larger for a better model."""
    if scores is None:
        return None
    return -scores.loss if task.metric is None else scores.metric


def ends_interval(step: int, epoch_steps: int, every_steps: int) -> bool:
    """Say whether a record is due after ``step``: epochs are cut into nearly equal intervals."""
    num_intervals = max(1, round(epoch_steps / every_steps))
    last = (step - 1) % epoch_steps + 1
    return last * num_intervals // epoch_steps > (last - 1) * num_intervals // epoch_steps


def train_step(task: Task, batch: Batch, comm: Communicator) -> tuple[float, int]:
    """Learn from one global batch, of which this rank holds its part.

    Collective. Parts are weighted by their samples, so the step is that of the global batch. A
    rank whose part of a short last batch is empty computes nothing and still takes the step.

    Returns:
        A mean loss, and the number of samples that it is the mean of: over all ranks each sample
        is in one of them.
    """
    config, optimizer = task.config.train, task.optimizer
    if task.steps is not None:
        done = _reproducible_backward(task, task.steps, batch, comm)
    else:
        done = _backward(task, batch, nominal=config.global_batch / comm.size)
        if config.clip_norm and not batch.num_samples:
            optimizer.synchronize()  # in place of backward
    if config.clip_norm:
        nn.utils.clip_grad_norm_(task.model.parameters(), config.clip_norm)
    optimizer.step()
    return done


def _backward(task: Task, batch: Batch, *, nominal: float) -> tuple[float, int]:
    task.optimizer.zero_grad()
    task.optimizer.set_num_samples(batch.num_samples, nominal=nominal)
    if not batch.num_samples:
        return 0.0, 0
    inputs, labels = (aligned(values) for values in task.split(batch))
    loss = task.loss(task.model(inputs), labels)
    loss.backward()
    return loss.item(), batch.num_samples


def _reproducible_backward(
    task: Task, steps: Reproducible, batch: Batch, comm: Communicator
) -> tuple[float, int]:
    """Give the loss of the whole batch to rank 0: a sum over ranks would round it otherwise."""
    num_samples = task.train.step_samples
    loss = steps.backward(
        task.split(batch),
        lambda part: task.loss(task.model(part[0]), part[1]),
        num_samples=num_samples,
    )
    return (loss, num_samples) if comm.rank == 0 else (0.0, 0)


def aligned(values: Tensor) -> Tensor:
    """Return ``values`` at an address that is a multiple of 64, copied if need be.

    Matrix products round by where their input begins. A batch lies among others that were read
    with it, and after a stop it is read with others.
    """
    return values.clone() if values.data_ptr() % 64 else values


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
