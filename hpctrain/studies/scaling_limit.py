"""Largest size of a curve that keeps a required efficiency, and whether the intervals prove it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hpctrain.report.figure import Estimate
from hpctrain.studies.statistics import ratio
from hpctrain.studies.study_results import PointSummary


@dataclass(frozen=True)
class ScalingLimit:
    """Largest measured size that keeps the required efficiency, and a sentence about it."""

    largest: PointSummary | None
    text: str

    @classmethod
    def of(
        cls,
        points: Sequence[PointSummary],
        compare: Literal["base", "doubling"],
        required: float,
    ) -> "ScalingLimit":
        """Return the largest point before the first point with an efficiency below ``required``.

        Args:
            points: points of a curve, by increasing number of ranks.
            compare: ``base`` uses efficiencies relative to the base of the curve. ``doubling``
                uses efficiencies relative to the next smaller point, per doubling of the ranks.
            required: required efficiency, 0 to 1.
        """
        known = [each for each in points if each.efficiency is not None]
        if len(known) < 2:
            return cls(None, "fewer than two sizes have an efficiency, so no size can be stated.")
        pairs = [
            (each, each.efficiency if compare == "base" else per_doubling(before, each))
            for before, each in pairwise(known)
        ]
        kept: list[tuple[PointSummary, Estimate | None]] = []
        for each, found in pairs:
            if found is None or found.value < required:
                break
            kept.append((each, found))
        missed = pairs[len(kept)] if len(kept) < len(pairs) else None
        largest, found = kept[-1] if kept else (known[0], None)
        text = f"the largest measured size that keeps {required:.0%} is {largest.size}"
        if found is None:
            text = f"no measured size above {largest.size} keeps {required:.0%}"
        else:
            text += f", with {_shown(found)}"
            if found.low is None or found.falls_short:
                text += "; its repeats are too few for a confidence of 95 %"
            elif found.low < required:
                text += (
                    "; its interval also contains lower values, so the result needs more repeats"
                )
        if missed is not None:
            assert missed[1] is not None
            text += f". The next size, {missed[0].size}, has {_shown(missed[1])}"
            if missed[1].high is not None and missed[1].high >= required:
                text += (
                    "; its interval also contains higher values, so the result needs more repeats"
                )
        else:
            text += ". No larger size with a core for each rank was measured"
        return cls(largest, f"{text}.")


def per_doubling(before: PointSummary, summary: PointSummary) -> Estimate | None:
    """Return the efficiency of a point relative to a smaller one, per doubling of the ranks."""
    if summary.efficiency is None or before.efficiency is None or summary.ranks == before.ranks:
        return None
    growth = summary.growth / before.growth
    found = ratio(summary.times_s, [each / growth for each in before.times_s])
    power = 1 / math.log2(summary.ranks / before.ranks)
    low, high = (None if end is None else end**power for end in (found.low, found.high))
    return replace(found, value=found.value**power, low=low, high=high)


def _shown(found: Estimate) -> str:
    interval = "" if found.low is None else f" [{found.low:.0%}, {found.high:.0%}]"
    return f"{found.value:.0%}{interval}"
