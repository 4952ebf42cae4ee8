"""Check node memory that is scarce or inaccessible: ranks agree, and no signal kills a rank."""

import ctypes
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from hpctrain.cluster.resources import ENTRY_FACTOR, SPARE_BYTES, available_bytes
from hpctrain.comm.node import node_memory
from hpctrain.comm.node.node_memory import allocate
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.units import MIB
from tests.full_disk import largest_file
from tests.runtime.victims import run_ranks

CLONE_NEWNET = 0x40000000
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)


def descriptors_open():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def check_shared(world, segments):
    """Write this rank's segment and read the segments of the other ranks."""
    values = [np.frombuffer(memoryview(segment), np.uint8) for segment in segments]
    assert not any(value.any() for value in values)
    world.Barrier()
    values[world.rank][:] = world.rank + 1
    world.Barrier()
    assert [int(value.min()) for value in values] == list(range(1, world.size + 1))
    assert [int(value.max()) for value in values] == list(range(1, world.size + 1))
    world.Barrier()


def refusals(world, num_bytes):
    """Return the error message of each rank; assert that no rank waits beyond the timeout."""
    start = time.monotonic()
    with pytest.raises(NodeMemoryError) as error:
        allocate(world, num_bytes)
    assert time.monotonic() - start < node_memory.TIMEOUT_S
    return world.allgather(str(error.value))


@contextmanager
def own_net():
    """Move this thread into a separate network namespace, and back."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert LIBC.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert LIBC.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(before)


@pytest.fixture
def closed_proc() -> Generator[None]:
    """Hide this process from other processes, like a process that has changed its user."""
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
    LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: restore


@pytest.mark.ranks(2, 4)
@pytest.mark.requires("root")
@pytest.mark.usefixtures("closed_proc")
def test_descriptors_are_sent_by_socket_where_proc_is_inaccessible(world, monkeypatch):
    peer = world.sendrecv(os.getpid(), (world.rank + 1) % world.size)
    with pytest.raises(OSError, match="Permission"):
        next(Path(f"/proc/{peer}/fd").iterdir())
    calls = []
    exchange = node_memory.exchange
    monkeypatch.setattr(
        node_memory, "exchange", lambda *args: calls.append(args) or exchange(*args)
    )
    before = descriptors_open()
    segments = allocate(world, 3 * MIB + 1)
    assert descriptors_open() == before
    assert calls
    check_shared(world, segments)


@pytest.mark.ranks(2, 4)
@pytest.mark.requires("root", "cluster")
@pytest.mark.usefixtures("closed_proc")
def test_missing_proc_and_sockets_raise_with_both_reasons_on_all_ranks(world):
    os.seteuid(0)
    with own_net():
        os.seteuid(NOBODY)
        before = descriptors_open()
        output = refusals(world, MIB)
        assert descriptors_open() == before
        os.seteuid(0)
    assert all("/proc/" in text and "Connection refused" in text for text in output)


@pytest.mark.ranks(2, 3)
def test_connections_with_a_wrong_token_are_rejected(world, monkeypatch):
    real = node_memory._send

    def send_junk_first(descriptor, doors):
        fakes = [(address, b"x" * len(token)) for address, token in doors]
        return real(sys.stdout.fileno(), fakes) or real(descriptor, doors)

    monkeypatch.setattr(node_memory, "_send", send_junk_first)
    with Path(os.devnull).open() as file:
        monkeypatch.setattr(sys, "stdout", file)
        mine = os.memfd_create("mine")
        os.write(mine, bytes([world.rank]))
        before = descriptors_open()
        found = node_memory.exchange(world, mine)
        assert [os.pread(one, 9, 0) for one in found] == [bytes([r]) for r in range(world.size)]
        assert not any(os.get_inheritable(one) for one in found)
        for one in found:
            os.close(one)
        assert descriptors_open() == before
        os.close(mine)


@pytest.mark.ranks(2, 3)
def test_exchange_without_senders_times_out(world, monkeypatch):
    monkeypatch.setattr(node_memory, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(node_memory, "_send", lambda *_: None)
    with Path(os.devnull).open() as file, pytest.raises(OSError, match=r"timed out|within"):
        node_memory.exchange(world, file.fileno())
    world.Barrier()


@pytest.mark.ranks(2, 3, 4)
def test_failed_reservation_raises_on_all_ranks_with_the_remedy(world):
    before = descriptors_open()
    with largest_file(MIB) if world.rank == world.size - 1 else nullcontext():
        output = refusals(world, 2 * MIB)
    assert len(set(output)) == 1
    assert f"local rank {world.size - 1} cannot reserve 2.0 MiB of node memory: " in output[0]
    assert "File too large; give the job more memory" in output[0]
    assert descriptors_open() == before
    check_shared(world, allocate(world, 2 * MIB))


REFUSED = """
from hpctrain.core.errors import NodeMemoryError
from hpctrain.runtime.world import current
from tests.doctor.refuse import install

