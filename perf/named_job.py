"""One job of ``bench_named.py``: the same program for hpctrain and for Horovod.

    mpirun -np 2 python perf/named_job.py hpctrain|horovod.torch [idle]

The program imports only torch, mpi4py and the given package, because Horovod may be installed for
another interpreter. Rank 0 prints the seconds of each call on the slowest rank as JSON.
"""

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

WORLD = MPI.COMM_WORLD

NUM_TENSORS, TENSOR_NUMEL = 1000, 1024
BIG_NUMEL = 16 << 20
STEPS, WIDTH = 200, 192
"""Of the compute loop: some 50 ms, so that pairs are many and what drifts cancels out."""
SLEEP_S = 5.0
"""In which the processor time of an idle controller is counted: it looks around every second."""

Seconds = list[float]
Work = Callable[[], object]


def timed(
    work: Work, repetitions: int, prepare: Work = lambda: None, *, warm_up: int = 1
) -> Seconds:
    """Time calls that all ranks begin together. Collective.

    Args:
        work: function to time.
        repetitions: counted calls.
        prepare: function that runs before each call and is not timed.
        warm_up: calls at the start that are not counted.

    Returns:
        The seconds of each counted call on the slowest rank.
    """
    seconds = []
    for _ in range(warm_up + repetitions):
        prepare()
        WORLD.Barrier()
        start = time.perf_counter()
        work()
        seconds.append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return seconds[warm_up:]


def library(tensor: torch.Tensor) -> Work:
    """Return a blocking call of MPI_Allreduce in place on the memory of a tensor."""
    buffer = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return lambda: WORLD.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT])


def check(tensors: list[torch.Tensor], sum_: Work) -> None:
    """End all ranks if a sum is not exact on one rank."""
    for tensor in tensors:
        tensor.fill_(WORLD.rank + 1)
    sum_()
    total = WORLD.size * (WORLD.size + 1) / 2
    if not all(bool((tensor == total).all()) for tensor in tensors):
        sys.stderr.write(f"rank {WORLD.rank}: a sum is wrong\n")
        WORLD.Abort(1)


def many(hvd, rounds: int) -> dict[str, Seconds]:
    """Sum 1000 tensors of 4 KiB, submitted in another order on every rank."""
    tensors = [torch.zeros(TENSOR_NUMEL) for _ in range(NUM_TENSORS)]
    order = list(range(NUM_TENSORS))
    random.Random(WORLD.rank).shuffle(order)  # noqa: S311 - an order, not a secret

    def named() -> None:
        handles = [hvd.allreduce_async_(tensors[i], name=f"tensor {i}", op=hvd.Sum) for i in order]
        for handle in handles:
            hvd.synchronize(handle)

    calls = [library(tensor) for tensor in tensors]

    def one_by_one() -> None:
        for call in calls:
            call()

    check(tensors, named)
    return alternate({"named": named, "MPI": one_by_one}, rounds, 3)


def small(hvd, rounds: int) -> dict[str, Seconds]:
    """Sum 8 bytes, synchronous, under the same name each time."""
    tensor = torch.zeros(2)

    def named() -> None:
        hvd.allreduce_(tensor, name="two numbers", op=hvd.Sum)

    check([tensor], named)
    return alternate({"named": named, "MPI": library(tensor)}, rounds, 100, tensor.zero_)


def big(hvd, rounds: int) -> dict[str, Seconds]:
    """Sum 64 MiB in an ordinary tensor."""
    tensor = torch.zeros(BIG_NUMEL)

    def named() -> None:
        hvd.allreduce_(tensor, name="many numbers", op=hvd.Sum)

    check([tensor], named)
    return alternate({"named": named, "MPI": library(tensor)}, rounds, 3, tensor.zero_)


def alternate(
    methods: dict[str, Work], rounds: int, repetitions: int, prepare: Work = lambda: None
) -> dict[str, Seconds]:
    """Time several methods, interleaved."""
    seconds: dict[str, Seconds] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, work in methods.items():
            seconds[method] += timed(work, repetitions, prepare)
    return seconds


def idle(hvd, pairs: int) -> dict[str, Seconds]:
    """Time a compute loop without a world and with an idle controller, interleaved.

    The order within a pair alternates, so that drift cancels out. Each controller executes an
    operation before the measurement, so that all of its threads run.
    """
    seconds: dict[str, Seconds] = {"without": [], "with": []}
    for pair in range(pairs):
        for method in ("without", "with") if pair % 2 else ("with", "without"):
            if method == "with":
                hvd.init()
                hvd.synchronize(hvd.allreduce_async_(torch.zeros(2), name="start", op=hvd.Sum))
            torch.set_num_threads(1)
            compute(STEPS // 10)
            seconds[method].append(timed(lambda: compute(STEPS), 1, warm_up=0)[0])
            if method == "with":
                hvd.shutdown()
    hvd.init()
    hvd.synchronize(hvd.allreduce_async_(torch.zeros(2), name="start", op=hvd.Sum))
    start = time.process_time()
    time.sleep(SLEEP_S)
    busy_s = WORLD.allreduce(time.process_time() - start, MPI.MAX)
    hvd.shutdown()
    return seconds | {"busy share": [busy_s / SLEEP_S]}


def compute(steps: int) -> None:
    """Run many short operations without communication, as a small model does."""
    weights = torch.eye(WIDTH)
    values = torch.ones(WIDTH, WIDTH)
    for _ in range(steps):
        values = torch.tanh(values @ weights)


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="hpctrain or horovod.torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-pairs", type=int, default=0, help="measure the idle controller")
    options = parser.parse_args()
    hvd = importlib.import_module(options.package)
    torch.set_num_threads(1)
    found = {}
    if options.idle_pairs:
        found["idle"] = idle(hvd, options.idle_pairs)
    else:
        hvd.init()
        torch.set_num_threads(1)
        for measure in (many, small, big):
            found[measure.__name__] = measure(hvd, options.rounds)
    if WORLD.rank == 0:
        sys.stdout.write(f"\n{json.dumps(found)}\n")
    if hvd.is_initialized():
        hvd.shutdown()


if __name__ == "__main__":
    main()
