"""Rewrite a data set repeatedly, in programs that tests kill; see ``test_kills``.

``python -m tests.data.rewrite serve`` imports everything once, and forks a writer for each line of
its input. A line has the kind of writer, a number and a directory. The next line kills the writer;
after its output, the server prints an empty line.

``mpirun python -m tests.data.rewrite ranks DIRECTORY`` writes with all ranks.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import numpy as np

from hpctrain.core.config import Settings
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.writer import ShardWriter
from tests.data.plain import read_whole

NUM_SAMPLES = 50
FIELDS = {
    "generation": ((), "i8"),
    "text": Field.of((), "u2", ragged=True),
    "packed": Field.of((9,), "u1", compression="zstd"),
}


def say(*words):
    # In one write, and less than a pipe holds, so that lines of several processes do not mix.
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


def samples(generation, start, stop):
    return {
        "generation": np.full(stop - start, generation),
        "text": [np.full(n % 5, generation % 9999, "u2") for n in range(start, stop)],
        "packed": np.full((stop - start, 9), generation % 250, "u1"),
    }


def generation_in(folder):
    """Assert that every sample exists and has one generation; return the generation."""
    read = read_whole(folder)
    generation = int(read["generation"][0])
    wanted = samples(generation, 0, NUM_SAMPLES)
    for name, of_field in wanted.items():
        assert len(read[name]) == NUM_SAMPLES
        assert all(map(np.array_equal, read[name], of_field))
    return generation


def write(directory, generation, start, stop, **options):
    options = {"samples_per_shard": 8 + generation % 9, **options}
    with ShardWriter(directory, FIELDS, **options) as writer:
        start += writer.num_written
        for first in range(start, stop, 7):
            writer.append(samples(generation, first, min(first + 7, stop)))


def rewrite(directory, first_generation):
    """Write data sets one after another, without end."""
    for generation in itertools.count(first_generation):
        write(directory, generation, 0, NUM_SAMPLES)
        say(generation)


def resume(directory, generation):
    """Write one data set, resuming after a killed writer."""
    write(directory, generation, 0, NUM_SAMPLES, samples_per_shard=4, resume_key=str(generation))
    say(generation)


def serve():
    for line in sys.stdin:
        kind, number, directory = line.rstrip("\n").split(" ", 2)
        pid = os.fork()
        if not pid:
            {"rewrite": rewrite, "resume": resume}[kind](Path(directory), int(number))
            os._exit(0)
        sys.stdin.readline()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        say("")


def ranks(directory):
    from hpctrain.comm.factory import connect  # noqa: PLC0415 - starts MPI
    from hpctrain.comm.mpi_world import find_world  # noqa: PLC0415 - starts MPI

    comm = connect(find_world(), Settings(probe="off")).comm
    each = -(-NUM_SAMPLES // comm.size)
    start, stop = (min(rank * each, NUM_SAMPLES) for rank in (comm.rank, comm.rank + 1))
    for generation in itertools.count(1):
        write(directory, generation, start, stop, comm=comm)
        say(comm.rank, os.getpid(), generation)


if __name__ == "__main__":
    {"serve": serve, "ranks": ranks}[sys.argv[1]](*map(Path, sys.argv[2:]))
