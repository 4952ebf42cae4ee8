"""Decision whether a step is taken: losses and gradients that are not finite, and loss spikes."""

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
    """The present step, until it is taken or left out."""

    number: int = 0
    lr: float = 0.0
    flags: int = 0  # for all ranks
    buffers: StepValues | None = None  # to restore, where steps may be left out
    mean_loss: float = math.nan  # of all samples
    limit: float = math.nan  # of the mean loss; above it is a spike
    is_spike: bool = False
    num_left_out: int = 1
    """Steps that are left out with this one; more than 1 where a rollback undoes some."""


class StepGuard:
    """Decides between backward and the optimizer whether a step is taken.

    A rank knows its loss before gradients are sent, and raises a flag in the message that opens
    their reduction: all ranks that average gradients decide identically, before any parameter has
    changed, and no step costs an additional message. Where a rank takes steps of its own it leaves
    out its own step, and the other ranks receive the flag when the ranks synchronize next.

    Gradients that are not finite although the loss is are found where their norm is known: with
    ``train.clip_norm``, and always where steps are left out. Elsewhere the weights of the next
    step show them, and the error names the last step that was taken.

    The mean loss of all samples is in the same message, so a spike is one on every rank.

    Args:
        task: of the run.
        metrics: receives findings.
        memory: of the steps so far; None for a single step.
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
        self._has_warned = False  # of a test whose loss is not finite
        self.is_first = True  # whether no step has computed a loss so far

    @property
    def num_left_out(self) -> int:
        """Number of steps that are left out with the present one."""
        return self._now.num_left_out

    def begin(self, step: int, lr: float, flags: int) -> None:
        """Begin a step; all ranks receive ``flags`` of any rank."""
        if self._findings.own:
            flags |= NOT_FINITE
        self._now = _Step(step, lr, flags)
        self._task.exchange.raise_flags(flags)
        if "skip" in (self._mode, self._on_spike):
            self._now.buffers = StepValues(self._task.model)
        if self._rollback is not None:
            self._rollback.begin(step)

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        return self._memory.rate(step)

    def see_loss(self, loss: float) -> None:
        """Send a flag for a loss that is not finite, before gradients are sent."""
        if self._mode != "ignore" and not math.isfinite(loss):
            self._task.exchange.raise_flags(self._now.flags | NOT_FINITE)
        if self._on_spike != "none":
            self._task.exchange.report_loss(loss)

    def may_step(self, loss: float, norm: float | None) -> bool:
        """Return whether the step is taken; if not, keep what this rank has seen.

        The same on all ranks whose gradients are averaged. ``loss`` is of this rank, or of all;
        ``norm`` is the norm of the gradients, None where it was not computed.
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
        """Return whether a finite step is taken although it may be a spike. Collective if it is.

        ``loss`` is of all samples with reproducible steps, else of this rank.
        """
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
        """Take this step and the next ones at a lower rate. Collective."""
        factor, steps = self._train.lowered_rate, self._train.lowered_steps
        for group in self._task.optimizer.param_groups:
            group["lr"] *= factor / self._memory.rate(self._now.number)
        self._memory.lowered_at = self._now.number
        self._findings.note_last()
        self._report(
            "lower_rate",
            f"its learning rate is {factor:g} times that of the schedule, which is reached again "
            f"in {steps} steps",
            num_left_out=0,
        )
        self._findings.own = None

    def _finding(
        self, loss: float, place: tuple[int, int], norm: float | None = None, **about: Any
    ) -> NotFiniteFinding:
        samples = self._task.train.samples_at(place).tolist()
        return NotFiniteFinding(loss=loss, norm=norm, samples=samples, **about)

    @torch.no_grad()
    def leave_out(self) -> None:
        """Skip the optimizer's step. Collective where the step is.

        Parameters and optimizer state do not change; neither do buffers if training continues.
        Random numbers that were drawn, and other effects of forward, remain.

        Raises:
            NotFiniteError: the run stops; on every rank.
        """
        exchange, now = self._task.exchange, self._now
        action = self._on_spike if now.is_spike else self._mode
        all_know = exchange.is_synchronous
        if now.buffers is not None:
            now.buffers.put_back()  # before a round ends, which averages them
        exchange.skip(now.flags | NOT_FINITE)
        if action == "stop":
            if all_know:
                self._stop()
            return
        if all_know:
            self._continue(action)
        self._findings.own = None

    def _continue(self, action: str) -> None:
        """Roll back where that is configured, and report the step. Collective.

        Raises ``NotFiniteError``: too many steps were left out; on every rank.
        """
        done, now = "it is left out", self._now
        if action == "rollback":
            assert self._rollback is not None
            since, now.num_left_out = self._rollback.go_back(now.number)
            done = f"the run is back at its state after step {since}, later steps are left out"
        self._memory.num_left_out += now.num_left_out
        self._report(action, done, num_left_out=now.num_left_out)
        self.check_left_out(self._memory.num_left_out)

    def check_left_out(self, number: int) -> None:
        """Raise ``NotFiniteError`` if a run has left out too many steps. Local."""
        maximum = self._train.max_skips
        if maximum and number > maximum:
            self._findings.is_reported = True
            raise NotFiniteError(
                f"at most train.max_skips = {maximum} steps may be left out, but {number} were, "
                f"the last of them is step {self._now.number}\nmetrics.jsonl has all of them with "
                f"their samples: look at these, or use a smaller optimizer.lr (with --changed)"
            )

    def _report(self, action: str, done: str, *, num_left_out: int) -> None:
        """Record what was done about this step, and warn. Collective."""
        now = self._now
        about: dict[str, Any] = {"action": action, "skipped": num_left_out}
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
        """Stop if a step that another rank took by itself was not finite. Collective then.

        Raises:
            NotFiniteError: there was one; on every rank.
        """
        if self._mode == "stop" and self._task.exchange.raised_flags & NOT_FINITE:
            self._stop()

    def check_test(self, scores: Scores, step: int, epoch: int) -> None:
        """Stop after a test whose loss is not finite, or warn once. Collective.

        Args:
            scores: the same on every rank.
            step: number of finished steps.
            epoch: number of the epoch that has ended.

        Raises:
            NotFiniteError: the run stops; on every rank.
        """
        if math.isfinite(scores.loss):
            return
        task = self._task
        found = f"the loss of the test after step {step} (epoch {epoch}) is {scores.loss:g}"
        if self._mode == "stop":
            require_finite_weights(task)  # they are the cause then
            self._findings.is_reported = True
            raise NotFiniteError(
                f"the loss of a test must be finite, but {found}\n"
                f"the weights are finite: look at the test data, and at what the model does "
                f"differently after eval(), such as the running means of BatchNorm\n"
                f'train.on_non_finite = "skip" or "ignore" makes such a test a warning'
            )
        if task.comm.rank == 0 and not self._has_warned:
            logger.warning(
                f"{found}: its {task.metric_name} is computed from values that are not finite, "
                f"and has no meaning"
            )
        self._has_warned = True

    def traced(self, error: NotFiniteError) -> NotFiniteError:
        """Return the error with the samples that may be its cause. Collective.

        All ranks have raised it.
        """
        return NotFiniteError("\n".join((str(error), *self._findings.lines(self._now.number))))

    def _stop(self) -> None:
        self._findings.is_reported = True
        raise NotFiniteError(message_of(self._findings.report(self._now.number)))
