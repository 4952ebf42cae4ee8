"""Check the all-reduces between nodes: exact, bitwise equal on all ranks, few bytes."""

import hashlib
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpctrain.comm.ops import Op, combination
from hpctrain.comm.rail.algorithms import ALGORITHMS, RING_BYTES, allgather_by_messages
from hpctrain.comm.rail.rail import MpiWire
from hpctrain.cost.schedules import SCHEDULES
from tests.comm.fuzz_values import FLOATS, FUNCTIONS, ops_of
from tests.comm.simulated import run_ranks

SIZES = (0, 1, 5, 1003)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MANY = (2, 3, 5, 6, 7, 8, 13, 16, 17)


@pytest.fixture(params=SCHEDULES)
def allreduce_(request):
    return ALGORITHMS[request.param]


@pytest.fixture
def short_segments(monkeypatch):
    for name in ("ring", "double_tree"):
        monkeypatch.setitem(SCHEDULES, name, replace(SCHEDULES[name], segment_bytes=256))


def whole_numbers(rank, numel, dtype):
    """Make integers whose reductions fit in every dtype, or wrap around."""
    highest = 4 if dtype.is_floating_point else 127
    return np.random.default_rng((rank, numel)).integers(0, highest, numel)


def random_numbers(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def raw(tensor):
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usefixtures("short_segments")
def test_every_reduction_of_every_dtype_and_size_equals_numpy(world, allreduce_):
    wire, seen = MpiWire(world), hashlib.sha256()
    cases = [(dtype, op) for dtype in FLOATS + INTEGERS for op in ops_of(dtype)]
    for dtype, op in cases:
        for numel in SIZES:
            inputs = [whole_numbers(rank, numel, dtype) for rank in range(world.size)]
            tensor = torch.tensor(inputs[world.rank]).to(dtype)
            allreduce_(wire, tensor, combination(dtype, op))
            expected = torch.from_numpy(FUNCTIONS[op].reduce(inputs)).to(dtype)
            assert torch.equal(tensor, expected), (dtype, op, numel)
            seen.update(raw(tensor))
    assert len(set(world.allgather(seen.hexdigest()))) == 1


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_bitwise_equal_on_all_ranks_and_in_repetitions(world, allreduce_, dtype):
    results, numel = [], 700_001
    for _ in range(2):
        tensor = random_numbers(world.rank, numel, dtype)
        allreduce_(MpiWire(world), tensor, combination(dtype, Op.SUM))
        results.append(raw(tensor))
    assert results[0] == results[1]
    assert len({hashlib.sha256(each).digest() for each in world.allgather(results[0])}) == 1
    exact = sum(random_numbers(rank, numel, dtype).double() for rank in range(world.size))
    bound = 1e-5 if dtype is torch.float32 else 0.1
    assert (tensor.double() - exact).abs().max().item() < bound


@pytest.mark.ranks(2, 3, 4)
def test_nan_of_any_bits_and_signed_zeros_are_bitwise_equal_on_all_ranks(world, allreduce_):
    patterns = (0x7FC00001, 0x7FC00002 + world.rank, 0xFFC00000 + world.rank, 0x80000000)
    mine = np.array([patterns[(i + world.rank) % 4] for i in range(64)], dtype=np.uint32)
    mine[world.rank :: 5] = 0
    for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX):
        tensor = torch.from_numpy(mine.view(np.float32).copy())
        allreduce_(MpiWire(world), tensor, combination(torch.float32, op))
        assert len(set(world.allgather(raw(tensor)))) == 1


@pytest.mark.parametrize("eager", [True, False], ids=("eager", "rendezvous"))
@pytest.mark.parametrize("size", MANY)
@pytest.mark.usefixtures("short_segments")
def test_sums_of_any_number_of_ranks_are_bitwise_equal(allreduce_, size, eager):
    sizes = (1, size - 1, 2 * size + 1, 3001)

    def work(wire):
        results = [random_numbers(wire.rank, numel) for numel in sizes]
        for tensor in results:
            allreduce_(wire, tensor, combination(torch.float32, Op.SUM))
        return results

    by_rank, _ = run_ranks(size, work, eager=eager)
    for numel, *results in zip(sizes, *by_rank, strict=True):
        assert len({raw(result) for result in results}) == 1
        exact = sum(random_numbers(rank, numel).double() for rank in range(size))
        assert (results[0].double() - exact).abs().max().item() < 1e-5


