"""Orders of an epoch: how well they mix class-sorted samples, and the cost of an index.

    python perf/bench_order.py [--samples 1281167] [--batch 256] [--rounds 5] [--json FILE]

The samples are sorted by class, the worst case. A complete permutation needs 8 bytes of memory for
each sample. A shuffle buffer reads shards of 1000 samples one after another, in random order, and
returns a random sample of those in the buffer, as webdataset does. ``window`` is the order that
``Loader`` uses for small samples of a large data set, here of 3 kB.

* ``classes``: distinct classes in a batch, mean;
* ``chi2/df``: chi-squared of the class counts of a batch against equal counts, divided by the
  degrees of freedom; 1 if batches are drawn at random;
* ``serial``: correlation of the mean class of a batch with that of the next;
* ``ns/index``: processor time per position in a call with 2^18 positions, for data sets of this
  number of samples, of 10^9 and of 2^40 samples.
"""

import time
from collections.abc import Callable

import numpy as np
from measure import arguments, report
from numpy.typing import NDArray

from hpctrain.data.order.order import Order, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape

NUM_CLASSES = 1000
IN_ONE_CALL = 1 << 18
SAMPLE_BYTES, BLOCK_SIZE = 3000, 16
BUFFERS, SHARD_SAMPLES = (1000, 10000), 1000


def main() -> None:
    """Measure all orders, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_281_167, help="samples of the epoch")
    parser.add_argument("--batch", type=int, default=256, help="samples of a global batch")
    options = parser.parse_args()
    n, rounds = options.samples, options.rounds
    shape = WindowShape.of(options.batch, SAMPLE_BYTES, BLOCK_SIZE)
    makers: dict[str, Callable[[int], Order]] = {
        "global": lambda size: global_order(size, seed=0, epoch=0),
        "window": lambda size: WindowOrder(size, 0, 0, shape),
    }
    rows = []
    for name, make in makers.items():
        quality = mixing(make(n).samples_at(np.arange(n)), n, options.batch)
        costs = {f"ns/index at {size:.0e}": cost(make(size), rounds) for size in (n, 10**9, 2**40)}
        rows.append({"order": name, **quality, **costs})
    drawn = {f"ns/index at {n:.0e}": drawn_cost(n, rounds)}
    rng = np.random.default_rng(0)
    rows.append(
        {"order": "numpy permutation", **mixing(rng.permutation(n), n, options.batch), **drawn}
    )
    rows += [
        {"order": f"shuffle buffer of {held}", **mixing(buffered(n, held), n, options.batch)}
        for held in BUFFERS
    ]
    title = (
        f"{n} class-sorted samples, batches of {options.batch}; the window has "
        f"{shape.lanes} lanes x {shape.window} blocks x {shape.block} samples "
        f"({shape.num_samples * SAMPLE_BYTES / 2**20:.0f} MiB)"
    )
    values = {
        f"{row['order']}, {key}": value
        for row in rows
        for key, value in row.items()
        if key != "order"
    }
    report(title, rows, values, options.json)


def mixing(samples: NDArray[np.int64], n: int, batch: int) -> dict[str, float]:
    """Return the figures of the mixture of classes: ``classes``, ``chi2/df`` and ``serial``."""
    labels = (samples[: n // batch * batch] * NUM_CLASSES // n).reshape(-1, batch)
    counts = np.zeros((len(labels), NUM_CLASSES), np.int16)
    np.add.at(counts, (np.arange(len(labels))[:, None], labels), 1)
    expected = batch / NUM_CLASSES
    chi2 = ((counts - expected) ** 2 / expected).sum(axis=1) / (NUM_CLASSES - 1)
    means = labels.mean(axis=1)
    return {
        "classes": float((counts > 0).sum(axis=1).mean()),
        "chi2/df": float(chi2.mean()),
        "serial": float(np.corrcoef(means[:-1], means[1:])[0, 1]),
    }


def cost(order: Order, rounds: int) -> float:
    """Return the nanoseconds per position, in the fastest of ``rounds`` calls."""
    positions = np.arange(10**6, 10**6 + IN_ONE_CALL)
    return fastest(lambda: order.samples_at(positions), rounds) / IN_ONE_CALL


def drawn_cost(n: int, rounds: int) -> float:
    """Return the nanoseconds per sample of a complete permutation."""
    return fastest(lambda: np.random.default_rng(0).permutation(n), rounds) / n


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Return the nanoseconds of processor time of the fastest call."""
    found = []
    for _ in range(rounds):
        start = time.process_time_ns()
        work()
        found.append(time.process_time_ns() - start)
    return float(min(found))


def buffered(n: int, held: int) -> NDArray[np.int64]:
    """Return the order of samples that pass through a shuffle buffer."""
    rng = np.random.default_rng(0)
    shards = rng.permutation(-(-n // SHARD_SAMPLES))
    read = (shards[:, None] * SHARD_SAMPLES + np.arange(SHARD_SAMPLES)).ravel()
    read = read[read < n].tolist()
    buffer, given = read[:held], []
    for place, sample in zip(rng.integers(0, held, n - held).tolist(), read[held:], strict=True):
        given.append(buffer[place])
        buffer[place] = sample
    return np.array(given + buffer, np.int64)


if __name__ == "__main__":
    main()
