"""Detection of ranks that are persistently slower than the others."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

RECENT, PERSISTENT = 10, 5  # a rank is persistently slow if slow in 5 of the last 10 records
SLOW, LEAST_S = 1.2, 0.005  # a rank is slow from 1.2 times the median, and 5 ms above the median


class SlowRanks:
    """Finds persistently slow ranks in the records of steps.

    The work of a rank is its compute time plus its wait for input, without communication. A rank
    is slow in a record if its work per step is at least 1.2 times the median over the ranks and
    at least 5 ms longer than the median.

    Args:
        hosts: host name of each rank.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._records: deque[set[int]] = deque(maxlen=RECENT)
        self._reported: set[int] = set()

    def see(self, times: Mapping[str, Sequence[float]]) -> list[str]:
        """Add a record; return messages about ranks that became slow or normal. Local.

        Args:
            times: lists ``compute_s`` and ``input_s`` with the mean seconds per step of each rank.
        """
        work = [sum(both) for both in zip(times["compute_s"], times["input_s"], strict=True)]
        median = statistics.median_low(work)
        least = max(SLOW * median, median + LEAST_S)
        self._records.append({rank for rank, seconds in enumerate(work) if seconds >= least})
        lines = []
        for rank, count in enumerate(self.counts(len(work))):
            who = f"rank {rank}" + (f" on {host}" if (host := self._hosts.get(rank)) else "")
            if count >= PERSISTENT and rank not in self._reported:
                self._reported.add(rank)
                lines.append(
                    f"{who} is slow in {count} of the last {len(self._records)} records, and all "
                    f"others wait for it: per step it computes {times['compute_s'][rank]:.3g} s "
                    f"and waits {times['input_s'][rank]:.3g} s for its input, the median rank "
                    f"takes {median:.3g} s for both; check its host: clock, cores, other jobs"
                )
            elif not count and rank in self._reported:
                self._reported.discard(rank)
                lines.append(f"{who} is as fast as the others again")
        return lines

    def counts(self, num_ranks: int) -> list[int]:
        """Return for each rank the number of recent records in which it was slow."""
        return [sum(rank in slow for slow in self._records) for rank in range(num_ranks)]


def verdict(count: int) -> str:
    """Return "persistent", "temporary" or "" for a number of slow records."""
    return "persistent" if count >= PERSISTENT else "temporary" if count else ""
