"""Select the tests of a launch: by number of ranks, and optionally a part of each sweep."""

import functools
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

_NAMES_RANKS = re.compile(r"\branks\(|^@[A-Z_]+$", re.MULTILINE)
"""Matches a file with tests on several ranks: the mark ``ranks``, or an imported mark."""


@functools.cache
def names_ranks(file: Path) -> bool:
    """Return True if a file may have tests on several ranks; other files are not imported."""
    return bool(_NAMES_RANKS.search(file.read_text()))


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the world sizes on which a test runs."""
    mark = item.get_closest_marker("ranks")
    return mark.args if mark else (1,)


def selected(
    items: list[pytest.Item], size: int, *, long_ones: bool, spread: bool
) -> list[pytest.Item]:
    """Return the tests for ``size`` ranks; with ``spread`` only a part of each sweep."""
    due = [item for item in items if long_ones or not item.get_closest_marker("conformance")]
    left_out = _of_other_sizes(due, size) if spread else set()
    return [item for item in due if size in sizes_of(item) and item.nodeid not in left_out]


def _of_other_sizes(items: list[pytest.Item], size: int) -> set[str]:
    """Divide the cases of each sweep among its sizes; return the cases of other sizes.

    Cases are sorted by checksum, because their own order could put all cases of a dtype on one
    size. Each size gets at least one case, unless there are fewer cases than sizes.
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