BITS = {
    "doubling": (0x5F22FF01, 0x4B89AD50, 0xC623B5A2),
    "halving": (0x5F22FF01, 0x4B89AD50, 0xC623B5A2),
    "ring": (0xF9419689, 0x86E65664, 0xAB49A8B1),
    "tree": (0x5F22FF01, 0x4B89AD50, 0x306A2F4B),
    "double_tree": (0x690802C7, 0x660B5F3A, 0x0748D9AA),
}
"""crc32 of the sum over 3, 8 and 13 ranks: who changes an order of combination breaks with runs
that were made before."""


@pytest.mark.parametrize("name", BITS)
@pytest.mark.usefixtures("short_segments")
def test_sums_keep_their_bits_from_version_to_version(name):
    def work(wire):
        values = (np.arange(3001) * 40503 + wire.rank * 7919) % 10007 / np.float32(997)
        tensor = torch.from_numpy(values.astype(np.float32))
        ALGORITHMS[name](wire, tensor, combination(torch.float32, Op.SUM))
        return zlib.crc32(raw(tensor))

    assert tuple(run_ranks(size, work, eager=True)[0][0] for size in (3, 8, 13)) == BITS[name]


def bytes_of_each_rank(allreduce_, size, numel):
    def work(wire):
        allreduce_(wire, torch.ones(numel), combination(torch.float32, Op.SUM))

    _, wires = run_ranks(size, work, eager=True)
    return [wire.num_bytes_sent for wire in wires]


@pytest.mark.parametrize("size", MANY)
def test_no_rank_sends_more_bytes_than_the_bound_of_its_algorithm(size):
    numel = 10_007
    message, fewest = 4 * numel, 2 * (size - 1) / size * 4 * numel
    power = 1 << (size.bit_length() - 1)
    folding = 0 if size == power else 1.5 * message
    most = {
        "ring": 1.03 * fewest,
        "halving": 1.03 * 2 * (power - 1) / power * message + folding,
        "doubling": (math.log2(power) + (size != power)) * message,
        "tree": math.ceil(math.log2(size)) * message,
        "double_tree": 2 * message + 8,
    }
    for name, bound in most.items():
        assert max(bytes_of_each_rank(ALGORITHMS[name], size, numel)) <= bound, name


@pytest.mark.parametrize(("numel", "size"), [(1000, 8), (1003, 8), (5, 16)])
def test_ring_sends_two_messages_minus_two_pieces(numel, size):
    """All ranks send equally if they divide the message; otherwise the average is exact."""
    sent = bytes_of_each_rank(ALGORITHMS["ring"], size, numel)
    exact = 2 * (size - 1) / size * 4 * numel
    assert min(sent) <= exact <= max(sent)
    assert sum(sent) == 2 * (size - 1) * 4 * numel
    assert (min(sent) == max(sent)) == (numel % size == 0)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_doubling_sends_one_message_per_rank_and_power_of_two(size):
    def work(wire):
        ALGORITHMS["doubling"](wire, torch.ones(3), combination(torch.float32, Op.SUM))
        return wire.num_messages

    counts, _ = run_ranks(size, work, eager=False)
    assert counts == [math.log2(size)] * size


@pytest.mark.parametrize("eager", [True, False], ids=("eager", "rendezvous"))
@pytest.mark.parametrize("mean_numel", [3, RING_BYTES // 4], ids=("small", "large"))
@pytest.mark.parametrize("size", [1, *MANY])
def test_tensors_of_any_sizes_are_gathered_by_few_messages(size, mean_numel, eager):
    numels = [2 * mean_numel * (rank % 3) for rank in range(1, size + 1)]

    def work(wire):
        gathered = allgather_by_messages(
            wire, random_numbers(wire.rank, numels[wire.rank]), numels
        )
        return [raw(tensor) for tensor in gathered]

    by_rank, wires = run_ranks(size, work, eager=eager)
    expected = [raw(random_numbers(rank, numel)) for rank, numel in enumerate(numels)]
    assert all(gathered == expected for gathered in by_rank)
    if mean_numel == 3:
        assert {wire.num_messages for wire in wires} == {math.ceil(math.log2(size))}
