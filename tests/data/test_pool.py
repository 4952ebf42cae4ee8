"""Check that a decode pool gives the results of threads, and reports errors."""

import contextlib
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.samples import Ragged
from hpctrain.data.workers.pool import DecodePool
from hpctrain.data.workers.shm_message import pack, unpack
from hpctrain.launch import mpiexec
from tests.processes import ended, is_alive, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0


def make_numbers():
    """Return a data set that gives the requested numbers as samples."""

    class Numbers:  # pickled by value, because workers cannot import this file
        def take(self, indices):
            if (indices == 13).any():
                raise CorruptError("number 13 is damaged", 13, 14)
            return {"number": torch.from_numpy(indices.copy())}

    return Numbers()


def make_transform(fifo=None):
    """Return a transform; samples 800 and 801 wait for each other at a pipe."""

    def transform(columns):
        number = columns["number"]
        for side in number[(number == 800) | (number == 801)].tolist():
            os.close(os.open(fifo, os.O_RDONLY if side == 800 else os.O_WRONLY))
        for unlucky in number[number >= 900].tolist():
            if unlucky == 900:
                raise ValueError("bad luck")
            if unlucky == 901:
                ctypes.string_at(0)
            if unlucky == 903:
                raise EOFError("no more")
            if unlucky == 902:

                class LocalError(Exception):
                    def __init__(self, a, b):
                        super().__init__(a + b)

                raise LocalError("not to be ", "made again")
        return {
            "number": number,
            "pid": os.getpid(),
            "server_threads": len([*Path(f"/proc/{os.getppid()}/task").iterdir()]),
            "large": number.repeat(1000).double(),
            "bfloat": number.bfloat16(),
            "turned": number.repeat(2, 3).T,
            "scalar": torch.tensor(3),
            "empty": torch.empty(0, 3),
            "array": number.numpy() * 2,
            "ragged": Ragged.of([torch.full((n % 4,), n) for n in number.tolist()]),
            "random": [torch.rand(2), np.random.random(2)],  # noqa: NPY002 - as users do
            "text": "text",
        }

    return transform


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    fifo = tmp_path_factory.mktemp("pool") / "fifo"
    os.mkfifo(fifo)
    with contextlib.closing(DecodePool(make_numbers(), make_transform(fifo), 2)) as made:
        yield made


THREADS = ThreadPoolExecutor(64)


def submit(pool, indices):
    return THREADS.submit(pool.take, indices, 0, 0)


def ask(pool, *indices, epoch=0, seed=0):
    return pool.take(indices, epoch, seed)


def test_results_of_workers_are_returned_unchanged(pool):
    found, expected = ask(pool, 3, 1, 2), make_transform()({"number": torch.tensor([3, 1, 2])})
    for name in ("number", "large", "bfloat", "turned", "scalar", "empty"):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name
    assert found["array"].tolist() == [6, 2, 4]
    assert torch.equal(found["ragged"].values, expected["ragged"].values)
    assert torch.equal(found["ragged"].offsets, expected["ragged"].offsets)
    assert found["text"] == "text"
    assert found["pid"] != os.getpid()
    assert found["server_threads"] == 1  # the process that forks has no threads of libraries
    found["number"] += 1  # the arrays belong to the caller


def test_batches_are_unchanged_while_later_ones_are_read(pool):
    futures = [submit(pool, range(start, start + 8)) for start in range(100, 500, 8)]
    batches = [future.result(LIMIT_S) for future in futures]
    for _ in range(20):
        ask(pool, *range(500, 508))
    for start, batch in zip(range(100, 500, 8), batches, strict=True):
        assert batch["number"].tolist() == list(range(start, start + 8))
        assert (batch["large"].view(1000, 8) == torch.arange(start, start + 8)).all()


def test_workers_work_at_the_same_time(pool):
    futures = [submit(pool, [number]) for number in (800, 801)]
    assert len({future.result(LIMIT_S)["pid"] for future in futures}) == 2


def test_random_numbers_depend_on_samples_epoch_and_seed_only(pool):
    def numbers(*indices, **when):
        torch_s, numpy_s = ask(pool, *indices, **when)["random"]
        return (*torch_s.tolist(), *numpy_s.tolist())

    first = numbers(1, 2)
    assert {numbers(1, 2) for _ in range(8)} == {first}
    others = [numbers(2, 1), numbers(1, 2, epoch=1), numbers(1, 2, seed=1)]
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    ("samples", "kind", "words"),
    [
        ((900,), ValueError, "(?s)bad luck.*in transform"),
        ((902,), DataError, "(?s)LocalError: not to be made again.*in transform"),
        ((903,), EOFError, "(?s)no more.*in transform"),  # must not count as the end of a worker
        ((12, 13), CorruptError, "number 13 is damaged"),
    ],
)
def test_an_error_of_a_worker_has_the_frames_of_the_user_and_its_traceback_as_cause(
    pool, samples, kind, words
):
    with pytest.raises(kind, match=words) as caught:
        ask(pool, *samples)
    assert "Traceback (most recent call last)" in str(caught.value.__cause__)
    assert not any("Traceback" in note for note in caught.value.__notes__)
    if kind is CorruptError:
        assert (caught.value.start, caught.value.stop) == (13, 14)
    assert ask(pool, 1)["text"] == "text"


