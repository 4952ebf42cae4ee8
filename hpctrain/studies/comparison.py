"""Comparison of the step times of two studies at each point that both measured."""

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.core.errors import DataError
from hpctrain.report.figure import Estimate, shown
from hpctrain.report.page import Cell, text_table, value_cell
from hpctrain.studies.statistics import ratio, repeats_needed
from hpctrain.studies.study_results import StudyResults, key_of

_HEADS = ("point", "second by first", "repeats", "verdict")
_WHERE = ("cpu", "cores", "host", "versions", "commit")


class StudyComparison:
    """Ratios of the step times of two studies, second study divided by first.

    At each point, an exact rank-sum test decides whether the difference is significant. The
    interval of a significant ratio excludes 1. With the Bonferroni correction, the probability of
    one or more false differences is at most ``alpha``.

    Raises:
        DataError: the studies have no common point.
    """

    def __init__(self, first: StudyResults, second: StudyResults, alpha: float) -> None:
        before, after = (
            {key_of(each.point): each for each in study.own.summaries} for study in (first, second)
        )
        labels = {key: first.label(each.point) for key, each in (before | after).items()}
        shared = [key for key in labels if all(key in s and s[key].done for s in (before, after))]
        if not shared:
            raise DataError(
                "two compared studies must share measured points, but share none; compare "
                "studies with equal factors"
            )
        confidence = 1 - alpha / len(shared)
        pairs = [(before[key].times_s, after[key].times_s) for key in shared]
        self.points = [
            (labels[key], ratio(*pair, confidence))
            for key, pair in zip(shared, pairs, strict=True)
        ]
        """Label and ratio of each point."""
        self.verdicts = [_verdict(found) for _, found in self.points]
        """Result for each point: ``slower``, ``faster``, or the reason why neither is known."""
        self._rows: list[list[Cell]] = [
            [
                label,
                value_cell(found, "{:.3f}".format),
                ", ".join(str(len(s)) for s in pair),
                verdict,
            ]
            for (label, found), pair, verdict in zip(
                self.points, pairs, self.verdicts, strict=True
            )
        ]
        names = [each.config.study.name for each in (second, first)]
        if len(set(names)) == 1:  # the same study, measured twice
            names = [str(each.directory) for each in (second, first)]
        self.headline = (
            f"{' by '.join(map(shown, names))}: time of a step, {len(shared)} points, alpha "
            f"{alpha:g} over all of them together"
        )
        alone = [label for key, label in labels.items() if key not in shared]
        here, there = first.environment or {}, second.environment or {}
        other = [name for name in _WHERE if here.get(name) != there.get(name)]
        short = any(found.falls_short for _, found in self.points)
        self.method = (
            f"Ratios of medians, with intervals by an exact rank-sum test of alpha "
            f"{alpha / len(shared):.2g} at each point (Bonferroni), which assumes no "
            f"distribution. {_SHORT * short}"
            f"The ratios include all changes between the studies, also changes of the machine's "
            f"load. To measure variants interleaved, make them a factor of one study. Differences "
            f"of the environments: {', '.join(other) or 'nothing'}. Omitted points, not in both: "
            f"{'; '.join(alone) or 'nothing'}."
        )

    def summary(self) -> RenderableType:
        """Return the text of the comparison for a terminal."""
        return Group(Text(self.headline), text_table(_HEADS, self._rows), Text(self.method))


_SHORT = (
    "With too few repeats for this confidence, the table shows the confidence of the interval, "
    "or no interval. "
)


def _verdict(found: Estimate) -> str:
    if found.low is None or found.high is None or found.falls_short:
        return f"too few repeats, {repeats_needed(found.wanted)} are needed"
    if found.low <= 1 <= found.high:
        return "no difference beyond noise"
    return "slower" if found.value > 1 else "faster"
