"""Asynchronous SGD: nobody waits, and gradients come from weights that are old by then.

    hpctrain launch -n 2 -- python examples/tour/04_asynchronous.py

Eight workers take as long for a gradient as chance wants, 1 second on average. If they wait for
each other, a round lasts as long as the slowest of eight, which is H = 1 + 1/2 + ... + 1/8 = 2.72
seconds. If each hands in its gradient when it is ready and goes on from the weights of that
instant, eight come in a second. Meanwhile the others have handed in theirs: a gradient is seven
updates old.

The seconds are simulated, by one clock with the same seed on every rank; the gradients are real:
a worker belongs to a rank, which computes it from the weights that the worker has, and sends it.
"""

from heapq import heapify, heappop, heappush

import torch
from claim import claim

import hpctrain as hvd

NUM_WORKERS, NUM_UPDATES, STEP = 8, 4000, 0.01
HARMONIC = sum(1 / k for k in range(1, NUM_WORKERS + 1))


def main() -> None:
    """Count updates, their age, and the time to a loss; against workers that wait."""
    hvd.init()
    comm = hvd.current().comm
    chance = torch.Generator().manual_seed(0)  # the same on every rank: all see one clock
    noise = torch.Generator().manual_seed(1 + comm.rank)
    curvatures = torch.linspace(0.5, 1.0, 50, dtype=torch.float64)

    weights = torch.ones(50, dtype=torch.float64)
    seconds = torch.empty(2 * NUM_UPDATES).exponential_(generator=chance).tolist()
    events = [(seconds.pop(), worker) for worker in range(NUM_WORKERS)]
    heapify(events)
    held = dict.fromkeys(range(NUM_WORKERS), (weights.clone(), 0))
    now, staleness, reached_s = 0.0, 0, None
    for update in range(NUM_UPDATES):
        now, worker = heappop(events)
        seen, version = held[worker]
        gradient = curvatures * seen + 0.1 * torch.randn(50, generator=noise, dtype=torch.float64)
        comm.broadcast_(gradient, root=worker % comm.size).wait()
        weights -= STEP * gradient
        staleness += update - version
        held[worker] = weights.clone(), update + 1
        heappush(events, (now + seconds.pop(), worker))
        if reached_s is None and weights.norm() < 0.1 * 50**0.5:
            reached_s = now

    rate, age = NUM_UPDATES / now, staleness / NUM_UPDATES
    claim(
        f"without waiting {rate:.2f} gradients a second", holds=abs(rate / NUM_WORKERS - 1) < 0.06
    )
    claim(f"each {age:.2f} updates old", holds=abs(age / (NUM_WORKERS - 1) - 1) < 0.02)

    # Those who wait take the mean of eight gradients, and may take a step eight times as long.
    rounds = torch.empty(20_000, NUM_WORKERS).exponential_(generator=chance).amax(dim=1)
    rate = NUM_WORKERS / rounds.mean().item()
    claim(
        f"with waiting {rate:.2f}, which is 8 / H = {NUM_WORKERS / HARMONIC:.2f}",
        holds=abs(rate * HARMONIC / NUM_WORKERS - 1) < 0.02,
    )
    weights, taken = torch.ones(50, dtype=torch.float64), 0
    while weights.norm() >= 0.1 * 50**0.5:
        gradient = curvatures * weights
        gradient += 0.1 * torch.randn(50, generator=noise, dtype=torch.float64) / NUM_WORKERS**0.5
        weights -= NUM_WORKERS * STEP * hvd.allreduce(gradient)
        taken += 1
    ratio = rounds[:taken].sum().item() / reached_s
    claim(
        f"to a tenth of the distance it takes {ratio:.1f} times as long with waiting",
        holds=0.75 * HARMONIC < ratio < 1.25 * HARMONIC,
    )


if __name__ == "__main__":
    main()
