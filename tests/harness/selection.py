"""Which tests a launch runs: those that name its number of ranks, and of a sweep its share."""

import functools
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

_NAMES_RANKS = re.compile(r"\branks\(|^@[A-Z_]+$", re.MULTILINE)
"""How a file shows that it has tests of several ranks: the mark, or a mark from elsewhere."""


@functools.cache
def names_ranks(file: Path) -> bool:
    """Say whether a file may have tests of several ranks: one without is not even imported."""
    return bool(_NAMES_RANKS.search(file.read_text()))


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the world sizes on which a test runs."""
    mark = item.get_closest_marker("ranks")
    return mark.args if mark else (1,)


def selected(
    items: list[pytest.Item], size: int, *, long_ones: bool, spread: bool
) -> list[pytest.Item]:
    """Return the tests of a world of ``size`` ranks; with ``spread`` a share of each sweep."""
    due = [item for item in items if long_ones or not item.get_closest_marker("conformance")]
    left_out = _of_other_sizes(due, size) if spread else set()
    return [item for item in due if size in sizes_of(item) and item.nodeid not in left_out]


def _of_other_sizes(items: list[pytest.Item], size: int) -> set[str]:
    """Divide the cases of each sweep among its sizes; return the ones that are not of ``size``.

    In the order of a checksum: by their own order all cases of a dtype, say, could meet at one
    size. Whatever the number of cases, each size has some, unless it has more sizes than cases.
    """
    sweeps: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0], sizes_of(item)].append(item.nodeid)
    left_out = set()
    for (_, sizes), cases in sweeps.items():
        cases.sort(key=lambda nodeid: zlib.crc32(nodeid.encode()))
        left_out |= {case for i, case in enumerate(cases) if sizes[i % len(sizes)] != size}
    return left_out
