"""The training loop."""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.comm.agreement import agreed
from hpctrain.core.errors import NotFiniteError
from hpctrain.core.logs import logger
from hpctrain.core.records import record
from hpctrain.core.user_error import noted
from hpctrain.data.samples import Batch
from hpctrain.gradients.step_counter import PARTED
from hpctrain.optim.noise_scale import Measured
from hpctrain.runtime import world
from hpctrain.train.boundary import SAVE, STOP, Boundary
from hpctrain.train.console import Progress
from hpctrain.train.evaluate import StopPoll, evaluate
from hpctrain.train.finite import StepGuard, clip, gradient_norm
from hpctrain.train.metrics import Metrics
from hpctrain.train.profiler import Profiler
from hpctrain.train.run_state import (
    RunState,
    check_replicas,
    heals,
    mean_sums,
    random_states,
    set_random_states,
)
from hpctrain.train.savings_meter import SavingsMeter
from hpctrain.train.scores import LOSS, Scores
from hpctrain.train.stragglers import Stragglers
from hpctrain.train.sync_method import figures
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a training has led to."""

    scores: Scores  # of the last test
    training_s: float  # duration of all steps, without tests
    num_samples: int  # learnt from, counted as often as that
    step: int  # steps that are done
    best: dict[str, Any]  # step, epoch and metric of the best test


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A training that was asked to stop, has saved its state, and wants to go on."""

    reason: str  # who asked, for people
    step: int  # steps that are done


