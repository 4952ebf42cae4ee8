"""The training loop: steps, tests, checkpoints and records of a run."""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from hpctrain.cluster.step_records import record
from hpctrain.comm.agreement import agreed
from hpctrain.core.errors import NotFiniteError
from hpctrain.core.logs import logger
from hpctrain.core.user_error import noted
from hpctrain.data.samples import Batch
from hpctrain.gradients.step_counter import PARTED
from hpctrain.runtime import world
from hpctrain.train.boundary import SAVE, STOP, Boundary
from hpctrain.train.console import Progress
from hpctrain.train.evaluation import StopPoll, evaluate
from hpctrain.train.finite import StepGuard
from hpctrain.train.metrics import Metrics
from hpctrain.train.profiler import Profiler
from hpctrain.train.run_state import RunState, random_states, set_random_states
from hpctrain.train.scores import LOSS, Scores
from hpctrain.train.slow_ranks import SlowRanks
from hpctrain.train.step_exchange import StepBatch
from hpctrain.train.step_meter import SavingsMeter
from hpctrain.train.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a finished run."""

    scores: Scores  # results of the last test
    training_s: float  # total duration of all steps, without tests
    num_samples: int  # number of processed samples; a sample counts once per epoch
    step: int  # number of finished steps
    best: dict[str, Any]  # step, epoch and metric of the best test


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Result of a run that saved its state and stopped before its end."""

    reason: str  # human-readable, such as the signal or the deadline
    step: int  # number of finished steps


