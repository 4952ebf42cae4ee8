"""Ranges of the samples of a data set."""

from collections.abc import Iterable

Range = tuple[int, int]
"""Samples ``[start, stop)`` of a data set."""


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the union of ranges, in ascending order, as ranges that do not touch."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)