class TrainingLoop:
    """Trains from where a state is, to the last epoch or until a stop."""

    def __init__(
        self,
        state: RunState,
        metrics: Metrics,
        progress: Progress,
        boundary: Boundary,
        profiler: Profiler,
    ) -> None:
        self._state, self._task = state, state.task
        self._metrics, self._progress, self._boundary = metrics, progress, boundary
        self._profiler = profiler
        self._guard = StepGuard(state.task, metrics, state.guard)
        self._savings = SavingsMeter(state.task)
        topology = world.current().topology
        pairs = zip(topology.hosts, topology.nodes, strict=True)
        self._stragglers = Stragglers({rank: host for host, ranks in pairs for rank in ranks})

    def train(self) -> Outcome | Stopped:
        """Take all steps that are left. Collective.

        Raises ``NotFiniteError``: loss, gradients, parameters or the loss of a test are not
        finite; on every rank. ``ReplicaError``: the ranks have parted; on every rank.
        """
        try:
            return self._train()
        except NotFiniteError as error:
            raise self._guard.traced(error) from error

    def _train(self) -> Outcome | Stopped:
        state, loader, boundary = self._state, self._task.train, self._boundary
        if state.owes_test and (stopped := self._finish_epoch(loader.epoch)):
            return stopped
        while loader.epoch < self._task.config.train.epochs and not state.has_lost_patience:
            epoch, wishes = loader.epoch + 1, 0
            for batch in state.tally.inputs(loader):
                wishes = self._step(batch, epoch)
                if wishes & STOP:
                    return Stopped(reason=boundary.stop(state), step=state.step)
                if wishes & SAVE and loader.consumed < self._task.num_train_samples:
                    self._save()
            # The loader is at the start of the next epoch now.
            if self._task.observer is not None:
                self._task.observer.observe(state.epoch_tally.take(self._task.comm).loss)
            if stopped := self._finish_epoch(epoch, wants_save=bool(wishes & SAVE)):
                return stopped
        assert state.scores is not None
        boundary.finish(state, score=self._score())
        num_samples = state.epochs_done * self._task.num_train_samples
        return Outcome(
            scores=state.scores,
            training_s=state.training_s,
            num_samples=num_samples,
            step=state.step,
            best=state.best.facts,
        )

    def _finish_epoch(self, epoch: int, *, wants_save: bool = False) -> Stopped | None:
        """Test where that is due, and let a run end with one model. Collective.

        A stop in the middle of the test is saved as a test that the resumed run begins with.
        """
        state, task = self._state, self._task
        is_last = epoch == task.config.train.epochs
        is_tested = is_last or epoch % task.config.test.every_epochs == 0
        may_be_last = is_last or (is_tested and task.config.test.patience > 0)
        if task.sync is not None and may_be_last:
            task.sync.finish()
        if is_tested:
            state.owes_test = not self._test(epoch)
            if state.owes_test:
                return Stopped(reason=self._boundary.stop(state), step=state.step)
        self._progress.epoch_ended(epoch, state.scores if is_tested else None)
        if wants_save or (is_tested and task.config.keep_best):
            self._save(self._score() if is_tested else None)
        self._resume_clock()
        return None

    def _test(self, epoch: int) -> bool:
        """Test the model; return False if a stop has ended the test. Collective."""
        state, task = self._state, self._task
        if task.config.train.check_replicas != "never":
            check_replicas(task)
        poll = StopPoll(task.comm, lambda: self._boundary.is_asked_to_stop)
        random = random_states(task.device)
        with task.averaged():
            scores = evaluate(task, poll)
        if poll.is_over:
            set_random_states(random, task.device)
            return False
        state.scores = scores
        self._metrics.write("test", epoch=epoch, step=state.step, **asdict(state.scores))
        others = {name: value for name, value in state.scores.metrics.items() if name != LOSS}
        figures_of_test: dict[str, Any] = {"test_loss": state.scores.loss, **others}
        record(step=state.step, **figures_of_test)
        self._guard.check_test(state.scores, state.step, epoch)
        place = {"step": state.step, "epoch": epoch, "metric": state.scores.metric}
        state.best.see(self._score(), **place)
        return True

    def _save(self, score: float | None = None) -> None:
        """Write a checkpoint while training goes on. Collective."""
        start = perf_counter()
        self._boundary.save(self._state, score=score)
        self._state.tally.add_checkpoint(perf_counter() - start)
        self._resume_clock()

    def _resume_clock(self) -> None:
        """Leave what was done between two steps out of their measured time."""
        if self._task.sync is not None:
            self._task.sync.rounds.resume_clock()

    def _step(self, batch: Batch, epoch: int) -> int:
        """Take one step, record it where that is due, and return the ranks' wishes."""
        state, task, guard = self._state, self._task, self._guard
        self._profiler.before(state.step + 1)
        rate = guard.rate(state.step + 1)
        factor = task.tables.factor = task.schedule(state.step) * rate
        lr = task.config.optimizer.lr * factor
        for group, peak in zip(task.optimizer.param_groups, task.peaks, strict=True):
            group["lr"] = peak * factor
        guard.begin(state.step + 1, lr, self._boundary.wishes(state.step + 1))
        if task.sync is not None:
            task.sync.rounds.must_meet = self._must_meet(state.step + 1)
        leads = task.comm.rank == 0 if task.sync is None else task.sync.leads_step
        before, start = task.comm.traffic(), perf_counter()
        loss, num_samples, is_taken = train_step(task, batch, guard)
        work_s, communication_s = perf_counter() - start, task.exchange.communication_seconds
        state.tally.add(
            loss=loss,
            num_samples=num_samples,
            work_s=work_s,
            communication_s=communication_s,
            num_skipped=guard.num_left_out if leads and not is_taken else 0,
        )
        moved, input_s = task.comm.traffic().since(before), state.tally.input_s
        self._savings.add(moved)
        record(
            step=state.step + 1,
            samples=num_samples,
            loss=loss,
            seconds=input_s + work_s,
            compute_s=work_s - communication_s,
            communication_s=communication_s,
            input_s=input_s,
            node_bytes=moved.node_bytes,
            rail_bytes=moved.rail_bytes,
        )
        guard.end()
        if task.observer is not None:
            state.epoch_tally.add(
                loss=loss, num_samples=num_samples, work_s=0.0, communication_s=0.0
            )
        state.step += 1
        if is_recorded(task, state.step, state.tally.num_steps):
            self._record(epoch, lr * guard.rate(state.step) / rate)
        every = task.config.train.check_replicas
        is_due = isinstance(every, int) and state.step - state.checked_step >= every
        if is_due or (heals(task) and task.exchange.raised_flags & PARTED):
            state.checked_step = state.step if check_replicas(task) else state.checked_step
        every = task.config.log.hash_every
        if every and state.step % every == 0:
            self._metrics.write("hash", step=state.step, state_hash=hash_of(task))
        flags: int = task.exchange.raised_flags
        return flags

    def _must_meet(self, step: int) -> bool:
        """Say whether all ranks must speak in ``step``: the same on every rank.

        At the end of an epoch they do so anyway, and a checkpoint by a number of steps is of this
        step and no other.
        """
        by_steps = isinstance(self._task.config.checkpoint.every, int)
        is_last = step % len(self._task.train) == 0
        return is_last or (by_steps and self._boundary.saves_after(step))

    def _record(self, epoch: int, lr: float) -> None:
        """Write and show what the steps since the last record were like. Collective."""
        state, task = self._state, self._task
        interval = state.tally.take(task.comm)
        state.training_s += interval.num_steps * interval.step_s
        state.num_skipped += interval.num_skipped
        rounds = {} if task.sync is None else figures(task.sync)
        all_work = task.config.sync.fraction == 1  # else some are fast, as they were not drawn
        for line in self._stragglers.see(interval.of_ranks) if all_work else ():
            if task.comm.rank == 0:
                logger.warning(line)
        slow = self._stragglers.counts(task.comm.size)
        self._metrics.write_ranks(state.step, {**interval.of_ranks, "slow": slow})
        noise = task.noise and task.noise.value(mean_sums(task.noise, task.comm))
        self._metrics.write(
            "step",
            epoch=epoch,
            step=state.step,
            lr=lr,
            loss=interval.loss,
            samples_per_s=interval.samples_per_s,
            compute_s=interval.compute_s,
            communication_s=interval.communication_s,
            input_s=interval.input_s,
            **({"skipped": interval.num_skipped} if interval.num_skipped else {}),
            **({"noise_scale": noise} if noise else {}),
            **rounds,
            **self._savings.take(),
        )
        self._progress.advance(state.step, interval, rounds)
        if interval.num_skipped:
            self._progress.tell(left_out(interval.num_skipped))
        if task.sync is not None:
            self._guard.check_left_out(state.num_skipped)

    def _score(self) -> float | None:
        """Return what is larger for a better model; None where no test says so."""
        scores = self._state.scores
        if scores is None or not (math.isfinite(scores.loss) and math.isfinite(scores.metric)):
            return None
        return scores.metric if self._task.is_larger_better else -scores.metric