class TrainingLoop:
    """Trains from the step in ``state`` to the end of the last epoch, or until a stop request.

    Args:
        state: position of the run; updated after each step.
        metrics: receives the records.
        progress: displays the steps.
        boundary: writes checkpoints and handles stop requests.
        profiler: traces the configured steps.
    """

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
        self._slow_ranks = SlowRanks({rank: host for host, ranks in pairs for rank in ranks})

    def train(self) -> Outcome | Stopped:
        """Run the remaining steps. Collective.

        Raises:
            NotFiniteError: loss, gradients, parameters or test loss are not finite; on all ranks.
            ReplicaError: the replicas differ; on all ranks.
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
            epoch, flags = loader.epoch + 1, 0
            for batch in state.tally.inputs(loader):
                flags = self._step(batch, epoch)
                if flags & STOP:
                    return Stopped(reason=boundary.stop(state), step=state.step)
                if flags & SAVE and loader.consumed < self._task.num_train_samples:
                    self._save()
            # The loader is now at the start of the next epoch.
            if self._task.exchange.wants_epoch_loss:
                self._task.exchange.end_epoch(state.epoch_tally.take(self._task.comm).loss)
            if stopped := self._finish_epoch(epoch, wants_save=bool(flags & SAVE)):
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
        """Test the model if a test is due, then save a checkpoint if one is due. Collective.

        First synchronize the replicas if the run may end after this epoch. If a stop request
        interrupts the test, return ``Stopped``; the resumed run then starts with this test.
        """
        state, task = self._state, self._task
        is_last = epoch == task.config.train.epochs
        is_tested = is_last or epoch % task.config.test.every_epochs == 0
        may_be_last = is_last or (is_tested and task.config.test.patience > 0)
        if may_be_last:
            task.exchange.finish()
        if is_tested:
            state.owes_test = not self._test(epoch)
            if state.owes_test:
                return Stopped(reason=self._boundary.stop(state), step=state.step)
        self._progress.epoch_ended(epoch, state.scores if is_tested else None)
        if wants_save or (is_tested and task.config.keep_best):
            self._save(self._score() if is_tested else None)
        self._task.exchange.resume_clock()
        return None

    def _test(self, epoch: int) -> bool:
        """Test the model; return False if a stop request interrupted the test. Collective."""
        state, task = self._state, self._task
        if task.config.train.check_replicas != "never":
            task.exchange.check_replicas()
        poll = StopPoll(task.comm, lambda: self._boundary.is_asked_to_stop)
        random = random_states(task.device)
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
        """Write a checkpoint between two steps. Collective."""
        start = perf_counter()
        self._boundary.save(self._state, score=score)
        self._state.tally.add_checkpoint(perf_counter() - start)
        self._task.exchange.resume_clock()

    def _step(self, batch: Batch, epoch: int) -> int:
        """Take one step, and write a record if one is due. Collective.

        Returns the flags that any rank raised in this step, such as ``STOP``.
        """
        state, task, guard = self._state, self._task, self._guard
        self._profiler.before(state.step + 1)
        rate, exchange = guard.rate(state.step + 1), task.exchange
        factor = task.schedule(state.step) * rate
        lr = task.config.optimizer.lr * factor
        exchange.begin(factor, must_agree=self._must_agree(state.step + 1))
        guard.begin(state.step + 1, lr, self._boundary.requested_flags(state.step + 1))
        leads = exchange.leads_step
        before, start = task.comm.traffic(), perf_counter()
        loss, num_samples, is_taken = train_step(task, batch, guard)
        work_s, communication_s = perf_counter() - start, exchange.communication_seconds
        state.tally.add(
            loss=loss,
            num_samples=num_samples,
            work_s=work_s,
            communication_s=communication_s,
            num_skipped=guard.num_lost if leads and not is_taken else 0,
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
        if exchange.wants_epoch_loss:
            state.epoch_tally.add(
                loss=loss, num_samples=num_samples, work_s=0.0, communication_s=0.0
            )
        state.step += 1
        if is_recorded(task, state.step, state.tally.num_steps):
            self._record(epoch, lr * guard.rate(state.step) / rate)
        every = task.config.train.check_replicas
        is_due = isinstance(every, int) and state.step - state.checked_step >= every
        if is_due or (exchange.heals and exchange.raised_flags & PARTED):
            was_checked = exchange.check_replicas()
            state.checked_step = state.step if was_checked else state.checked_step
        every = task.config.log.hash_every
        if every and state.step % every == 0:
            self._metrics.write("hash", step=state.step, state_hash=exchange.hash())
        return exchange.raised_flags

    def _must_agree(self, step: int) -> bool:
        """Return whether all ranks must synchronize after ``step``; identical on all ranks.

        The ranks synchronize at the end of an epoch, and before a checkpoint if
        ``checkpoint.every`` is a number of steps.
        """
        by_steps = isinstance(self._task.config.checkpoint.every, int)
        is_last = step % len(self._task.train) == 0
        return is_last or (by_steps and self._boundary.saves_after(step))

    def _record(self, epoch: int, lr: float) -> None:
        """Write and display a record of the steps since the last record. Collective."""
        state, task = self._state, self._task
        interval = state.tally.take(task.comm)
        state.training_s += interval.num_steps * interval.step_s
        state.num_skipped += interval.num_skipped
        rounds = task.exchange.figures
        all_work = task.config.sync.fraction == 1  # otherwise ranks that skip a round look fast
        for line in self._slow_ranks.see(interval.of_ranks) if all_work else ():
            if task.comm.rank == 0:
                logger.warning(line)
        slow = self._slow_ranks.counts(task.comm.size)
        self._metrics.write_ranks(state.step, {**interval.of_ranks, "slow": slow})
        noise = task.exchange.noise_scale
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
            self._progress.print_line(skipped_text(interval.num_skipped))
        if task.exchange.takes_own_steps:
            self._guard.check_num_skipped(state.num_skipped)

    def _score(self) -> float | None:
        """Return the result of the last test; larger is better, None if not finite."""
        scores = self._state.scores
        if scores is None or not (math.isfinite(scores.loss) and math.isfinite(scores.metric)):
            return None
        return scores.metric if self._task.is_larger_better else -scores.metric


def is_recorded(task: Task, step: int, since: int) -> bool:
    """Return whether a record is written after ``step``; identical on all ranks.

    With local steps, a record that is due is written at the end of the round or of the epoch,
    because only there the ranks communicate. The result does not depend on a clock, so a resumed
    run writes the same records as an uninterrupted run.

    Args:
        task: configuration and loader.
        step: number of finished steps.
        since: number of steps since the last record.
    """
    epoch_steps = len(task.train)
    if not ends_interval(step, epoch_steps, task.config.log.every_steps, since=since):
        return False
    return task.exchange.is_between_rounds or step % epoch_steps == 0


def ends_interval(step: int, epoch_steps: int, every_steps: int, *, since: int = 1) -> bool:
    """Return whether an interval between two records has ended by ``step``.

    An epoch is divided into intervals of nearly equal length.

    Args:
        step: number of finished steps.
        epoch_steps: steps per epoch.
        every_steps: approximate length of an interval in steps.
        since: number of steps since the last record.
    """
    num_intervals = max(1, round(epoch_steps / every_steps))
    last = (step - 1) % epoch_steps + 1
    return last * num_intervals // epoch_steps > (last - since) * num_intervals // epoch_steps


def skipped_text(num_steps: int) -> str:
    """Return a message with the number of skipped steps."""
    steps = "1 step was" if num_steps == 1 else f"{num_steps} steps were"
    return f"{steps} skipped: not finite, or a spike of the loss"


def train_step(task: Task, batch: Batch, guard: StepGuard) -> tuple[float, int, bool]:
    """Train on this rank's part of one global batch. Collective.

    Every sample has the same weight, even if the ranks have different numbers of samples. A rank
    without samples in a short last batch computes no gradients but takes the step.

    Args:
        task: model, data and exchange.
        batch: this rank's part of the global batch.
        guard: decides whether the step is taken; the caller has called ``guard.begin``.

    Returns:
        ``(loss, num_samples, is_taken)``: a mean loss, the number of samples in this mean, and
        whether the step was taken. Each sample of the batch counts on exactly one rank. If the
        step is not taken, returns ``(0.0, 0, False)``.
    """
    exchange = task.exchange
    with agreed(task.comm) if guard.is_first else nullcontext():
        inputs, labels = task.split(batch)
    own = StepBatch(
        inputs=inputs,
        labels=labels,
        num_samples=batch.num_samples,
        num_global=task.train.step_samples,
    )
    loss, num_samples = exchange.backward(own, task.forward, guard)
    overflows = task.precision.unscale(task.optimizer)
    # After an overflow caused by the loss scale, gradients are not finite; check only the loss.
    if not guard.may_step(loss, 0.0 if overflows else _clip(task)):
        guard.skip_step()
        return 0.0, 0, False
    if overflows:
        task.optimizer.zero_grad()
        return 0.0, 0, False
    with noted(f'optimizer.name = "{task.config.optimizer.name}"'):
        exchange.step()
    if task.ema is not None:
        task.ema.update()
    return *exchange.counted(loss, own, num_samples), True


def _clip(task: Task) -> float | None:
    """Clip the combined gradient; return its norm before clipping, None if not computed."""
    train, exchange, norm = task.config.train, task.exchange, None
    if train.clip_norm:
        norm = exchange.clip(train.clip_norm)
    elif train.clip_value:
        norm = exchange.gradient_norm()  # clipping would hide infinite elements
    if train.clip_value:
        exchange.clip_values(train.clip_value)
    return norm
