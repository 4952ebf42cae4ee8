"""Check that the number of messages of a world of N ranks grows with N log N."""

import math
import queue
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from mpi4py import MPI

from hpctrain.comm import watched_calls
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.waiting import Watch
from hpctrain.comm.watched_calls import WatchedCalls, alltoall_bytes, gather_bytes
from hpctrain.launch import mpiexec
from tests.processes import ended

STEP = """
import torch
import hpctrain as hvd

hvd.init()
model = torch.nn.Linear(3, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(2, 3) * hvd.rank()).sum().backward()
optimizer.step()
assert not hvd.should_stop()
"""
CHECKPOINT = """
import sys
import torch
import hpctrain as hvd
from hpctrain import checkpoint
from hpctrain.checkpoint import Shard, TensorPiece
from hpctrain.runtime.world import current

hvd.init()
rank, size, comm = hvd.rank(), hvd.size(), current().comm
shard = Shard((size, 3), (rank, 0), (1, 3))
state = {"w": torch.ones(5), "rows": TensorPiece(torch.full((1, 3), float(rank)), shard)}
checkpoint.save(sys.argv[1], state, comm, step=1, private={"rank": rank}, files="rank")
loaded = checkpoint.load(sys.argv[1], comm, into={"rows": shard})
assert loaded.state["rows"].tensor.tolist() == [[rank] * 3]
assert loaded.private[rank] == {"rank": rank}
"""
MOST = 95
"""Bound of the messages of a program, divided by N log2(N), for any N."""