def test_a_transform_that_does_not_pickle_is_refused_at_the_start():
    lock = threading.Lock()
    with pytest.raises(DataError, match=r"must be picklable, .*lock.*workers=0"):
        DecodePool(make_numbers(), lambda columns: lock and columns, 1)


def test_failed_import_in_a_worker_raises_in_every_batch():
    class Unloadable:
        def __call__(self, columns):
            return columns

        def __reduce__(self):
            return exec, ("raise RuntimeError('not here')",)

    with contextlib.closing(DecodePool(make_numbers(), Unloadable(), 2)) as pool:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not here"):
                ask(pool, 1)


def test_a_worker_that_crashes_is_named_with_its_stack_and_close_ends_the_others():
    pool = DecodePool(make_numbers(), make_transform(), 2)
    pids = {ask(pool, 1)["pid"] for _ in range(8)}
    failed = [submit(pool, [901 if n == 5 else n]) for n in range(20)]
    story = r"(?s)worker [01] of 2 \(process \d+\) was killed by SIGSEGV;.*string_at.*transform\n"
    with pytest.raises(DataError, match=story):
        failed[5].result(LIMIT_S)
    for _ in range(4):  # not only in the batch of the lost worker
        with pytest.raises(DataError, match=story):
            ask(pool, 1)
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids))
    with pytest.raises(DataError, match="was killed by SIGSEGV"):  # the first error
        ask(pool, 1)


def test_close_ends_work_that_is_not_done(pool):
    """The last test of this pool: 800 waits for 801, which is never requested."""
    futures = [submit(pool, [800]) for _ in range(3)]
    time.sleep(0.1)
    pool.close()
    for future in futures:
        with pytest.raises(DataError, match="was closed"):
            future.result(LIMIT_S)
    errors = [str(submit(pool, [800]).exception(LIMIT_S)) for _ in range(9)]
    assert any(error.startswith("a decode pool must be open") for error in errors)


RANK = """
import os, sys
from hpctrain.data.workers.pool import DecodePool
class Pids:
    def take(self, indices):
        return {"pid": os.getpid(), "server": os.getppid()}
pool = DecodePool(Pids(), None, 2)
found = [pool.take([n], 0, 0) for n in range(8)]
print(*{pid for one in found for pid in one.values()}, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def rank():
    """Run a process with a pool; return this process and the processes of the pool."""
    with subprocess.Popen(
        [sys.executable, "-c", RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


def test_a_pool_whose_rank_is_killed_leaves_no_processes():
    with rank() as (process, pids):
        assert len(pids) >= 2
        assert all(map(is_alive, pids))
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(map(is_alive, pids)), LIMIT_S)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("mpi", "num_ranks"),
    [
        ("openmpi", 2),
        pytest.param("mpich", 2, marks=[pytest.mark.requires("mpich"), pytest.mark.conformance]),
    ],
)
def test_a_pool_works_with_mpi_and_threads_in_a_script_without_main_guard(
    dataset_of, mpi, num_ranks
):
    python = str(ROOT / ".venv-mpich/bin/python") if mpi == "mpich" else sys.executable
    job = [python, "-W", "error::DeprecationWarning:multiprocessing", "-X", "faulthandler"]
    script = [str(ROOT / "tests/data/jobs/decode.py"), str(dataset_of(100).path)]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    launch = [python, "-m", "hpctrain", "launch", "-n", str(num_ranks), "--timeout", "150", "--"]
    done = ended([*launch, *job, *script], env=mpiexec.environment() | {"PYTHONPATH": path})
    assert sorted(done.stdout.split()) == [f"<{n}>" for n in range(num_ranks)], done.stderr
    assert done.returncode == 0, done.stderr
    for word in ("fork", "Segmentation", "Traceback", "DeprecationWarning"):
        assert word not in done.stderr


def test_memory_of_a_batch_is_kept_by_its_tensors_alone():
    def send(value):
        message, descriptor = pack(value)
        return unpack(pickle.loads(pickle.dumps(message)), descriptor)

    def is_mapped():
        return "hpctrain-batch" in Path("/proc/self/maps").read_text()

    def descriptors():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    assert send("no tensor") == "no tensor"
    for size in (10, 1000, 5000, 0):
        assert (send([torch.full((size,), 7)])[0] == 7).all()
    kept = [send(torch.full((100,), n)) for n in range(20)]
    assert [batch[0].item() for batch in kept] == list(range(20))
    view = kept[3][5:]
    del kept
    gc.collect()
    assert is_mapped()
    assert (view == 3).all()
    del view
    assert descriptors() == before
    assert not is_mapped()
