"""Check that abandoned MPI operations keep their memory and their communicator."""

import ast
import gc
import pickle
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpctrain
from hpctrain.comm import requests
from hpctrain.comm.call_check import call_of, check_call, disagreement
from hpctrain.comm.direct_messages import Channel
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail.rail import MpiWire, Rail
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import RankLostError

SUM = combination(torch.float32, Op.SUM)
CALL = call_of("a call of this test")
SMALL, LARGE = 16, 100_000  # bytes sent with the message header, and bytes fetched later


def impatient():
    return Watch(timeout_s=0.2)


def receive_with_a_timeout(comm, num_bytes):
    MpiWire(comm, watch=impatient()).receive_(torch.zeros(num_bytes, dtype=torch.uint8), 1)


def receive_with_an_error(comm, num_bytes):
    MpiWire(comm).start_receive(torch.zeros(num_bytes, dtype=torch.uint8), 1)
    raise ZeroDivisionError


def receive_with_an_interrupt(comm, num_bytes):
    def interrupted(*arguments):
        comm.Irecv(*arguments)  # the request is lost, as when a signal arrives at this point
        raise KeyboardInterrupt

    requests.start(comm, interrupted, bytearray(num_bytes), 1)


def send(comm, num_bytes):
    if comm.rank == 1:
        MpiWire(comm, watch=impatient()).send(torch.ones(num_bytes, dtype=torch.uint8), 0)


def come_to_a_meeting(comm, _):
    check_call(comm, CALL, impatient())


def compare_calls(comm, _):
    disagreement(comm, CALL, impatient())


def reduce_in_parts(comm, num_bytes):
    rail = Rail(comm, table=SizeTable(((0, "ring"),)), chunk_bytes=num_bytes, watch=impatient())
    rail.reduce_(torch.ones(num_bytes), SUM)


def receive_half_a_message(comm, _):
    channel = Channel(comm, 0, fence=None)
    while not requests.pending(comm):
        channel.receive()


def send_first_half(comm, num_bytes):
    comm.Send([pickle.dumps(("content", [(num_bytes, torch.uint8)])), MPI.BYTE], 0, 0)


def send_second_half(comm, num_bytes):
    if comm.rank == 1:
        MpiWire(comm, watch=impatient()).send(torch.ones(num_bytes, dtype=torch.uint8), 0, 1)


def nothing(comm, num_bytes):
    """Do nothing."""


WAYS = {  # abandoned by rank 0, called earlier by rank 1, called later by the others
    "a receive, by a timeout": (receive_with_a_timeout, nothing, send),
    "a receive, by an error": (receive_with_an_error, nothing, send),
    "a receive, by an interrupt": (receive_with_an_interrupt, nothing, send),
    "a message to a server": (receive_half_a_message, send_first_half, send_second_half),
    "parts of a sum": (reduce_in_parts, nothing, reduce_in_parts),
    "a meeting": (come_to_a_meeting, nothing, come_to_a_meeting),
    "the texts of calls": (compare_calls, nothing, compare_calls),
}


def canaries_of(num_bytes):
    """Allocate and fill all freed memory blocks of this size."""
    return [
        make
        for _ in range(30)
        for make in (
            bytearray(b"\7" * num_bytes),
            np.full(num_bytes, 7, np.uint8),
            torch.full((num_bytes,), 7, dtype=torch.uint8).numpy(),
        )
    ]


def let_the_library_go_on(world):
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        world.Iprobe()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("way", WAYS)
def test_late_data_are_written_to_memory_that_is_still_owned(world, way, num_bytes):
    give_up, begin, come = WAYS[way]
    comm = world.Dup()
    canaries = []
    if world.rank == 1:
        begin(comm, num_bytes)
    if world.rank == 0:
        with suppress(RankLostError, ZeroDivisionError, KeyboardInterrupt):
            give_up(comm, num_bytes)
        gc.collect()
        canaries = canaries_of(num_bytes) + canaries_of(400 * world.size)
    world.Barrier()
    if world.rank > 0:
        with suppress(RankLostError):
            come(comm, num_bytes)
    world.Barrier()
    let_the_library_go_on(world)
    assert all((np.frombuffer(canary, np.uint8) == 7).all() for canary in canaries)


@pytest.mark.ranks(2, 3)
def test_an_unused_communicator_is_freed(world):
    comm = world.Dup()
    if world.rank == 0:
        with suppress(RankLostError):
            check_call(comm, CALL, impatient())
        requests.free(comm)
        assert comm != MPI.COMM_NULL  # otherwise the library would crash when the others call
        world.Barrier()
        while requests.pending(comm):
            for request in requests.pending(comm):
                request.Test()
    else:
        world.Barrier()
        check_call(comm, CALL, Watch())
    requests.free(comm)
    assert comm == MPI.COMM_NULL


@pytest.mark.ranks(2, 3)
def test_a_receive_is_withdrawn_before_its_communicator_is_freed(world):
    comm = world.Dup()
    with suppress(ZeroDivisionError):
        receive_with_an_error(comm, SMALL)
    assert len(requests.pending(comm)) == 1
    requests.free(comm)
    assert comm == MPI.COMM_NULL
    assert not requests.pending(comm)


@pytest.mark.ranks(2)
def test_abandoned_messages_are_released_once_they_were_sent(world):
    wire, num_messages = MpiWire(world), 1000
    most = 0
    for number in range(num_messages):
        if number % 100 == 0:
            world.Barrier()  # otherwise a receiver on a busy core is late for most messages
        if world.rank == 0:
            wire.start_send(torch.ones(SMALL), 1)
            most = max(most, len(requests.pending(world)))
        else:
            wire.receive_(torch.zeros(SMALL), 0)
    assert most < num_messages / 2


@pytest.mark.ranks(2)
def test_operation_rejected_by_mpi_is_not_pending(world):
    with pytest.raises(MPI.Exception):
        requests.start(world, world.Irecv, bytearray(SMALL), world.size)
    assert not requests.pending(world)


def test_every_nonblocking_operation_is_started_by_requests():
    starts = {name for name in dir(MPI.Comm) + dir(MPI.Message) if is_nonblocking(name)}
    assert {"Isend", "Irecv", "Ibarrier", "Iallreduce", "irecv"} <= starts
    found = [
        f"{path}:{node.lineno}"
        for path in Path(hpctrain.__file__).parent.rglob("*.py")
        if "mpi4py" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in starts
    ]
    assert not found, "start it by hpctrain.comm.requests.start"


def is_nonblocking(name):
    """Return True if a method of mpi4py returns a request, or a persistent request."""
    method = getattr(MPI.Intracomm, name, None) or getattr(MPI.Message, name)
    return any(kind in (method.__doc__ or "") for kind in ("-> Request", "-> Prequest"))
