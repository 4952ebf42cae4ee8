"""Checks before a step: losses and gradients must be finite, and loss spikes are handled."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hpctrain.core.errors import NotFiniteError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_ranks
from hpctrain.gradients.step_values import StepValues
from hpctrain.train.boundary import NOT_FINITE
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import require_finite_weights
from hpctrain.train.scores import Scores
from hpctrain.train.snapshot import Rollback
from hpctrain.train.stateful import GuardMemory
from hpctrain.train.step_findings import NotFiniteFinding, StepFindings, message_of
from hpctrain.train.task import Task


@dataclass(slots=True)
class _Step:
    """Data of the current step, until the step is taken or skipped."""

    number: int = 0
    lr: float = 0.0
    flags: int = 0  # flags that this rank sends to all ranks
    buffers: StepValues | None = None  # copies to restore if the step is skipped
    mean_loss: float = math.nan  # mean over the samples of all ranks
    limit: float = math.nan  # mean losses above this value are spikes
    is_spike: bool = False
    num_lost: int = 1
    """Number of steps lost if this step is skipped, including steps that a rollback undoes."""


class StepGuard:
    """Decides between backward and the optimizer step whether a step is taken.

    A rank computes its loss before it sends gradients. If the loss is not finite, the rank raises
    a flag in the step header, so all ranks that average gradients make the same decision before
    any parameter changes, without an additional message. With local steps a rank skips only its
    own step, and the other ranks receive the flag at the next synchronization.

    Gradients may be infinite or NaN although the loss is finite. The guard detects such gradients
    with ``train.clip_norm`` or ``train.clip_value``, which need a norm; with fp16; and with
    ``train.on_non_finite`` set to "skip" or "rollback". In other configurations the step is taken,
    the loss of the next step is not finite, and the error names the step that was taken.

    The step header also contains the mean loss of all samples, so all ranks detect the same
    spikes.

    Args:
        task: task of the run.
        metrics: receives findings.
        memory: state between steps, which checkpoints contain; None for a single step.
    """

    def __init__(self, task: Task, metrics: Metrics, memory: GuardMemory | None = None) -> None:
        self._task, self._train = task, task.config.train
        self._mode, self._on_spike = self._train.on_non_finite, self._train.on_spike
        self._memory = memory or GuardMemory(self._train)
        self._findings = StepFindings(task, metrics)
        self._now = _Step()
        self._rollback: Rollback | None = None
        if "rollback" in (self._mode, self._on_spike):
            self._rollback = Rollback(task, self._memory, self._train.snapshot_every)
        self._checks_gradients = self._mode in ("skip", "rollback")
        if self._checks_gradients:
            task.exchange.look_at_sums()
        self._has_warned = False  # whether a warning about a test loss was logged
        self.is_first = True  # whether no step has computed a loss yet

    @property
    def num_lost(self) -> int:
        """Number of steps that are lost if this step is skipped.

        Includes the steps that a rollback undoes.
        """
        return self._now.num_lost

    def begin(self, step: int, lr: float, flags: int) -> None:
        """Start a step; all ranks receive the ``flags`` of every rank. Local."""
        if self._findings.own:
            flags |= NOT_FINITE
        self._now = _Step(step, lr, flags)
        self._task.exchange.raise_flags(flags)
        if "skip" in (self._mode, self._on_spike):
            self._now.buffers = StepValues(self._task.model)
        if self._rollback is not None:
            self._rollback.begin(step)

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate in ``step``, 1 unless lowered after a spike."""
        return self._memory.rate(step)

    def see_loss(self, loss: float) -> None:
        """Raise a flag for a loss that is not finite, before gradients are sent. Local."""
        if self._mode != "ignore" and not math.isfinite(loss):
            self._task.exchange.raise_flags(self._now.flags | NOT_FINITE)
        if self._on_spike != "none":
            self._task.exchange.report_loss(loss)

    def may_step(self, loss: float, norm: float | None) -> bool:
        """Return whether the step is taken; identical on all ranks that average gradients.

        Args:
            loss: mean loss of this rank, or of all ranks with reproducible steps.
            norm: L2 norm of the gradients; None if not computed.
        """
        exchange, now = self._task.exchange, self._now
        self.is_first = False
        looks = self._mode != "ignore"
        flagged = looks and (exchange.gradient_flags & NOT_FINITE or not math.isfinite(loss))
        if norm is None and (flagged or (self._checks_gradients and not exchange.sums_are_finite)):
            norm = exchange.gradient_norm()
        finding = partial(
            self._finding,
            exchange.own_loss(loss),
            self._task.train.place,
            step=now.number,
            epoch=self._task.train.epoch + 1,
            lr=now.lr,
        )
        if not (looks and (flagged or not math.isfinite(norm or 0.0))):
            self._findings.step_taken(finding)
            return self._on_spike == "none" or self._may_step_by_loss(loss)
        self._findings.note(partial(finding, norm=norm), may_be_older=self._mode == "stop")
        return False

    def _may_step_by_loss(self, loss: float) -> bool:
        """Return whether a finite step is taken. Collective if its loss is a spike."""
        spikes, now = self._memory.spikes, self._now
        now.mean_loss, now.limit = self._task.exchange.mean_loss(loss), spikes.limit
        now.is_spike = math.isfinite(now.mean_loss) and spikes.is_spike(now.mean_loss)
        if now.is_spike and self._on_spike != "lower_rate":
            self._findings.note_last()
            return False
        if now.is_spike:
            self._lower_rate()
        spikes.see(now.mean_loss)
        return True

    def _lower_rate(self) -> None:
        """Lower the learning rate of this and the following steps. Collective."""
        factor, steps = self._train.lowered_rate, self._train.lowered_steps
        for group in self._task.optimizer.param_groups:
            group["lr"] *= factor / self._memory.rate(self._now.number)
        self._memory.lowered_at = self._now.number
        self._findings.note_last()
        self._report(
            "lower_rate",
            f"the learning rate is multiplied by {factor:g}, and returns to the schedule within "
            f"{steps} steps",
            num_lost=0,
        )
        self._findings.own = None

    def _finding(
        self, loss: float, place: tuple[int, int], norm: float | None = None, **about: Any
    ) -> NotFiniteFinding:
        samples = self._task.train.samples_at(place).tolist()
        return NotFiniteFinding(loss=loss, norm=norm, samples=samples, **about)

    @torch.no_grad()
    def skip_step(self) -> None:
        """Skip the optimizer step. Collective if the ranks take this step together.

        Parameters and optimizer state do not change. If training continues, buffers get the values
        that they had before the step. Other side effects of forward remain, for example the
        changed state of random generators.

        Raises:
            NotFiniteError: the configuration ends the run; on all ranks.
        """
        exchange, now = self._task.exchange, self._now
        action = self._on_spike if now.is_spike else self._mode
        all_know = exchange.is_synchronous
        if now.buffers is not None:
            now.buffers.restore()  # before exchange.skip() may average the buffers
        exchange.skip(now.flags | NOT_FINITE)
        if action == "stop":
            if all_know:
                self._stop()
            return
        if all_know:
            self._continue(action)
        self._findings.own = None

    def _continue(self, action: str) -> None:
        """Roll back if ``action`` is ``rollback``, and log the skipped step. Collective.

        Raises ``NotFiniteError`` on all ranks if too many steps were skipped.
        """
        done, now = "the step is skipped", self._now
        if action == "rollback":
            assert self._rollback is not None
            since, now.num_lost = self._rollback.go_back(now.number)
            done = (
                f"the run is rolled back to its state after step {since}, later steps are skipped"
            )
        self._memory.num_skipped += now.num_lost
        self._report(action, done, num_lost=now.num_lost)
        self.check_num_skipped(self._memory.num_skipped)

    def check_num_skipped(self, number: int) -> None:
        """Check the number of skipped steps against ``train.max_skips``. Local.

        Raises:
            NotFiniteError: the run has skipped too many steps.
        """
        maximum = self._train.max_skips
        if maximum and number > maximum:
            self._findings.is_reported = True
            raise NotFiniteError(
                f"the number of skipped steps must not exceed train.max_skips = {maximum}, but "
                f"{number} steps were skipped, the last one is step {self._now.number}\n"
                f"metrics.jsonl lists these steps and their samples: check the samples, or use a "
                f"smaller optimizer.lr (with --changed)"
            )

    def _report(self, action: str, done: str, *, num_lost: int) -> None:
        """Record the action for this step, and log a warning. Collective."""
        now = self._now
        about: dict[str, Any] = {"action": action, "skipped": num_lost}
        if now.is_spike:
            about |= {"loss": now.mean_loss, "limit": now.limit}
            self._findings.report(now.number, "spike", **about)
            what = f"loss {now.mean_loss:g} is a spike, above {now.limit:g}"
        else:
            ranks = format_ranks(self._findings.report(now.number, **about))
            what = f"loss or gradients of {ranks} are not finite"
        if self._task.comm.rank == 0:
            place = f"step {now.number} (epoch {self._task.train.epoch + 1})"
            logger.warning(f"{place}: {what}: {done}; metrics.jsonl has the samples")

    def end(self) -> None:
        """Stop all ranks if a local step of any rank was not finite.

        ``raised_flags`` reports such a step to all ranks. Collective only if the ranks stop.

        Raises:
            NotFiniteError: a local step was not finite; on all ranks.
        """
        if self._mode == "stop" and self._task.exchange.raised_flags & NOT_FINITE:
            self._stop()

    def check_test(self, scores: Scores, step: int, epoch: int) -> None:
        """Raise an error or log one warning if the loss of a test is not finite. Collective.

        Args:
            scores: results of the test, identical on all ranks.
            step: number of finished steps.
            epoch: number of finished epochs.

        Raises:
            NotFiniteError: the loss is not finite and ``train.on_non_finite`` is "stop"; on all
                ranks.
        """
        if math.isfinite(scores.loss):
            return
        task = self._task
        found = f"the loss of the test after step {step} (epoch {epoch}) is {scores.loss:g}"
        if self._mode == "stop":
            require_finite_weights(task)  # weights that are not finite would be the cause
            self._findings.is_reported = True
            raise NotFiniteError(
                f"the loss of a test must be finite, but {found}\n"
                f"the weights are finite: check the test data, and the behaviour of the model "
                f"after eval(), such as the running means of BatchNorm\n"
                f'train.on_non_finite = "skip" or "ignore" turns this error into a warning'
            )
        if task.comm.rank == 0 and not self._has_warned:
            logger.warning(
                f"{found}: its {task.metric_name} is meaningless, because it is computed from "
                f"values that are not finite"
            )
        self._has_warned = True

    def traced(self, error: NotFiniteError) -> NotFiniteError:
        """Return ``error``, extended by the steps and samples that may be the cause.

        Collective.
        """
        return NotFiniteError("\n".join((str(error), *self._findings.lines(self._now.number))))

    def _stop(self) -> None:
        self._findings.is_reported = True
        raise NotFiniteError(message_of(self._findings.report(self._now.number)))