lines = []
for answer in ("ENOSPC", "EINVAL", "EOPNOTSUPP"):
    if rank == 1:
        install("fallocate", answer)
    try:
        bucket = current().comm.new_bucket(1 << 18, torch.float32)
    except NodeMemoryError as error:
        lines.append(str(error))
        continue
    bucket.flat.fill_(1)
    current().comm.allreduce_(bucket).wait()
    lines.append(str(bucket.flat.unique().tolist()))
sys.stdout.write("|".join([str(rank), *lines]) + "\\n")
"""


@pytest.mark.launches
def test_failed_allocation_raises_on_every_rank_and_statistics_are_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_STATS", "1")
    outcome = run_ranks(tmp_path, REFUSED)
    message = sorted(line.split("|") for line in outcome.out.splitlines())
    assert [words[0] for words in message] == ["0", "1"], outcome.err
    for _, full, refused, without in message:
        for text, why in ((full, "No space left on device"), (refused, "Invalid argument")):
            assert "local rank 1 cannot reserve 1.0 MiB of node memory: [Errno" in text
            assert why in text
            assert "or set HPCTRAIN_SHARED_MEMORY=off" in text
        assert without == "[2.0]"  # libc allocates the pages by storing to each
    assert outcome.err.count("communication of 2 ranks") == 1


class Group:
    """Hold a memory control group, version 1 or 2, with the ranks of a test."""

    def __init__(self, base: Path, name: str, limit_name: str) -> None:
        self.base, self.folder, self.limit_name = base, base / name, limit_name
        self.before = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ("memory" in line.split(":")[1]) == (limit_name == "memory.limit_in_bytes")
        )

    def join(self, limit_bytes: int) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / self.limit_name).write_text(str(limit_bytes))
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        (self.base / self.before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))

    def num_killed(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            if (file := self.folder / name).exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts["oom_kill"])
        raise AssertionError(f"no count of kills in {self.folder}")


@pytest.fixture
def group(world) -> Generator[Group]:
    name = world.bcast(f"hpctrain-test-{os.getpid()}")
    root = Path("/sys/fs/cgroup")
    if (root / "memory/memory.limit_in_bytes").exists():
        made = Group(root / "memory", name, "memory.limit_in_bytes")
    else:
        made = Group(root, name, "memory.max")
    made.folder.mkdir(exist_ok=True)
    yield made
    made.leave()
    world.Barrier()
    if world.rank == 0:
        made.folder.rmdir()


@pytest.mark.ranks(2, 4)
@pytest.mark.requires("root", "memory-cgroup")
def test_memory_limit_is_checked_for_the_sum_over_ranks(world, group):
    group.join(160 * MIB)
    world.Barrier()
    left_bytes = min(world.allgather(available_bytes()))
    assert left_bytes <= 160 * MIB
    most_bytes = (left_bytes // world.size - SPARE_BYTES) * ENTRY_FACTOR
    most_bytes //= ENTRY_FACTOR + world.size
    output = refusals(world, most_bytes + MIB)
    assert all("but the control group" in text for text in output)
    assert all(str(group.folder) in text for text in output)
    check_shared(world, allocate(world, most_bytes - MIB))
    assert group.num_killed() == 0
    world.Barrier()