@pytest.mark.launches
@pytest.mark.requires("recovery")  # Open MPI 5, which counts messages
@pytest.mark.parametrize(
    "size", [*(pytest.param(n, marks=pytest.mark.conformance) for n in (2, 3)), 4]
)
@pytest.mark.parametrize("program", [STEP, CHECKPOINT], ids=["step", "checkpoint"])
def test_a_world_sends_messages_in_proportion_to_n_log_n(size, program, tmp_path):
    counting = {
        "OMPI_MCA_pml_monitoring_enable": "2",
        "OMPI_MCA_pml_monitoring_enable_output": "3",
        "OMPI_MCA_pml_monitoring_filename": str(tmp_path / "messages"),
    }
    nodes = size if program == CHECKPOINT else 1  # ranks without common memory send messages
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", size, "--nodes", nodes, "--"]
    environ = mpiexec.environment() | counting | {"HPCTRAIN_PROBE": "off"}
    command = [*line, sys.executable, "-c", program, tmp_path / "a"]
    done = ended(command, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    tables = [path.read_text() for path in tmp_path.glob("messages.*.prof")]
    assert len(tables) == size
    num = sum(num_sent(table) for table in tables)
    assert size < num < MOST * size * math.log2(size)


def num_sent(table: str) -> int:
    """Return the number of messages in a table of Open MPI's monitoring component."""
    columns = [line.split("\t") for line in table.partition("# OSC")[0].splitlines()]
    return sum(int(each[4].split()[0]) for each in columns if each[0] in ("I", "E"))


class CountingComm:
    """MPI communicator that counts sends."""

    num_sends = 0

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        self.num_sends += name == "Isend"
        assert name in {"Isend", "Improbe", "rank", "size"}, f"{name} may send more messages"
        return getattr(self.comm, name)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("message_bytes", [1 << 30, 64])
def test_objects_are_gathered_by_few_messages(world, monkeypatch, message_bytes):
    monkeypatch.setattr(watched_calls, "MESSAGE_BYTES", message_bytes)
    comm = CountingComm(world.Dup())
    calls, rank, size = WatchedCalls(comm, Watch()), world.rank, world.size
    source = random.Random(message_bytes)
    for number in range(20):
        objects = [source.randbytes(source.choice([0, 1, 1000, 50_000])) for _ in range(size)]
        assert calls.allgather(objects[rank]) == objects
        root = number % size
        assert calls.gather(objects[rank], root) == (objects if rank == root else None)
    if message_bytes > 64:
        most = 20 * (math.ceil(math.log2(size)) + (size > 1))
        assert comm.num_sends <= most
        assert sum(world.allgather(comm.num_sends)) == 20 * (
            size * math.ceil(math.log2(size)) + size - 1
        )
    comm.comm.Free()


@pytest.mark.ranks(1, 2, 3, 4)
def test_an_exchange_sends_no_message_to_ranks_without_data(world):
    """Each rank sends rows to the next rank only."""
    comm = MpiCommunicator(world.Dup())
    comm._calls._comm = counting = CountingComm(comm._calls._comm)
    rank, size, sent = comm.rank, comm.size, []
    start_send = comm.wire.start_send
    comm.wire.start_send = lambda *args: sent.append(args[1]) or start_send(*args)
    after, before = (rank + 1) % size, (rank - 1) % size
    rows = [torch.full((2, 3) if r == after else (0, r), float(rank)) for r in range(size)]
    received = comm.alltoall(rows)
    shapes = [(2, 3) if r == before else (0, rank) for r in range(size)]
    assert [tuple(part.shape) for part in received] == shapes
    assert torch.equal(received[before], torch.full((2, 3), float(before)))
    assert sent == [after] * (size > 1)
    assert counting.num_sends == math.ceil(math.log2(size))
    comm.close()


class Finished:
    """A finished MPI request."""

    def Test(self, _=None):  # noqa: N802 - the name in MPI
        return True


class Arrived:
    """A matched MPI message."""

    def __init__(self, message):
        self.message = message

    def Irecv(self, buffer):  # noqa: N802 - the name in MPI
        buffer[0][:] = self.message
        return Finished()


class SimulatedComm:
    """MPI communicator of one of many ranks in a process, each on a thread."""

    def __init__(self, queues, rank, size):
        self.queues, self.rank, self.size = queues, rank, size
        self.num_sends = 0

    def Isend(self, buffer, dest):  # noqa: N802 - the name in MPI
        self.num_sends += 1
        self.queues[self.rank, dest].put(bytes(buffer[0]))
        return Finished()

    def Improbe(self, source, _, status):  # noqa: N802 - the name in MPI
        with suppress(queue.Empty):
            message = self.queues[source, self.rank].get_nowait()
            status.Set_elements(MPI.BYTE, len(message))
            return Arrived(message)
        return None


@pytest.mark.parametrize("size", [5, 7, 8, 17, 33])
def test_many_ranks_gather_bytes_by_few_messages(size):
    texts = [b"%d" % rank * (rank % 4) for rank in range(size)]
    for root in (None, 0, size // 2, size - 1):
        queues = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        comms = [SimulatedComm(queues, rank, size) for rank in range(size)]

        def gather(comm, root=root):
            parts = gather_bytes(comm, texts[comm.rank], wait, root)
            return [bytes(part) for part in parts]

        with ThreadPoolExecutor(size) as threads:
            found = list(threads.map(gather, comms))
        assert found == [texts if root in (None, rank) else [] for rank in range(size)]
        assert all(each.empty() for each in queues.values())
        num_sends = sum(comm.num_sends for comm in comms)
        assert num_sends == (size * math.ceil(math.log2(size)) if root is None else size - 1)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 17, 33])
def test_many_ranks_exchange_bytes_by_few_messages(size):
    queues = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    comms = [SimulatedComm(queues, rank, size) for rank in range(size)]

    def exchange(comm):
        given = [b"%d to %d" % (comm.rank, dest) * (dest % 3) for dest in range(size)]
        return [bytes(part) for part in alltoall_bytes(comm, given, wait)]

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(exchange, comms))
    for rank, received in enumerate(found):
        assert received == [b"%d to %d" % (source, rank) * (rank % 3) for source in range(size)]
    assert all(each.empty() for each in queues.values())
    assert all(comm.num_sends == (size - 1).bit_length() for comm in comms)


def wait(done):
    while not done():
        time.sleep(1e-4)
