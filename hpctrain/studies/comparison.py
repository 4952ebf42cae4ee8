"""Two studies compared: the time of a step at each point that both have measured."""

import math
from html import escape

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.studies.figures import Figure, Series
from hpctrain.studies.page import Cell, estimate_cell, figures_html, page, table
from hpctrain.studies.report import text_table
from hpctrain.studies.results import StudyResults, shown
from hpctrain.studies.statistics import Comparison, compare, step_time_s

_DRAWS = 20_000
_HEADS = ("point", "second by first", "pairs", "verdict")


class StudyComparison:
    """The second of two studies by the first.

    A point is called slower or faster where the interval of its ratio leaves out 1 and an exact
    rank test says so too. The interval alone would not keep to alpha: noise alone makes all of
    five pairs agree at every sixteenth point. Source of the test: Wilcoxon 1945, "Individual
    comparisons by ranking methods", of unpaired samples.
    """

    def __init__(self, first: StudyResults, second: StudyResults, alpha: float) -> None:
        """Compare them; see ``statistics.compare``.

        Raises ``DataError``: no point is in both.
        """
        self._studies = first, second
        points = compare(first.done, second.done, alpha=alpha, seed=first.facts.seed)
        order = [summary.point for summary in first.summaries]
        points.sort(key=lambda each: order.index(each.point))
        self.verdicts = [(each, self._verdict(each)) for each in points]
        """Each point, and ``slower``, ``faster``, or why neither."""
        self.headline = (
            f"{shown(second.facts.name)} by {shown(first.facts.name)}: time of a step, "
            f"{len(points)} points, alpha {alpha:g} over all of them together"
        )
        records, shared = first.records + second.records, [each.point for each in points]
        alone = [first.label(each.point) for each in records if each.point not in shared]
        self.method = (
            f"Ratios of medians, with intervals of a bootstrap that draws repeats of the same "
            f"number as pairs; alpha {points[0].alpha:.2g} at each point (Bonferroni). A point "
            f"differs if its interval leaves out 1 and an exact rank test agrees. Left out, as "
            f"not in both: {'; '.join(dict.fromkeys(alone)) or 'nothing'}."
        )

    @property
    def slower(self) -> list[Comparison]:
        """Points at which the second study is slower beyond noise."""
        return [each for each, verdict in self.verdicts if verdict == "slower"]

    def summary(self) -> RenderableType:
        """Return the comparison for a terminal."""
        return Group(Text(self.headline), text_table(_HEADS, self._rows()), Text(self.method))

    def page(self) -> str:
        """Return it as a page. Raises ``ConfigError``: plotly is not installed."""
        ratios = [(self._label(each), each.ratio) for each, _ in self.verdicts]
        figure = Figure(
            name="ratio",
            title="Time of a step, second study by first",
            y_label="ratio",
            note="Above 1 the second study is slower.",
            scale="zoom",
            series=[
                Series.of_estimates(ratios, name="", kind="points", colour=0),
                Series.of([(name, 1) for name, _ in ratios], name="", kind="dashed", colour=7),
            ],
        )
        parts = [
            f"<p>{escape(self.headline)}</p>",
            figures_html([figure]),
            table("points", _HEADS, self._rows()),
            f'<p class="soft">{escape(self.method)}</p>',
        ]
        return page("Two studies compared", parts, [figure])

    def _rows(self) -> list[list[Cell]]:
        return [
            [
                self._label(each),
                estimate_cell(each.ratio, "{:.3f}".format),
                (str(each.ratio.num_samples), each.ratio.num_samples),
                verdict,
            ]
            for each, verdict in self.verdicts
        ]

    def _label(self, found: Comparison) -> str:
        return self._studies[0].label(found.point)

    def _verdict(self, found: Comparison) -> str:
        first, second = ([*map(step_time_s, s.repeats(found.point))] for s in self._studies)
        if (needed := _repeats_for(found.alpha)) > min(len(first), len(second)):
            return f"too few repeats to tell, {needed} are needed"
        if not found.is_different or rank_test(first, second) > found.alpha:
            return "no difference beyond noise"
        return "slower" if found.ratio.value > 1 else "faster"


def rank_test(first: list[float], second: list[float]) -> float:
    """Return how often as great a difference of ranks comes by chance, in both directions."""
    both = np.array([*first, *second])
    ranks = (both[:, None] > both).sum(1) + (both[:, None] == both).sum(1) / 2
    generator = np.random.default_rng(0)
    drawn = generator.permuted(np.tile(ranks, (_DRAWS, 1)), axis=1)[:, : len(first)].mean(1)
    mean = ranks.mean()
    is_as_great = abs(drawn - mean) >= abs(ranks[: len(first)].mean() - mean) - 1e-9
    return float((1 + is_as_great.sum()) / (1 + _DRAWS))


def _repeats_for(alpha: float) -> int:
    """Return with how many repeats of each study ranks can tell a difference."""
    return next(n for n in range(1, 100) if 2 / math.comb(2 * n, n) < alpha)
