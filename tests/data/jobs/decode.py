"""Run a user's script: MPI at its top, no main guard, threads and a decode pool."""

from mpi4py import MPI  # noqa: I001 - before everything else, as many scripts have it

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import hpctrain
from hpctrain.data.workers.pool import DecodePool
from hpctrain.data.reader import ShardedDataset

hpctrain.init()
rank = MPI.COMM_WORLD.rank


def decode(columns):
    columns["image"] = columns["image"] * 2
    columns["initialized"] = MPI.Is_initialized()
    columns["inherited"] = [name for name in os.environ if name.startswith(("OMPI_", "PMI"))]
    return columns


dataset = ShardedDataset(sys.argv[1])
pool = DecodePool(dataset, decode, 2)  # the script does not close it
with ThreadPoolExecutor(2) as threads:
    for epoch in range(3):
        steps = np.split(np.random.default_rng(epoch + rank).permutation(len(dataset)), 5)
        decoded = [threads.submit(pool.take, indices, epoch, 0) for indices in steps]
        read = [threads.submit(dataset.take, indices) for indices in steps]
        for indices, mine, theirs in zip(steps, read, decoded, strict=True):
            batch = theirs.result()
            assert batch["number"].tolist() == indices.tolist()
            assert (batch["image"] == mine.result()["image"] * 2).all()
            assert not batch["initialized"]
            assert not batch["inherited"]
sys.stdout.write(f"<{rank}>\n")
