"""The work of servers, and the number of their messages, in large worlds."""

import math
import random
from contextlib import nullcontext
from itertools import pairwise

import pytest

from hpctrain.async_sgd.requirements import Roles
from hpctrain.async_sgd.server import WorkerClocks
from hpctrain.async_sgd.server_messages import Push, Settle
from hpctrain.async_sgd.stale_synchronous import ClockedServer
from tests.harness.growth import num_operations


class Stub:
    """Slots without node memory, messages that are recorded, and a shard without parameters."""

    def __init__(self):
        self.replies, self.sent = self, []

    def __contains__(self, _):
        return False

    def of(self, *_):
        return ()

    parts = of
    on_copy = nullcontext

    def copy_to(self, _):
        return

    def step(self, *_):
        return

    def send(self, dest, reply, _=()):
        self.sent.append((dest, reply.clock))


def made(size, **options):
    stub = Stub()
    return ClockedServer(stub, stub, Roles.of(None, 0, size), stub, **options), stub.sent


def push(clock):
    return Push(clock, 0, 1.0, b"", [], reads=True, is_counted=False)


def test_operations_of_a_request_do_not_depend_on_the_number_of_workers():
    """Each worker sends two gradients, and waits for the slowest worker; then all settle."""

    def ratio(size):
        server, sent = made(size, bound=0)

        def run():
            for step in range(2):
                for worker in range(size):
                    server._execute(worker, push(step), ())
                    server._answer_waiting()
                assert sent == [(worker, step + 1) for worker in range(size)]
                sent.clear()
            for worker in range(size):
                server._execute(worker, Settle("the end"), ())
            assert sent == [(worker, 2) for worker in range(size)]

        return num_operations(run) / size

    assert ratio(2000) < 1.1 * ratio(200)


def test_workers_wait_for_the_first_worker_until_it_is_warm():
    server, sent = made(3, bound=5, warmup=2)
    order = [(1, 0), (2, 0), (0, 0), (0, 1)]
    seen = []
    for worker, step in order:
        server._execute(worker, push(step), ())
        server._answer_waiting()
        seen.append([*sent])
        sent.clear()
    assert seen == [[], [], [(0, 1)], [(1, 1), (2, 1), (0, 2)]]


def test_clocks_have_the_smallest_of_all_clocks():
    source = random.Random(5)
    plain = dict.fromkeys(range(20), 3)
    clocks = WorkerClocks(plain)
    while plain:
        worker = source.choice([*plain])
        if source.random() < 0.1:
            del plain[worker]
            clocks.remove(worker)
        else:
            plain[worker] += source.choice([0, 1, 1, 4])
            clocks.advance(worker, plain[worker])
        assert clocks.least == min(plain.values(), default=math.inf)
        assert all(clocks.of(each) == plain.get(each, math.inf) for each in range(20))
        limit = source.randrange(40)
        assert clocks.num_up_to(limit) == sum(each <= limit for each in plain.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 64, 1000, 16384])
def test_few_ranks_of_a_large_world_serve(size):
    roles = Roles.of(None, 0, size)
    assert roles.workers == [*range(size)]
    assert len(roles.servers) == min(size, 4 * size.bit_length())
    gaps = {b - a for a, b in pairwise([*roles.servers, size])}
    assert gaps <= {size // len(roles.servers), -(-size // len(roles.servers))}
