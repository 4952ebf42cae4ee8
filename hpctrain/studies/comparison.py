"""Two studies compared: the time of a step at each point that both have measured."""

import math
from html import escape
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.core.errors import DataError
from hpctrain.studies.figures import Figure, Series
from hpctrain.studies.page import (
    Cell,
    figures_html,
    page,
    table,
    text_table,
    value_cell,
    write_page,
)
from hpctrain.studies.results import StudyResults, shown
from hpctrain.studies.statistics import Estimate, key_of, ratio, step_time_s

_HEADS = ("point", "second by first", "repeats", "verdict")
_WHERE = ("cpu", "cores", "host", "versions", "commit")


class StudyComparison:
    """The second of two studies by the first.

    At each point an exact rank-sum test tells slower or faster from noise, and its interval leaves
    out 1 then. All points together call studies different that are not with a probability of at
    most ``alpha``: each has its share of it (Bonferroni).
    """

    def __init__(self, first: StudyResults, second: StudyResults, alpha: float) -> None:
        """Compare them. Raises ``DataError``: no point is in both."""
        points = {
            key_of(each.point): each.point for study in (first, second) for each in study.summaries
        }
        shared = [p for p in points.values() if first.repeats(p) and second.repeats(p)]
        if not shared:
            raise DataError(
                "two studies are compared at the points that both have measured, and these share "
                "none"
            )
        self.alpha = alpha / len(shared)
        """Of each point."""
        self.points: list[tuple[str, Estimate]] = []
        """Each point by its label, and the ratio there."""
        for point in shared:
            before, after = ([*map(step_time_s, s.repeats(point))] for s in (first, second))
            self.points.append((first.label(point), ratio(before, after, 1 - self.alpha)))
        self.headline = (
            f"{shown(second.config.study.name)} by {shown(first.config.study.name)}: time of a "
            f"step, {len(shared)} points, alpha {alpha:g} over all of them together"
        )
        alone = [first.label(point) for point in points.values() if point not in shared]
        here, there = first.environment or {}, second.environment or {}
        other = [name for name in _WHERE if here.get(name) != there.get(name)]
        self.method = (
            f"Ratios of medians, with intervals by an exact rank-sum test of alpha "
            f"{self.alpha:.2g} at each point (Bonferroni), which assumes no distribution. "
            f"Whatever changed in between counts, load of the machine too: make variants a factor "
            f"of one study, and they are measured in turn. Of where they ran differ: "
            f"{', '.join(other) or 'nothing'}. Left out, as not in both: "
            f"{'; '.join(alone) or 'nothing'}."
        )

    def verdict(self, found: Estimate) -> str:
        """Return ``slower``, ``faster``, or why neither."""
        if found.low is None or found.high is None or found.confidence < 1 - self.alpha - 1e-12:
            enough = (n for n in range(2, 100) if 2 / math.comb(2 * n, n) <= self.alpha)
            return f"too few repeats to tell, {next(enough)} are needed"
        if found.low <= 1 <= found.high:
            return "no difference beyond noise"
        return "slower" if found.value > 1 else "faster"

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each point."""
        return [self.verdict(found) for _, found in self.points]

    def summary(self) -> RenderableType:
        """Return the comparison for a terminal."""
        return Group(Text(self.headline), text_table(_HEADS, self._rows()), Text(self.method))

    def write(self, path: Path) -> Path:
        """Write it as a page. Raises ``ConfigError``: plotly is missing, or the file system."""
        ones = [(label, 1.0) for label, _ in self.points]
        figure = Figure(
            name="ratio",
            title="Time of a step, second study by first",
            y_label="ratio",
            note="Above 1 the second study is slower.",
            scale="zoom",
            series=[
                Series.of(self.points, name="", kind="points", colour=0),
                Series.of(ones, name="", kind="dashed", colour=7),
            ],
        )
        parts = [
            f"<p>{escape(self.headline)}</p>",
            figures_html([figure]),
            table("points", _HEADS, self._rows()),
            f'<p class="soft">{escape(self.method)}</p>',
        ]
        return write_page(path, page("Two studies compared", parts, [figure]))

    def _rows(self) -> list[list[Cell]]:
        return [
            [
                label,
                value_cell(found, "{:.3f}".format),
                (str(found.num_samples), found.num_samples),
                self.verdict(found),
            ]
            for label, found in self.points
        ]
