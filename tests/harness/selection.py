"""Select the tests of a launch by number of ranks, optionally only some of their cases."""

import functools
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_NAMES_RANKS = re.compile(r"\branks\(|^@[A-Z_]+$", re.MULTILINE)
"""Matches a file with tests on several ranks: the mark ``ranks``, or an imported mark."""


@functools.cache
def names_ranks(file: Path) -> bool:
    """Return True if a file may contain tests on several ranks; other files are not imported."""
    return bool(_NAMES_RANKS.search(file.read_text()))


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the world sizes on which a test runs."""
    mark = item.get_closest_marker("ranks")
    return mark.args if mark else (1,)


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark the cases of each parametrized test with at least as many cases as world sizes.

    The mark is ``sweep``, by which ``make conformance`` selects the cases. Cases that ``make
    test`` leaves out do not count, so that each world size keeps a case.
    """
    due = (item for item in items if not item.get_closest_marker("conformance"))
    for sizes, cases in _cases(due):
        if 1 < len(sizes) <= len(cases):
            for item in cases:
                item.add_marker("sweep")


def selected(
    items: list[pytest.Item], size: int, *, long_ones: bool, spread: bool
) -> list[pytest.Item]:
    """Return the tests for ``size`` ranks; with ``spread``, only some cases of each sweep."""
    due = [item for item in items if long_ones or not item.get_closest_marker("conformance")]
    left_out = _of_other_sizes(due, size) if spread else set()
    return [item for item in due if size in sizes_of(item) and item.nodeid not in left_out]


def _of_other_sizes(items: list[pytest.Item], size: int) -> set[str]:
    """Divide the cases of each sweep among its sizes; return the cases of other sizes.

    Cases are sorted by checksum, because the original order could put all cases of a dtype on one
    world size. Each size gets at least one case.
    """
    left_out = set()
    for sizes, cases in _cases(item for item in items if item.get_closest_marker("sweep")):
        names = sorted((item.nodeid for item in cases), key=lambda name: zlib.crc32(name.encode()))
        left_out |= {name for i, name in enumerate(names) if sizes[i % len(sizes)] != size}
    return left_out


def _cases(items: Iterable[pytest.Item]) -> Iterator[tuple[tuple[int, ...], list[pytest.Item]]]:
    """Yield the world sizes and the cases of each parametrized test."""
    tests: dict[tuple[str, tuple[int, ...]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        name, bracket, _ = item.nodeid.partition("[")
        if bracket:
            tests[name, sizes_of(item)].append(item)
    return ((sizes, cases) for (_, sizes), cases in tests.items())
