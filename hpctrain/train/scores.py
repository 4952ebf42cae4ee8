"""Metrics of a test, computed from sums over batches; sums are exact on any number of ranks."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.target import check_arguments, resolve
from hpctrain.core.user_error import described

LOSS = "loss"
_SCORE_BINS = 1 << 16  # bins of the score histogram; scores in the same bin count as equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Metric of a test: the mean of one value per sample, or a function of summed counts."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor] | None = None
    """Maps (output, label) to one value per sample; None for the loss and metrics of counts."""
    counts: Callable[[Tensor, Tensor], Tensor] | None = None
    """Maps (output, label) to float64 counts of one batch, ``(k, classes)`` or ``(2, bins)``."""
    score: Callable[[Tensor], float] | None = None  # maps the summed counts to the metric

    def sum_of(self, output: Tensor, label: Tensor) -> float:
        """Return the sum of the values over the samples of a batch.

        Raises:
            DataError: ``values`` does not return one value per sample.
        """
        assert self.values is not None
        values: Any = self.values(output, label)
        if not isinstance(values, Tensor) or values.shape[:1] != label.shape[:1]:
            raise DataError(
                f"test.metric: {self.name} must return one value for each of {len(label)} "
                f"samples, got {described(values)}; do not average them"
            )
        values = values.double()
        return float((values.flatten(1).mean(1) if values.dim() > 1 else values).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Results of a test over all test samples."""

    loss: float
    metric: float  # value of the first metric, which may be the loss
    num_samples: int
    metrics: dict[str, float] = field(default_factory=dict)  # all metrics, by name

    def lines(self, first: str) -> Iterator[str]:
        """Yield one line with the other metrics, then a line with the metric ``first``."""
        others = [f"{name} {value:.4f}" for name, value in self.metrics.items() if name != first]
        if others:
            yield f"test {', '.join(others)}"
        yield f"test {first} {self.metric:.4f}"


def make_metric(name: str) -> Metric:
    """Return the metric ``name``.

    Raises:
        ConfigError: there is no such metric.
    """
    if name == LOSS:
        return Metric(name=name)
    if name == "accuracy":
        return Metric(name=name, values=lambda output, label: output.argmax(dim=1) == label)
    if name == "f1":
        return Metric(name=name, counts=_hits, score=_macro_f1)
    if name == "auc":
        return Metric(name=name, counts=_by_score, score=_area)
    if found := re.fullmatch(r"top([1-9]\d*)", name):
        return Metric(name=name, values=_top(int(found[1])))
    if ":" in name:
        function: Callable[[Tensor, Tensor], Tensor] = resolve(name, "test.metric")
        check_arguments(function, 2, {}, "test.metric")
        return Metric(name=name.rpartition(":")[2], values=function)
    raise ConfigError(
        f'test.metric must be accuracy, loss, f1, auc, top5 (any number) or "module:function", '
        f'got "{name}"'
    )


def _top(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def is_among(output: Tensor, label: Tensor) -> Tensor:
        best = output.topk(min(k, output.shape[1]), dim=1).indices
        return (best == label.unsqueeze(1)).any(dim=1)

    return is_among


def _hits(output: Tensor, label: Tensor) -> Tensor:
    """Return the numbers of correct predictions, predictions and labels per class.

    The shape is ``(3, classes)``.
    """
    num_classes = output.shape[1]
    answer, label = output.argmax(dim=1).flatten().cpu(), label.flatten().long().cpu()
    rows = (answer[answer == label], answer, label)
    return torch.stack([row.bincount(minlength=num_classes).double() for row in rows])


def _macro_f1(counts: Tensor) -> float:
    """Return the mean F1 score over the classes that occur as prediction or label."""
    hits, answers, labels = counts
    occurs = (answers + labels) > 0
    return float((2 * hits[occurs] / (answers + labels)[occurs]).mean())


def _by_score(output: Tensor, label: Tensor) -> Tensor:
    """Return two score histograms, ``(2, bins)``: of the samples with label 0, and label 1."""
    if output.numel() != label.numel() or not bool(((label == 0) | (label == 1)).all()):
        raise DataError(
            f"test.metric = auc must have one logit for each label, which is 0 or 1, got "
            f"{described(output)} and {described(label)}"
        )
    scores = output.flatten().double().sigmoid().cpu()
    bins = (scores * _SCORE_BINS).long().clamp_(0, _SCORE_BINS - 1)
    is_one = label.flatten().cpu() == 1
    rows = [bins[which].bincount(minlength=_SCORE_BINS).double() for which in (~is_one, is_one)]
    return torch.stack(rows)


def _area(counts: Tensor) -> float:
    """Return the area under the ROC curve, from the histograms of ``_by_score``."""
    zeros, ones = counts
    below = zeros.cumsum(0) - zeros / 2  # a pair of equal scores counts one half
    pairs = zeros.sum() * ones.sum()
    return float((below * ones).sum() / pairs) if pairs else math.nan
