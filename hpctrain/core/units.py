"""Parsing and formatting of human-readable numbers with units."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from hpctrain.core.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:s|min|h|d)\s*)+", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Convert a text such as ``"25 MiB"``, in upper or lower case, to a number of bytes.

    Raises:
        ConfigError: the text is not a number followed by one of B, kB, MB, GB, KiB, MiB, GiB.
    """
    num_bytes = parse_bytes(text)
    if not text.strip()[-1].isalpha():
        raise ConfigError(
            f'a size must be a number and a unit such as "25 MiB" or "1 GB", got {text!r}; write '
            f'"{text.strip()} B" for bytes'
        )
    return num_bytes


def parse_bytes(text: str) -> int:
    """Convert a text such as ``"25 MiB"`` to a number of bytes; the unit may be omitted."""
    match = _BYTES.fullmatch(text.strip())
    if not match or match[2].lower() not in _FACTORS:
        raise ConfigError(
            f'a size must be a number and a unit such as "25 MiB" or "1 GB", got {text!r}'
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_seconds(text: str) -> float:
    """Convert a text such as ``"10min"``, ``"11h50min"`` or ``"90 s"`` to seconds.

    Raises ``ConfigError``: the text is not one or more numbers, each with one of s, min, h, d.
    """
    if not _DURATION.fullmatch(text.strip()):
        raise ConfigError(
            f'a duration must be a number and a unit such as "10min", "11h50min" or "90 s", '
            f"got {text!r}"
        )
    return sum(float(n) * _SECONDS[unit.lower()] for n, unit in _DURATION_PART.findall(text))


def parse_number(text: str) -> float:
    """Convert a text such as ``"25.6M"`` or ``"1e9"`` to a number.

    Raises ``ConfigError``: the text is not a number.
    """
    digits = text.rstrip("kMGBT")
    factors = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    try:
        return float(digits) * factors[text.removeprefix(digits)]
    except (ValueError, KeyError):
        raise ConfigError(f"a number must be like 1000, 25.6M or 1e9, got {text!r}") from None


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text with a binary unit: ``25.0 MiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text with a suitable unit: ``3.2 us``, ``3 min 05 s``, ``2.5 h``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


MAX_RUNS, MAX_MESSAGES = 8, 8
"""Limits of a text: how many ranges of ranks, and how many different messages, it contains."""


def format_numbers(numbers: Iterable[int], max_runs: int | None = None) -> str:
    """Return a set of cores or ranks as text in the format of the kernel: ``0-3,8``.

    The text has at most ``max_runs`` ranges of consecutive numbers: ``0,2,4 and 97 more``.
    """
    groups = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    hidden = [] if max_runs is None else runs[max_runs:]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and {sum(map(len, hidden))} more" if hidden else ""
    return ",".join(texts[:max_runs]) + more


def parse_numbers(text: str) -> list[int]:
    """Return the integers in a text in the format of the kernel, such as ``0-3,8``.

    Any other characters separate the ranges. The result is empty for a text without digits.
    """
    ends = ((int(first), int(last or first)) for first, last in _RANGE.findall(text))
    return [number for first, last in ends for number in range(first, last + 1)]


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks as text: ``rank 3``, ``ranks 0-3,8``, ``ranks 0,2,4 and 97 more``."""
    numbers = list(ranks)
    return f"rank{'s' * (len(numbers) != 1)} {format_numbers(numbers, MAX_RUNS)}"


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as the text of a list, in the given order, cut after 200 characters."""
    return f"{list(ranks)!s:.200}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 core`` or ``2 cores``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shortened(items: Iterable[object], most: int) -> str:
    """Return the first ``most`` items, and the number of omitted items: ``a, b and 3 more``."""
    texts = [*map(str, items)]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


def by_rank(messages: Sequence[str | None]) -> str:
    """Return one text with each distinct message and the ranks that have the message.

    ``messages[rank]`` is the message of ``rank``, or None.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    texts = [f"{format_ranks(ranks)}: {message}" for message, ranks in ranks_of.items()]
    if rest := list(chain.from_iterable([*ranks_of.values()][MAX_MESSAGES:])):
        texts[MAX_MESSAGES:] = [
            f"{format_ranks(rest)}: {len(texts) - MAX_MESSAGES} other messages"
        ]
    return "; ".join(texts)
