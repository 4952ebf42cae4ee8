"""Steps whose loss or gradients are not finite: they stop the run, or are left out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hpctrain.core.errors import NotFiniteError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_ranks
from hpctrain.gradients.reproducible import StepValues
from hpctrain.train.boundary import NOT_FINITE
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import require_finite_weights, unfinite_weights
from hpctrain.train.scores import Scores
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
    """

    def __init__(self, task: Task, metrics: Metrics) -> None:
        self._task, self._metrics = task, metrics
        self._mode = task.config.train.on_non_finite
        self._flags, self._lr, self._step = 0, 0.0, 0
        self._buffers: StepValues | None = None
        self._finding: NotFiniteFinding | None = None
        self._taken: Callable[[], NotFiniteFinding] | None = None  # the last step that was taken
        self._has_told = self._told_of_test = False
        self.is_first = True  # whether no step has come as far as its loss

    def begin(self, step: int, lr: float, flags: int) -> None:
        """Begin a step; ``flags`` are what else this rank wants to be known."""
        self._step, self._lr = step, lr
        self._flags = flags | (NOT_FINITE if self._finding else 0)
        self._task.exchange.raise_flags(self._flags)
        if self._mode == "skip":
            self._buffers = StepValues(self._task.model)

    def see_loss(self, loss: float) -> None:
        """Tell the other ranks of a loss that is not finite, before its gradients travel."""
        if self._mode != "ignore" and not math.isfinite(loss):
            self._task.exchange.raise_flags(self._flags | NOT_FINITE)

    def may_step(self, loss: float, norm: float | None) -> bool:
        """Say whether the step is taken; if not, note what this rank has seen.

        The same on all ranks whose gradients are averaged. ``loss`` is of this rank, or of all;
        ``norm`` that of the gradients, None where nobody has asked for it.
        """
        self.is_first = False
        if self._mode == "ignore":
            return True
        flagged = self._task.step_flags & NOT_FINITE or not math.isfinite(loss)
        if norm is None and (flagged or self._mode == "skip"):
            norm = gradient_norm(self._task)
        noted = partial(
            self._note,
            loss if self._task.steps is None else self._task.steps.own_loss,
            self._task.train.place,
            step=self._step,
            epoch=self._task.train.epoch + 1,
            lr=self._lr,
        )
        if not flagged and (norm is None or math.isfinite(norm)):
            self._taken = noted
            return True
        if self._finding is None:
            is_older = self._mode == "stop" and bool(unfinite_weights(self._task))
            self._finding = self._taken() if is_older and self._taken else noted(norm=norm)
        return False

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
        all_know = task.sync is None or task.sync.is_synchronous
        if self._buffers is not None:
            self._buffers.put_back()  # before a round ends, which averages them
            self._finding = None
        if task.sync is not None:
            task.exchange.raise_flags(self._flags | NOT_FINITE)
            task.sync.skip_step()
        task.optimizer.zero_grad()
        if self._mode == "stop" and all_know:
            self._stop()

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

    def _shown(self) -> dict[int, NotFiniteFinding]:
        """Record what ranks have found, and return what people need of it. Collective."""
        findings = self._task.comm.allgather_object(self._finding)
        records = [f.record(rank) for rank, f in enumerate(findings) if f is not None]
        if records:
            self._metrics.write("not_finite", step=self._step, ranks=records)
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


def clip(task: Task, max_norm: float) -> float:
    """Clip the averaged gradient; return its norm before that. Collective with ``train.shard``."""
    if task.parallel is not None:
        return task.parallel.clip(max_norm)
    if task.config.train.shard != "none":  # the average is in no rank's .grad
        return float(task.optimizer.clip_grad_norm_(max_norm))
    return float(torch.nn.utils.clip_grad_norm_(task.model.parameters(), max_norm))


def gradient_norm(task: Task) -> float:
    """Return the norm of all gradients of this rank, of all ranks' with ``train.shard``."""
    if task.parallel is not None or task.config.train.shard != "none":
        return clip(task, math.inf)
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0