def is_recorded(task: Task, step: int, since: int) -> bool:
    """Say whether a record is written after ``step``: the same on every rank.

    ``since`` steps were taken since the last record. Where ranks take steps of their own a record
    that is due waits for the end of the round, or of the epoch: no step costs a message more.
    Nothing here depends on a clock, so that a run that was stopped writes the same records.
    """
    epoch_steps = len(task.train)
    if not ends_interval(step, epoch_steps, task.config.log.every_steps, since=since):
        return False
    return task.sync is None or task.sync.rounds.step_in_round == 0 or step % epoch_steps == 0


def ends_interval(step: int, epoch_steps: int, every_steps: int, *, since: int = 1) -> bool:
    """Say whether a record is due after ``step``: epochs are cut into nearly equal intervals.

    ``every_steps`` is the length of an interval, about; ``since`` steps were taken since the last.
    """
    num_intervals = max(1, round(epoch_steps / every_steps))
    last = (step - 1) % epoch_steps + 1
    return last * num_intervals // epoch_steps > (last - since) * num_intervals // epoch_steps


def hash_of(task: Task) -> str:
    """Return the hash of weights and optimizer state, the same on every rank; collective.

    Where ranks have their own, it is one of the hashes of all ranks.
    """
    if task.parallel is not None:
        return task.parallel.hash()
    state = {
        "model": dict(task.model.named_parameters()),
        "optimizer": task.optimizer.state_dict(),
    }
    if task.sync is None:
        return state_hash(state, task.comm)
    return state_hash({"ranks": task.comm.allgather_object(state_hash(state))})


def left_out(num_steps: int) -> str:
    """Say for people that steps were left out."""
    steps = "1 step was" if num_steps == 1 else f"{num_steps} steps were"
    return f"{steps} left out: not finite, or a spike of the loss"


def train_step(task: Task, batch: Batch, guard: StepGuard) -> tuple[float, int, bool]:
    """Learn from one global batch, of which this rank holds its part.

    Collective. Parts are weighted by their samples, so the step is that of the global batch. A
    rank whose part of a short last batch is empty computes nothing and still takes the step. The
    ``guard``, which has begun the step, decides whether it is taken.

    Returns a mean loss, and the number of samples that it is the mean of: over all ranks each
    sample is in one of them. Then whether the step was taken; if not, no sample counts.
    """
    loss, num_samples = _backward(task, batch, guard)
    overflows = task.precision.unscale(task.optimizer)
    # The gradients of an overflow are not looked at: the loss alone says whether all is well.
    if not guard.may_step(loss, 0.0 if overflows else _clip(task)):
        guard.leave_out()
        return 0.0, 0, False
    if overflows:
        task.optimizer.zero_grad()
        return 0.0, 0, False
    with noted(f'optimizer.name = "{task.config.optimizer.name}"'):  # an argument of a wrong type
        task.optimizer.step()
    task.tables.step()
    if task.ema is not None:
        task.ema.update()
    if task.steps is not None:
        # The loss of the whole batch is rank 0's: a sum over ranks would round it otherwise.
        return (loss, task.train.step_samples, True) if task.comm.rank == 0 else (0.0, 0, True)
    return loss, num_samples, True


