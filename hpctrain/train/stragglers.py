"""Ranks that all others wait for: which ones, on which hosts, and whether that lasts."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

RECENT, PERSISTENT = 10, 5  # records that are remembered, and of how many a rank is slow for good
SLOW, LEAST_S = 1.2, 0.005  # times the median rank's work, and seconds more than that, of a step


class Stragglers:
    """Tells ranks that are slow for good from those that are slow for once, record by record.

    A rank is slow in a record if it computes and waits for its input for 1.2 times as long as the
    median rank, and for 5 ms of a step longer: what it waits for other ranks does not count.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        """Begin with no record; ``hosts`` are those of the ranks."""
        self._hosts = hosts
        self._records: deque[set[int]] = deque(maxlen=RECENT)
        self._told: set[int] = set()

    def see(self, times: Mapping[str, Sequence[float]]) -> list[str]:
        """Take the mean times of a record, lists by rank; return what is new, for people."""
        work = [sum(both) for both in zip(times["compute_s"], times["input_s"], strict=True)]
        median = statistics.median_low(work)
        least = max(SLOW * median, median + LEAST_S)
        self._records.append({rank for rank, seconds in enumerate(work) if seconds >= least})
        lines = []
        for rank, count in enumerate(self.counts(len(work))):
            who = f"rank {rank}" + (f" on {host}" if (host := self._hosts.get(rank)) else "")
            if count >= PERSISTENT and rank not in self._told:
                self._told.add(rank)
                lines.append(
                    f"{who} is slow in {count} of the last {len(self._records)} records, and all "
                    f"others wait for it: of a step it computes {times['compute_s'][rank]:.3g} s "
                    f"and waits {times['input_s'][rank]:.3g} s for its input, together the median "
                    f"rank takes {median:.3g} s; look at its host: clock, cores, other jobs"
                )
            elif not count and rank in self._told:
                self._told.discard(rank)
                lines.append(f"{who} is as fast as the others again")
        return lines

    def counts(self, num_ranks: int) -> list[int]:
        """Return, for each rank, in how many of the last records it was slow."""
        return [sum(rank in slow for slow in self._records) for rank in range(num_ranks)]


def verdict(count: int) -> str:
    """Say in a word what such a count means; nothing for none."""
    return "persistent" if count >= PERSISTENT else "passing" if count else ""
