"""Check that a hanging decode worker ends all ranks with an error that shows its stack."""

import contextlib
import ctypes
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.core.errors import DataError
from hpctrain.data.loader import Loader
from hpctrain.data.mixture import Mixture
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.subset import Subset
from hpctrain.data.transform import PerSample
from hpctrain.data.workers.pool import DecodePool
from hpctrain.data.writer import write_arrays
from tests.data.conftest import numbered
from tests.processes import is_alive

LIMIT_S = 50.0
TIMEOUT_S = 4.0  # longer than a good batch takes on a loaded machine
FOR_EVER_S = 1_000_000
KINDS = ("python", "c", "stopped")
SAMPLES = (5, 4, 70, 98, 97, 96, 95)


def make_hang(kind, folder):
    """Return a function that hangs at sample 70 and records its process; pickled by value."""

    def sleep_in_c():
        ctypes.PyDLL(None).sleep(FOR_EVER_S)  # keeps the GIL

    def hang(sample):
        if sample["number"] == 70:
            (folder / f"{kind}.pid").write_text(str(os.getpid()))
            if kind == "python":
                time.sleep(FOR_EVER_S)
            elif kind == "c":
                sleep_in_c()
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        return sample

    return hang


def make_hang_of_a_batch():
    return lambda columns: time.sleep(FOR_EVER_S) or columns


def make_hang_while_it_is_loaded():
    class Slow:
        def __call__(self, columns):
            return columns

        def __reduce__(self):
            return exec, (f"import time; time.sleep({FOR_EVER_S})",)

    return Slow()


@pytest.fixture(scope="module")
def hung(dataset_of, tmp_path_factory):
    """Return a pool for each kind of hang, a future that fails, and a folder of process ids.

    All workers hang at the same time, so that the tests wait for the limit only once.
    """
    folder = tmp_path_factory.mktemp("hung")
    transforms = {kind: PerSample(make_hang(kind, folder)) for kind in KINDS}
    transforms |= {"batch": make_hang_of_a_batch(), "load": make_hang_while_it_is_loaded()}
    with ThreadPoolExecutor(5) as threads, contextlib.ExitStack() as stack:
        pools = {
            kind: stack.enter_context(
                contextlib.closing(DecodePool(dataset_of(100), transform, 1, TIMEOUT_S))
            )
            for kind, transform in transforms.items()
        }
        futures = {k: threads.submit(pool.take, SAMPLES, 0, 0) for k, pool in pools.items()}
        yield pools, futures, folder


def story_of(future):
    with pytest.raises(DataError) as caught:
        future.result(LIMIT_S)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_hangs_is_named_with_its_sample_its_file_and_its_stack(
    hung, dataset_of, kind
):
    pools, futures, folder = hung
    story, pid = story_of(futures[kind]), int((folder / f"{kind}.pid").read_text())
    shard = dataset_of(100).path / dataset_of(100).manifest.shards[2].file
    assert f"worker 0 of 1 (process {pid}) must answer within {TIMEOUT_S:g} s" in story
    assert f"still at sample 70 ({shard}); " in story
    assert "in hang\n" in story
    assert "in sleep_in_c\n" in story or kind != "c"
    assert "worker_timeout_s" in story
    assert not is_alive(pid)
    with pytest.raises(DataError, match=re.escape(story)):
        pools[kind].take([1], 0, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("batch", r"(?s)samples 5, 4, 70, 98, 97 and 2 more \(\S+, \S+\); check.*in <lambda>\n"),
        ("load", r"(?s)still at loading data set and transform.*in _work\n"),
    ],
)
def test_hang_outside_of_a_sample_is_reported(hung, kind, words):
    assert re.search(words, story_of(hung[1][kind]))


@pytest.mark.ranks(2, 3)
def test_hanging_worker_of_one_rank_raises_the_same_error_on_all(world, tmp_path):
    comm, folder = MpiCommunicator(world), world.bcast(tmp_path) / "set"
    if world.rank == 0:
        write_arrays(folder, numbered(100), samples_per_shard=50)
    world.barrier()
    dataset = Subset(ShardedDataset(folder), range(30, 100))
    hang = PerSample(make_hang("python", tmp_path))
    loader = Loader(
        dataset,
        global_batch=10,
        comm=comm,
        order="sequential",
        transform=hang,
        workers=1,
        worker_timeout_s=TIMEOUT_S,
    )
    found = []
    with loader, pytest.raises(DataError, match=r"(?s)still at sample 40 \(.*in hang\n"):
        found.extend(loader)
    assert len(set(world.allgather(len(found)))) == 1
    assert len(found) <= 4
    assert [path.name for path in tmp_path.glob("*.pid")] == ["python.pid"] * (world.rank == 0)


def test_parts_and_mixtures_name_the_file_of_a_sample(dataset_of):
    whole = dataset_of(100)
    names = [str(whole.path / shard.file) for shard in whole.manifest.shards]
    numbers = whole.take(range(100))["number"]
    few = Subset(whole, [99, 0, 40])
    assert [few.file_of(n) for n in range(3)] == [names[2], names[0], names[1]]
    mixture = Mixture({Subset(whole, range(34)): 1, Subset(whole, range(68, 100)): 1})
    for index in range(50):
        number = int(mixture.take(np.array([index]))["number"][0])
        assert mixture.file_of(index) == names[number // 34]
    assert torch.equal(numbers, torch.arange(100))
