"""Steps that are not finite, or spikes of the loss: what all ranks do about them."""

import math
from collections.abc import Callable, Mapping
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
from hpctrain.train.run_state import require_finite_weights, unfinite_weights
from hpctrain.train.scores import Scores
from hpctrain.train.snapshot import Snapshot
from hpctrain.train.stateful import GuardMemory
from hpctrain.train.task import Task

_MOST_SAMPLES, _MOST_RANKS = 8, 4
"""Numbers of samples of a rank, and ranks, in a message; the record has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFiniteFinding:
    """What a rank saw in a step that must not be taken."""

    step: int
    epoch: int
    lr: float
    loss: float  # of this rank's samples
    norm: float | None
    """Of the gradients, averaged where ranks average them; None where it was not looked at."""
    samples: list[int]  # numbers of this rank's samples in the data set

    def describe(self) -> str:
        """Say it for people."""
        shown = ", ".join(map(str, self.samples[:_MOST_SAMPLES])) or "none"
        more = len(self.samples) - _MOST_SAMPLES
        norm = "" if self.norm is None else f" and gradient norm {self.norm:g}"
        return (
            f"loss {self.loss:g}{norm} in step {self.step} (epoch {self.epoch}, learning rate "
            f"{self.lr:g}), samples {shown}" + (f" and {more} more" if more > 0 else "")
        )

    def record(self, rank: int) -> dict[str, Any]:
        """Return it for ``metrics.jsonl``, which has no numbers that are not finite."""
        norm = {} if self.norm is None else {"gradient_norm": str(self.norm)}
        figures = {"loss": str(self.loss), **norm}
        place = {"step": self.step, "epoch": self.epoch, "lr": self.lr}
        return {"rank": rank, **place, **figures, "samples": self.samples}


class StepGuard:
    """Decides between backward and the optimizer whether a step is taken.

    A rank knows its loss before gradients travel, and tells the others by a flag in the message
    that opens their reduction: all ranks that average gradients decide alike, before any parameter
    has changed, and no step costs a message more. Where a rank takes steps of its own it leaves
    out its own, and the others learn of it when the ranks meet next.

    Gradients that are not finite by a finite loss are found where their norm is known: with
    ``train.clip_norm``, and always where steps are left out. Elsewhere the weights behind them
    are, and the last step that was taken is named.

    The mean loss of all samples rides in the same message, so a spike is one on every rank.
    """

    def __init__(self, task: Task, metrics: Metrics, memory: GuardMemory | None = None) -> None:
        """Take what is needed; ``memory`` is of the steps so far, none for a single step."""
        self._task, self._metrics, self._train = task, metrics, task.config.train
        self._mode, self._on_spike = self._train.on_non_finite, self._train.on_spike
        self._memory = memory or GuardMemory(self._train)
        self._snapshot: Snapshot | None = None
        self._went_back_at = 0  # last step of the batches that were left out by that
        self._mean = self._limit = math.nan  # of this step, over all samples
        self._is_spike = False
        self.num_left_out = 1  # steps, where this one is; more where some are taken back
        self._flags, self._lr, self._step = 0, 0.0, 0
        self._looks = self._mode in ("skip", "rollback")  # at gradients, whatever the loss
        if self._looks:
            task.exchange.look_at_sums()
        self._buffers: StepValues | None = None
        self._finding: NotFiniteFinding | None = None
        self._taken: Callable[[], NotFiniteFinding] | None = None  # the last step that was taken
        self._has_told = self._told_of_test = False
        self.is_first = True  # whether no step has come as far as its loss

    def begin(self, step: int, lr: float, flags: int) -> None:
        """Begin a step; ``flags`` are what else this rank wants to be known."""
        self._step, self._lr, self.num_left_out = step, lr, 1
        self._flags = flags | (NOT_FINITE if self._finding else 0)
        self._task.exchange.raise_flags(self._flags)
        if "skip" in (self._mode, self._on_spike):
            self._buffers = StepValues(self._task.model)
        is_due = self._snapshot is None or (step - 1) % self._train.snapshot_every == 0
        if is_due and "rollback" in (self._mode, self._on_spike):
            self._snapshot = Snapshot(self._task, self._memory, step)

    def rate(self, step: int) -> float:
        """Return by what the learning rate of a step is multiplied."""
        return self._memory.rate(step)

    def see_loss(self, loss: float) -> None:
        """Tell the other ranks of a loss that is not finite, before its gradients travel."""
        if self._mode != "ignore" and not math.isfinite(loss):
            self._task.exchange.raise_flags(self._flags | NOT_FINITE)
        if self._on_spike != "none":
            self._task.exchange.report_loss(loss)

    def may_step(self, loss: float, norm: float | None) -> bool:
        """Say whether the step is taken; if not, note what this rank has seen.

        The same on all ranks whose gradients are averaged. ``loss`` is of this rank, or of all;
        ``norm`` that of the gradients, None where nobody has asked for it.
        """
        self.is_first = self._is_spike = False
        looks = self._mode != "ignore"
        flagged = looks and (
            self._task.exchange.gradient_flags & NOT_FINITE or not math.isfinite(loss)
        )
        if norm is None and (flagged or (self._looks and not self._task.exchange.sums_are_finite)):
            norm = self._task.exchange.gradient_norm()
        noted = partial(
            self._note,
            self._task.exchange.own_loss(loss),
            self._task.train.place,
            step=self._step,
            epoch=self._task.train.epoch + 1,
            lr=self._lr,
        )
        if not (looks and (flagged or not math.isfinite(norm or 0.0))):
            self._taken = noted
            return self._on_spike == "none" or self._sees(loss)
        if self._finding is None:
            is_older = self._mode == "stop" and bool(unfinite_weights(self._task))
            self._finding = self._taken() if is_older and self._taken else noted(norm=norm)
        return False

    def _sees(self, loss: float) -> bool:
        """Say whether a step that is finite is taken by its loss. Collective where it is a spike.

        ``loss`` is of all samples with reproducible steps, else of this rank.
        """
        memory = self._memory
        self._mean = self._task.exchange.mean_loss(loss)
        self._limit = memory.spikes.limit
        self._is_spike = math.isfinite(self._mean) and memory.spikes.is_spike(self._mean)
        if not self._is_spike or self._on_spike == "lower_rate":
            if self._is_spike:
                self._lower_rate()
            memory.spikes.see(self._mean)
            return True
        assert self._taken is not None
        self._finding = self._taken()
        return False

    def _lower_rate(self) -> None:
        """Take this step and some more at a lower rate. Collective."""
        assert self._taken is not None
        factor, steps = self._train.lowered_rate, self._train.lowered_steps
        for group in self._task.optimizer.param_groups:
            group["lr"] *= factor / self._memory.rate(self._step)
        self._memory.lowered_at, self._finding = self._step, self._taken()
        self._tell(
            "lower_rate",
            f"its learning rate is {factor:g} times that of the schedule, which comes back in "
            f"{steps} steps",
        )
        self._finding = None

    def _note(
        self, loss: float, place: tuple[int, int], norm: float | None = None, **about: Any
    ) -> NotFiniteFinding:
        samples = self._task.train.samples_at(place).tolist()
        return NotFiniteFinding(loss=loss, norm=norm, samples=samples, **about)

    @torch.no_grad()
    def leave_out(self) -> None:
        """Stand in the place of the optimizer's step. Collective where that is.

        Parameters and optimizer state are as before, and so are the buffers where training goes
        on. Random numbers that were drawn, and what forward has changed elsewhere, stay. Raises
        ``NotFiniteError``: the run stops; on every rank.
        """
        task = self._task
        does = self._on_spike if self._is_spike else self._mode
        all_know = task.exchange.is_synchronous
        if self._buffers is not None:
            self._buffers.put_back()  # before a round ends, which averages them
        task.exchange.skip(self._flags | NOT_FINITE)
        if does == "stop":
            if all_know:
                self._stop()
            return
        if all_know:
            self._go_on(does)
        self._finding = None

    def _go_on(self, does: str) -> None:
        """Go back where that is asked for, and tell of it. Collective.

        Raises ``NotFiniteError``: too many steps were left out; on every rank.
        """
        done = "it is left out"
        if does == "rollback":
            assert self._snapshot is not None
            since, last = self._snapshot.step - 1, max(self._snapshot.step - 1, self._went_back_at)
            self.num_left_out, self._went_back_at = self._step - last, self._step
            self._snapshot.restore()
            done = f"all is as after step {since} again, and what came since is left out"
        self._memory.num_left_out += self.num_left_out
        self._tell(does, done)
        self.check_left_out(self._memory.num_left_out)

    def check_left_out(self, number: int) -> None:
        """Raise ``NotFiniteError`` if that many steps of a run are too many; not collective."""
        most = self._train.max_skips
        if most and number > most:
            self._has_told = True
            raise NotFiniteError(
                f"at most train.max_skips = {most} steps are left out, and {number} were, "
                f"the last of them is step {self._step}\nmetrics.jsonl has all of "
                f"them with their samples: look at these, or take a smaller optimizer.lr (with "
                f"--changed)"
            )

    def _tell(self, does: str, done: str) -> None:
        """Record what was done about this step, and warn of it. Collective."""
        num = self.num_left_out if does != "lower_rate" else 0
        if self._is_spike:
            self._shown("spike", action=does, skipped=num, loss=self._mean, limit=self._limit)
            what = f"loss {self._mean:g} is a spike, above {self._limit:g}"
        else:
            ranks = format_ranks(self._shown(action=does, skipped=num))
            what = f"loss or gradients of {ranks} are not finite"
        if self._task.comm.rank == 0:
            place = f"step {self._step} (epoch {self._task.train.epoch + 1})"
            logger.warning(f"{place}: {what}: {done}; metrics.jsonl has the samples")

    def end(self) -> None:
        """Stop where another rank's step, that it took by itself, was not finite. Collective then.

        Raises ``NotFiniteError``: there was one; on every rank.
        """
        if self._mode == "stop" and self._task.exchange.raised_flags & NOT_FINITE:
            self._stop()

    def check_test(self, scores: Scores, step: int, epoch: int) -> None:
        """Stop after a test whose loss is not finite, or warn once. Collective.

        ``scores`` are the same on every rank, ``step`` steps are done and ``epoch`` has ended.
        Raises ``NotFiniteError``: the run stops; on every rank.
        """
        if math.isfinite(scores.loss):
            return
        task = self._task
        found = f"the loss of the test after step {step} (epoch {epoch}) is {scores.loss:g}"
        if self._mode == "stop":
            require_finite_weights(task)  # they are the cause then
            self._has_told = True
            raise NotFiniteError(
                f"the loss of a test must be finite, {found}\n"
                f"the weights are finite: look at the test data, and at what the model does "
                f"otherwise after eval(), such as the running means of BatchNorm\n"
                f'train.on_non_finite = "skip" or "ignore" makes such a test a warning'
            )
        if task.comm.rank == 0 and not self._told_of_test:
            logger.warning(
                f"{found}: its {task.metric_name} is made of values that are no numbers, and says "
                f"nothing"
            )
        self._told_of_test = True

    def traced(self, error: NotFiniteError) -> NotFiniteError:
        """Return the error with the samples that weights behind a step may come from. Collective.

        All ranks have raised it.
        """
        lines: list[str] = []
        if not self._has_told:
            if self._finding is None and self._taken and unfinite_weights(self._task):
                self._finding = self._taken()
            lines = _lines_of(self._shown())
        return NotFiniteError("\n".join((str(error), *lines)))

    def _stop(self) -> None:
        self._has_told = True
        raise NotFiniteError(_told(self._shown()))

    def _shown(self, event: str = "not_finite", **about: Any) -> dict[int, NotFiniteFinding]:
        """Record what ranks have found, and return what people need of it. Collective."""
        findings = self._task.comm.allgather_object(self._finding)
        records = [f.record(rank) for rank, f in enumerate(findings) if f is not None]
        if records:
            self._metrics.write(event, step=self._step, **about, ranks=records)
        own = [f is not None and not math.isfinite(f.loss) for f in findings]
        return {
            rank: f
            for rank, f in enumerate(findings)
            if f is not None and (own[rank] or not any(own))
        }


def _lines_of(shown: Mapping[int, NotFiniteFinding]) -> list[str]:
    """Return a line for each of the first findings."""
    lines = [f"  rank {rank}: {finding.describe()}" for rank, finding in shown.items()]
    if more := lines[_MOST_RANKS:]:
        lines[_MOST_RANKS:] = [f"  and {len(more)} more ranks"]
    return lines


def _told(shown: Mapping[int, NotFiniteFinding]) -> str:
    """Say what ranks have found, and what to do."""
    step = min(finding.step for finding in shown.values())
    was_taken = all(finding.norm is None for finding in shown.values())
    rule = "loss and gradients must be finite,"
    cause = (
        f"{rule} the weights behind step {step} are not: it was too large, or a gradient of it "
        f"was not finite"
        if was_taken
        else f"{rule} those of {format_ranks(shown)} are not in step {step}, which was not taken"
    )
    ways_out = (
        "look at these samples; metrics.jsonl has all of them",
        "take a smaller optimizer.lr, or train.clip_norm (both with --changed), or",
        'train.on_non_finite = "skip", which leaves such steps out',
    )
    return "\n".join((cause, *_lines_of(shown), *ways_out))
