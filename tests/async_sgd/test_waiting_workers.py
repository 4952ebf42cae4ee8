"""The work of a server on workers that wait for the slowest worker."""

from hpctrain.async_sgd.requirements import Roles
from hpctrain.async_sgd.stale_synchronous import ClockedServer


class Clocks(dict):
    """Clocks of all workers; counts those that are read."""

    num_read = 0

    def values(self):
        self.num_read += len(self)
        return super().values()


def test_a_request_reads_each_clock_once_while_all_workers_wait():
    size = 1000
    server = ClockedServer.__new__(ClockedServer)
    server._roles, server._bound, server.warmup = Roles.of(None, 0, size), 0, 0
    server._clocks = Clocks(dict.fromkeys(range(size), 1) | {size - 1: 0})
    server._waiting = dict.fromkeys(range(size - 1), 1)
    server._answer_waiting()
    assert len(server._waiting) == size - 1
    assert server._clocks.num_read <= size
