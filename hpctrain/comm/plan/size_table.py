"""Table of algorithms by message size."""

from bisect import bisect_right
from dataclasses import dataclass, field

from hpctrain.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Algorithms by size: each holds from its number of bytes on, up to the next one."""

    steps: tuple[tuple[int, str], ...]
    """Smallest size in bytes and name of the algorithm, by size; the first size is 0."""

    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the order.

        Raises:
            ConfigError: the sizes do not begin at 0, or do not grow.
        """
        sizes = [num_bytes for num_bytes, _ in self.steps]
        if not sizes or sizes[0] != 0 or sizes != sorted(set(sizes)):
            raise ConfigError(f"sizes of a plan begin at 0 and grow, got {sizes}")
        object.__setattr__(self, "_sizes", tuple(sizes))

    def at(self, num_bytes: int) -> str:
        """Return the algorithm for a message of ``num_bytes``."""
        return self.steps[bisect_right(self._sizes, num_bytes) - 1][1]
