"""Asynchronous SGD: workers do not wait, and their gradients are stale.

    hpctrain launch -n 2 -- python examples/tour/04_asynchronous.py

Each of eight workers takes a random time per gradient, 1 second on average (exponential). If the
workers wait for each other, a round takes as long as the slowest worker, on average
H = 1 + 1/2 + ... + 1/8 = 2.72 seconds. If each worker sends its gradient and continues from the
current weights, eight gradients arrive per second, and each is seven updates old on average.

Times are simulated with the same seed on every rank. Gradients are computed: the rank of a worker
computes the gradient for the weights of the worker, and sends it.
"""

from heapq import heapify, heappop, heappush

import torch
from claim import claim

import hpctrain as hvd

NUM_WORKERS, NUM_UPDATES, STEP = 8, 4000, 0.01
HARMONIC = sum(1 / k for k in range(1, NUM_WORKERS + 1))


def main() -> None:
    """Compare rate and age of updates, and the time to a loss, with workers that wait."""
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

    # Workers that wait average eight gradients, and can use a step eight times as large.
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
