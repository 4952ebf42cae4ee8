"""Times of the algorithms that a plan chooses from."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.comm.plan.size_table import SizeTable
from hpctrain.core.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long one algorithm took for one size, on the slowest rank."""

    what: str
    """``tensors``: ordinary tensors over all ranks; ``rail``: parts over a rail."""
    num_bytes: int
    """Size of the message."""
    algorithm: str
    """A name of the plan's table for ``what``."""
    runs: tuple[float, ...]
    """Seconds of each run."""

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)


def rows(measured: Sequence[Measurement], table: SizeTable) -> list[tuple[str, ...]]:
    """Return a table for people: sizes down, algorithms across, the first row names them.

    Args:
        measured: of one kind.
        table: what the plan chose; its algorithm for a size is marked by ``*``.

    Returns:
        No row at all where nothing was measured.
    """
    if not measured:
        return []
    found = {(m.num_bytes, m.algorithm): m.seconds for m in measured}
    algorithms = list(dict.fromkeys(m.algorithm for m in measured))

    def cell(size: int, algorithm: str) -> str:
        if (size, algorithm) not in found:
            return ""
        mark = " *" if table.at(size) == algorithm else ""
        return format_seconds(found[size, algorithm]) + mark

    return [
        ("size", *algorithms),
        *(
            (format_bytes(size), *(cell(size, algorithm) for algorithm in algorithms))
            for size in sorted({m.num_bytes for m in measured})
        ),
    ]
