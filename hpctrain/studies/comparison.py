"""Two studies compared: the time of a step at each point that both have measured."""

from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.studies.figures import Figure, Series
from hpctrain.studies.page import Cell, estimate_cell, figures_html, page, table
from hpctrain.studies.report import text_table
from hpctrain.studies.results import StudyResults, shown
from hpctrain.studies.statistics import Comparison, compare

_HEADS = ("point", "second by first", "pairs", "verdict")


class StudyComparison:
    """The second of two studies by the first."""

    def __init__(self, first: StudyResults, second: StudyResults, alpha: float) -> None:
        """Compare them; see ``statistics.compare``.

        Raises ``DataError``: no point is in both.
        """
        self.points = compare(first.done, second.done, alpha=alpha, seed=first.facts.seed)
        self.headline = (
            f"{shown(second.facts.name)} by {shown(first.facts.name)}: time of a step, "
            f"{len(self.points)} points, alpha {alpha:g} over all of them together"
        )
        shared = [each.point for each in self.points]
        records = first.records + second.records
        alone = [first.label(each.point) for each in records if each.point not in shared]
        self.method = (
            f"Ratios of medians, with intervals of a bootstrap that draws repeats of the same "
            f"number as pairs; alpha {self.points[0].alpha:.2g} at each point (Bonferroni). "
            f"A point differs if its interval leaves out 1. Left out, as not in both: "
            f"{'; '.join(dict.fromkeys(alone)) or 'nothing'}."
        )
        self._ratios = [(first.label(each.point), each.ratio) for each in self.points]

    @property
    def slower(self) -> list[Comparison]:
        """Points at which the second study is slower beyond noise."""
        return [each for each in self.points if each.is_different and each.ratio.value > 1]

    def summary(self) -> RenderableType:
        """Return the comparison for a terminal."""
        return Group(Text(self.headline), text_table(_HEADS, self._rows()), Text(self.method))

    def page(self) -> str:
        """Return it as a page. Raises ``ConfigError``: plotly is not installed."""
        one = [(name, 1.0) for name, _ in self._ratios]
        figure = Figure(
            name="ratio",
            title="Time of a step, second study by first",
            x_label="",
            y_label="ratio",
            note="Above 1 the second study is slower.",
            series=[
                Series.of_estimates(self._ratios, name="", kind="points", colour=0),
                Series.of(one, name="alike", kind="dashed", colour=6),
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
                name,
                estimate_cell(ratio, "{:.3f}".format),
                (str(ratio.num_samples), ratio.num_samples),
                _verdict(each),
            ]
            for each, (name, ratio) in zip(self.points, self._ratios, strict=True)
        ]


def _verdict(found: Comparison) -> str:
    if not found.is_different:
        return "no difference beyond noise"
    return "slower" if found.ratio.value > 1 else "faster"
