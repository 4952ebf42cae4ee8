"""Descriptions of steps with NaN or infinite losses or gradients, for records and messages."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.core.units import format_ranks, shortened
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import unfinite_weights
from hpctrain.train.task import Task

_MAX_SAMPLES, _MAX_RANKS = 8, 4
"""Maximum numbers of samples per rank, and of ranks, in a message; the record lists all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFiniteFinding:
    """Loss, gradient norm and samples of one rank in a step that is not finite."""

    step: int
    epoch: int
    lr: float
    loss: float  # mean over this rank's samples
    norm: float | None
    """L2 norm of the gradients, after averaging if ranks average; None if not computed."""
    samples: list[int]  # indices of this rank's samples in the data set

    def describe(self) -> str:
        """Return loss, gradient norm and samples in one human-readable line."""
        shown = shortened(self.samples, _MAX_SAMPLES) or "none"
        norm = "" if self.norm is None else f" and gradient norm {self.norm:g}"
        return (
            f"loss {self.loss:g}{norm} in step {self.step} (epoch {self.epoch}, learning rate "
            f"{self.lr:g}), samples {shown}"
        )

    def record(self, rank: int) -> dict[str, Any]:
        """Return an entry for ``metrics.jsonl``.

        Loss and norm are text, because JSON has no NaN.
        """
        norm = {} if self.norm is None else {"gradient_norm": str(self.norm)}
        figures = {"loss": str(self.loss), **norm}
        place = {"step": self.step, "epoch": self.epoch, "lr": self.lr}
        return {"rank": rank, **place, **figures, "samples": self.samples}


class StepFindings:
    """Stores the finding of this rank until ``report`` collects the findings of all ranks.

    Args:
        task: task of the run.
        metrics: receives the findings of all ranks, on rank 0.
    """

    def __init__(self, task: Task, metrics: Metrics) -> None:
        self._task, self._metrics = task, metrics
        self.own: NotFiniteFinding | None = None
        self._of_last: Callable[[], NotFiniteFinding] | None = None
        self.is_reported = False  # whether an error message contains the findings

    def step_taken(self, finding: Callable[[], NotFiniteFinding]) -> None:
        """Store a description of the step just taken, a possible cause of a later NaN. Local."""
        self._of_last = finding

    def note_last(self) -> None:
        """Store the description of the last taken step as the finding of this rank. Local."""
        assert self._of_last is not None
        self.own = self._of_last()

    def note(self, finding: Callable[[], NotFiniteFinding], *, may_be_older: bool) -> None:
        """Store a finding, unless this rank already has one. Local.

        Args:
            finding: describes the current step.
            may_be_older: whether to describe the last taken step instead, if that step has left
                weights that are not finite.
        """
        if self.own is None:
            self.own = (may_be_older and self._older()) or finding()

    def report(
        self, step: int, event: str = "not_finite", **about: Any
    ) -> dict[int, NotFiniteFinding]:
        """Write a record with the findings of all ranks; return findings to print. Collective.

        Args:
            step: entry ``step`` of the record.
            event: entry ``event`` of the record.
            about: further entries of the record.

        Returns:
            By rank: the findings with a loss that is not finite, or all findings if every loss is
            finite.
        """
        findings = self._task.comm.allgather_object(self.own)
        records = [f.record(rank) for rank, f in enumerate(findings) if f is not None]
        if records:
            self._metrics.write(event, step=step, **about, ranks=records)
        own = [f is not None and not math.isfinite(f.loss) for f in findings]
        return {
            rank: f
            for rank, f in enumerate(findings)
            if f is not None and (own[rank] or not any(own))
        }

    def lines(self, step: int) -> list[str]:
        """Return lines about the findings of all ranks. Collective.

        Return no lines if an earlier error message contains the findings.
        """
        if self.is_reported:
            return []
        self.own = self.own or self._older()
        return _lines_of(self.report(step))

    def _older(self) -> NotFiniteFinding | None:
        """Describe the last step that was taken if weights are not finite after it. Local."""
        return self._of_last() if self._of_last and unfinite_weights(self._task) else None


def message_of(shown: Mapping[int, NotFiniteFinding]) -> str:
    """Return the message of the error that stops a run after a step that is not finite."""
    step = min(finding.step for finding in shown.values())
    was_taken = all(finding.norm is None for finding in shown.values())
    rule = "loss and gradients must be finite,"
    cause = (
        f"{rule} but the weights after step {step} are not finite: the step was too large, or "
        f"one of its gradients was not finite"
        if was_taken
        else f"{rule} but they are not on {format_ranks(shown)} in step {step}, which was "
        f"not taken"
    )
    remedies = (
        "check these samples; metrics.jsonl has all of them",
        "use a smaller optimizer.lr, or train.clip_norm (both with --changed), or",
        'train.on_non_finite = "skip", which skips such steps',
    )
    return "\n".join((cause, *_lines_of(shown), *remedies))


def _lines_of(shown: Mapping[int, NotFiniteFinding]) -> list[str]:
    """Return one line per finding, at most ``_MAX_RANKS``."""
    lines = [f"  rank {rank}: {finding.describe()}" for rank, finding in shown.items()]
    if more := lines[_MAX_RANKS:]:
        lines[_MAX_RANKS:] = [f"  and {len(more)} more ranks"]
    return lines
