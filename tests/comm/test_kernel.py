"""Check the compiled kernel of node memory: its sums have the bits of torch; threads are ranks."""

import ctypes
import random
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.node import kernel as kernel_module
from hpctrain.comm.node import kernel_build
from hpctrain.comm.node.kernel import (
    BUCKET,
    DIFFERENT,
    DIRECT,
    DONE,
    LATE,
    SLICES,
    Kernel,
    Library,
    library,
)
from hpctrain.comm.node.node_barrier import NodeBarrier
from hpctrain.comm.ops import Op, combination, combine, spread
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings
from hpctrain.core.errors import MismatchError
from tests.comm.conftest import connected
from tests.harness.features import ARM64_COMPILER, ARM64_EMULATOR

HERE = Path(__file__).parent
SLOT_BYTES = 1024
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool),
]


class Node:
    """Memory of ``size`` ranks in this process, and the kernel of each rank."""

    def __init__(self, size):
        pages = [np.zeros(4096 + 2 * SLOT_BYTES, np.uint8) for _ in range(size)]
        self.cells, self.sign = np.zeros(8 * size, np.int64), np.zeros(1, np.int64)
        segments = [(ctypes.c_char * len(page)).from_buffer(page) for page in pages]
        barriers = [NodeBarrier(segments, r, 0, Watch(), spin=True) for r in range(size)]
        slots = [page.ctypes.data + 4096 for page in pages]
        memory = [self.cells.ctypes.data, self.sign.ctypes.data, *slots]
        self.kernels = []
        for rank, barrier in enumerate(barriers):
            rounds = [semaphore.address for each in barrier._rounds for semaphore in each]
            phases_s = 2e-5, 2e-5
            kernel = Kernel(library(), rank, size, phases_s, [*memory, *rounds], SLOT_BYTES)
            self.kernels.append(kernel)
        self._keep = pages

    def run(self, function):
        """Call ``function(rank, kernel)`` on a thread per rank; return the results."""
        found = [None] * len(self.kernels)

        def call(rank):
            found[rank] = function(rank, self.kernels[rank])

        threads = [threading.Thread(target=call, args=(r,)) for r in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def addresses_of(values):
    return Bucket(values[0], tuple(values)).addresses


def end(kernel, code):
    """Wait for the end of a call, and return its code."""
    while code == LATE:
        code = kernel.code if kernel.is_over(0.1) else LATE
    return code


def random_values(rng, dtype, numel):
    """Return a tensor of random bits, or of numbers of similar size."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator, dtype=dtype)
    raw = torch.randint(-(1 << 63), (1 << 63) - 1, (2 * numel + 1,), generator=generator)
    if dtype.is_floating_point and rng.random() < 0.6:
        return torch.randn(numel, generator=generator).mul(10.0 ** rng.uniform(-8, 5)).to(dtype)
    return raw.view(dtype)[:numel].clone()


def same_bits(one, other):
    """Compare bits; all NaN are equal."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.is_floating_point():
        is_nan = one.isnan()
        if not torch.equal(is_nan, other.isnan()):
            return False
        one, other = one.masked_fill(is_nan, 0), other.masked_fill(is_nan, 0)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.requires("kernel")
@pytest.mark.parametrize("seed", range(24))
def test_random_sums_have_the_bits_of_torch(seed):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 2, 3, 4, 5, 8])
    calls = []
    for _ in range(12):
        dtype = rng.choice(DTYPES)
        numel = rng.choice([0, 1, 63, 64, 65, 500, 1000, rng.randrange(6000)])
        scale = (
            rng.choice([None, 0.5, 1 / 3, rng.uniform(-3, 3)]) if dtype.is_floating_point else None
        )
        values = [random_values(rng, dtype, numel) for _ in range(size)]
        how = combination(dtype, Op.SUM)
        parts = [value.clone() for value in values]
        if numel:
            spread(combine([how.view(p) for p in parts], how, scale), parts[:1], how)
        kind = rng.choice(["bucket", "direct", "slices", "barrier"])
        calls.append((kind, values, how, scale, values[0] if kind == "barrier" else parts[0]))

    def rank_main(rank, kernel):
        turn = 0
        for number, (kind, values, how, scale, _) in enumerate(calls, 1):
            numel = how.view(values[rank]).numel()
            if kind == "barrier":
                code = kernel.barrier()
            elif kind == "bucket":
                total = kernel.sum_of(BUCKET, number, how.kernel_number, numel, scale)
                code = total(turn, 0, addresses_of(values))
                turn = 1 - turn
            else:
                mine = how.view(values[rank])
                way = SLICES if kind == "slices" else DIRECT
                total = kernel.sum_of(way, number, how.kernel_number, mine.numel(), scale)
                code = total(turn, 0, mine.data_ptr())
                turn = (turn + max(1, -(-mine.nbytes // SLOT_BYTES))) % 2
            assert end(kernel, code) == DONE

    Node(size).run(rank_main)
    for kind, values, _, _, expected in calls:
        same = [same_bits(value, expected) for value in values[: 1 if kind == "barrier" else None]]
        assert all(same), (seed, kind, values[0].dtype, len(expected), same)


@pytest.mark.requires("kernel")
@pytest.mark.parametrize("checks_finite", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
def test_a_sum_that_is_not_finite_is_counted_if_asked(bad, checks_finite):
    node = Node(2)
    values = [torch.ones(300) for _ in range(2)]
    for value in values:
        value[250] = bad

    def rank_main(_, kernel):
        total = kernel.sum_of(BUCKET, 1, 0, 300, None)
        return end(kernel, total(0, checks_finite, addresses_of(values)))

    assert node.run(rank_main) == [DONE, DONE]
    assert node.cells[4::8].tolist() == [0, int(checks_finite)]


@pytest.mark.requires("kernel")
def test_different_calls_are_found_on_all_ranks_before_values_change():
    values = [torch.arange(50.0) for _ in range(3)]

    def rank_main(rank, kernel):
        total = kernel.sum_of(SLICES, 7 + (rank == 1), 0, 50, None)
        return end(kernel, total(0, 0, values[rank].data_ptr()))

    assert Node(3).run(rank_main) == [DIFFERENT] * 3
    assert all(torch.equal(value, torch.arange(50.0)) for value in values)


def test_the_kernel_sums_all_numbers_and_nothing_else():
    assert all(combination(dtype, Op.SUM).kernel_number >= 0 for dtype in DTYPES)
    others = [combination(torch.float32, op) for op in (Op.MIN, Op.MAX, Op.PRODUCT)]
    assert all(how.kernel_number < 0 for how in others)


@pytest.mark.requires("kernel")
def test_a_kernel_of_another_source_is_refused(tmp_path):
    folder = Path(kernel_module.__file__).parent
    for name in ("libkernel.so", "kernel.c"):
        shutil.copy(folder / name, tmp_path)
    Library(tmp_path / "libkernel.so")
    with (tmp_path / "kernel.c").open("a") as file:
        file.write("/* changed */\n")
    with pytest.raises(OSError, match="install hpctrain again"):
        Library(tmp_path / "libkernel.so")


@pytest.mark.ranks(2, 3)
def test_ranks_with_and_without_the_kernel_work_together(world, monkeypatch):
    if world.rank == 1:
        monkeypatch.setenv("HPCTRAIN_KERNEL", "off")
    with connected(Settings(probe="off")) as made:
        comm = made.comm
        for numel in (1, 1000, 300_000):
            bucket = comm.new_bucket(numel, torch.float32)
            for values in (bucket, torch.empty(numel)):
                flat = bucket.flat if values is bucket else values
                flat.copy_(torch.arange(numel) % 1000 + world.rank)
                comm.allreduce_(values, scale=0.5)
                total = world.size * (torch.arange(numel) % 1000) + sum(range(world.size))
                assert torch.equal(flat, total * 0.5)
        with pytest.raises(MismatchError):
            comm.allreduce_(torch.ones(3 + world.rank))


def compiled(source, program, *options, compiler="cc"):
    command = [compiler, *options, HERE / source, "-o", program, "-lpthread"]
    subprocess.run(command, check=True)
    return str(program)


def output(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.requires("c-compiler")
def test_threads_in_place_of_ranks_show_no_race(tmp_path):
    options = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread"]
    program = compiled("kernel_race.c", tmp_path / "race", *options)
    for size in (2, 3, 5, 9):
        assert output(program, str(size), "200", str(size)) == "0\n"


@pytest.mark.requires("c-compiler", "arm64-compiler", "arm64-emulator")
def test_arm64_sums_have_the_bits_of_this_processor(tmp_path):
    options = [flag for flag in kernel_build._FLAGS if flag not in ("-fPIC", "-shared")]
    arm64 = [compiled(
        source, tmp_path / f"{source}.arm64", *options, "-static", compiler=ARM64_COMPILER
    ) for source in ("kernel_sums.c", "kernel_race.c")]  # fmt: skip
    here = compiled("kernel_sums.c", tmp_path / "sums", *options)
    for seed in range(10):
        assert output(ARM64_EMULATOR, arm64[0], str(seed)) == output(here, str(seed))
    for size in (2, 3, 5, 9):
        assert output(ARM64_EMULATOR, arm64[1], str(size), "200", str(size)) == "0\n"
