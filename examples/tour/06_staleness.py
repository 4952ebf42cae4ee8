"""Stale gradients: staleness limits the step size; bounded staleness limits the waiting time.

    hpctrain launch -n 2 -- python examples/tour/06_staleness.py

On a parabola of curvature 1 a step of s is stable below 2. If each average of the gradients is
used t steps late, the limit is 2 sin(pi / (4 t + 2)): 1 for one step, 0.18 for eight. Here an
all-reduce is started in each step and its result is used t steps later, while others are in
flight.

With a bound of s (stale synchronous parallel), a worker at clock c continues if all others are at
c - s or later. For eight workers with random times per clock, this hides much of the waiting. If
one worker is always three times as slow, it still determines the speed of all workers.

Source: Ho et al. 2013 (SSP); the limit is that of x' = x - s x(t steps ago), a textbook one.
"""

import math
from collections import deque

import torch
from claim import claim
from torch import Tensor

import hpctrain as hvd

NUM_WORKERS, NUM_CLOCKS = 8, 6000


def distance(delay: int, step: float) -> float:
    """Return the final distance from the minimum if averages are used ``delay`` steps late."""
    mine = 2 * (hvd.rank() + 1) / (hvd.size() + 1)  # curvatures of the ranks: 1 on average
    x = torch.ones(1, dtype=torch.float64)
    under_way: deque[int] = deque()
    for _ in range(400):
        under_way.append(hvd.allreduce_async(mine * x))
        if len(under_way) > delay:
            x = x - step * hvd.synchronize(under_way.popleft())
    for handle in under_way:
        hvd.synchronize(handle)
    return x.abs().item()


def finish_times(durations: Tensor, staleness: int) -> Tensor:
    """Return the end of each clock (column) of each worker (row)."""
    ends, columns = torch.zeros(len(durations), dtype=torch.float64), list[Tensor]()
    for clock, seconds in enumerate(durations.T):
        if clock > staleness:
            ends = ends.clamp(min=columns[clock - staleness - 1].max())
        ends = ends + seconds
        columns.append(ends)
    return torch.stack(columns, dim=1)


def main() -> None:
    """Test the largest step for several delays, and the rate for several bounds."""
    hvd.init()
    for delay in (0, 1, 4):
        limit = 2 * math.sin(math.pi / (4 * delay + 2))
        below, above = distance(delay, 0.9 * limit), distance(delay, 1.1 * limit)
        claim(
            f"averages {delay} steps late: steps of {0.9 * limit:.2f} end {below:.0e} away, "
            f"of {1.1 * limit:.2f} {above:.0e}",
            holds=below < 0.01 and above > 100,
        )

    random = torch.Generator().manual_seed(hvd.rank())  # each rank simulates other workers
    chance = torch.empty(NUM_WORKERS, NUM_CLOCKS, dtype=torch.float64)
    chance.exponential_(generator=random)
    slow = torch.ones_like(chance)
    slow[0] = 3.0
    cases = [("chance", chance, 0, 2.94), ("chance", chance, 1, 4.44), ("chance", chance, 4, 6.15)]
    cases += [("one slow", slow, 0, 8 / 3), ("one slow", slow, 4, 8 / 3)]
    for name, durations, staleness, expected in cases:
        times = finish_times(durations, staleness)
        rate = hvd.allreduce(durations.numel() / times.max()).item()
        done = torch.stack([torch.searchsorted(row, times, right=True) for row in times])
        ahead = (torch.arange(1, NUM_CLOCKS + 1) - done.amin(dim=0)).max().item()
        claim(
            f"{name}, a bound of {staleness}: {rate:.2f} clocks a second, {ahead} ahead at most",
            holds=abs(rate / expected - 1) < 0.03 and ahead == staleness + 1,
        )


if __name__ == "__main__":
    main()