def _backward(task: Task, batch: Batch, guard: StepGuard) -> tuple[float, int]:
    """Return the loss of this rank's samples, by reproducible steps of all, and their number."""
    with agreed(task.comm) if guard.is_first else nullcontext():
        both = task.split(batch)
    step = f"the step of {' and '.join(task.targets)}"
    if task.steps is not None:
        num_samples = task.train.step_samples
        loss_of = lambda part: task.forward(*part, tries_backward=guard.is_first)[1]  # noqa: E731
        with noted(step, *both):
            return task.steps.backward(both, loss_of, num_samples=num_samples), batch.num_samples
    if task.parallel is not None:
        with noted(step, *both):
            found = task.parallel.backward(
                both,
                lambda *part: task.forward(*part)[1],
                num_samples=task.train.step_samples,
                see=guard.see_loss,
            )
        return found, batch.num_samples if task.parallel.leads else 0
    return _by_pieces(task, both, batch.num_samples, guard, step)


def _by_pieces(
    task: Task, both: tuple[Tensor, Tensor], num_read: int, guard: StepGuard, step: str
) -> tuple[float, int]:
    """Return the loss of this rank's samples, and their number; a few at a time go backward."""
    task.optimizer.zero_grad()
    nominal = task.config.train.global_batch / task.comm.size
    # A rank whose step does not count calculates nothing.
    num_samples = num_read if task.sync is None or task.sync.takes_part else 0
    task.tables.begin(num_samples, nominal)
    task.exchange.set_num_samples(num_samples, nominal=nominal)
    pieces = min(task.config.train.accumulate, num_samples)
    cut = (values.tensor_split(max(pieces, 1)) for values in both)
    parts = [*zip(*cut, strict=True)] if pieces else []
    task.tables.look_up_nothing(task.model, both[0], task.config.train.accumulate - pieces)
    # What does not fit, mostly does not in the first step on any rank: one error for all of them.
    with agreed(task.comm) if guard.is_first else nullcontext():
        first = map(aligned, parts[0]) if parts else ()
        loss = task.forward(*first, tries_backward=guard.is_first)[1] if parts else None
    if loss is None:
        task.exchange.synchronize()  # in place of backward
        return 0.0, 0
    if task.config.train.accumulate > 1:
        task.exchange.set_backward_passes_per_step(pieces)
    value, measured = 0.0, list[Measured]()
    for number, part in enumerate(parts, 1):
        loss = task.forward(*map(aligned, part))[1] if number > 1 else loss
        weight = len(part[0]) / num_samples
        value += loss.item() * weight
        if number == pieces:
            guard.see_loss(value)
        loss = task.precision.scaled(loss)
        with noted(step, *part):
            loss.backward(torch.full_like(loss, weight))
        if number == 1 and pieces > 1:
            measured = _measured(task, len(part[0]), weight)
    if task.noise is not None and measured:
        task.noise.add(measured, *_measured(task, num_samples))
    if task.config.train.shard != "none":
        task.exchange.synchronize()  # flags are known before the step
    return value, num_samples


def _measured(task: Task, num_samples: int, weight: float = 1.0) -> list[Measured]:
    """Return what a gradient tells of noise; of one rank, as several tell it by themselves."""
    if task.noise is None or task.comm.size > 1:
        return []
    return [(num_samples, (gradient_norm(task) / weight) ** 2)]


def _clip(task: Task) -> float | None:
    """Clip the averaged gradients; return their norm before, None where nobody asks for it."""
    train, norm = task.config.train, None
    if train.clip_norm:
        norm = clip(task, train.clip_norm)
    elif train.clip_value:
        norm = gradient_norm(task)  # as infinite ones would be clipped too
    if train.clip_value and task.parallel is not None:
        task.parallel.clip_values(train.clip_value)
    elif train.clip_value and train.shard != "none":
        task.optimizer.clip_grad_value_(train.clip_value)
    elif train.clip_value:
        with_gradients = [p for p in task.model.parameters() if p.grad is not None]
        if with_gradients:  # torch refuses none, as of a rank without samples in a step of its own
            nn.utils.clip_grad_value_(with_gradients, train.clip_value)
    return norm


def aligned(values: Tensor) -> Tensor:
    """Return ``values`` at an address that is a multiple of 64, copied if need be.

    Matrix products round by where their input begins. A batch lies among others that were read
    with it, and after a stop it is read with others.
    """
    return values.clone() if values.data_ptr() % 64 else values
