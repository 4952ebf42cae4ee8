"""Simulate many ranks in one process, with threads and with queues as wires, to run algorithms."""

import queue
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from hpctrain.comm.rail.wire import Wire

PATIENCE_S = 10.0  # a longer wait is a deadlock


@dataclass(eq=False)
class Message:
    tensor: Tensor
    taken: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Receive:
    tensor: Tensor
    way: tuple[int, int, int]
    arrived: bool = False


class Network:
    """Hold the queues of all connections: sender, receiver, tag.

    In eager mode, a message is copied from its tensor at once, and delivered as soon as a matching
    receive is posted. In the other mode, a message is copied when its receive completes, so each
    wait depends on the other side. Wrong orders of waits and wrong uses of buffers cause errors in
    one of the two modes.
    """

    def __init__(self, *, eager: bool):
        self.eager = eager
        self.ways = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()

    def way(self, *key):
        with self.lock:
            return self.ways[key]

    def num_left(self):
        return sum(way.qsize() for way in self.ways.values())


class SimulatedWire(Wire):
    """Wire of one rank that sends over a ``Network``."""

    def __init__(self, network, rank, size):
        self.network, self.rank, self.size = network, rank, size
        self.num_bytes_sent = 0
        self.num_messages = 0
        self.expected = Counter()
        self.under_way = {}

    def start_send(self, tensor, dest, tag=0):
        assert dest != self.rank
        self.num_bytes_sent += tensor.numel() * tensor.itemsize
        self.num_messages += 1
        message = Message(tensor.clone() if self.network.eager else tensor)
        self._claim(message, tensor)
        if self.network.eager:
            message.taken.set()
        self.network.way(self.rank, dest, tag).put(message)
        return message

    def start_receive(self, tensor, source, tag=0):
        receive = Receive(tensor, (source, self.rank, tag))
        self._claim(receive, tensor)
        if self.network.eager and not self.expected[receive.way]:
            self._take(receive, wait=False)
        self.expected[receive.way] += not receive.arrived
        return receive

    def finish(self, transfer):
        if isinstance(transfer, Message):
            assert transfer.taken.wait(PATIENCE_S), f"rank {self.rank}: no rank receives a message"
        elif not transfer.arrived:
            self._take(transfer, wait=True)
            assert transfer.arrived, f"rank {self.rank}: no message on {transfer.way}"
            self.expected[transfer.way] -= 1
        del self.under_way[transfer]

    def _claim(self, transfer, tensor):
        """Check that unfinished transfers share memory only if all of them read it."""
        first = tensor.data_ptr()
        mine = first, first + tensor.numel() * tensor.itemsize
        for other, theirs in self.under_way.items():
            apart = mine[1] <= theirs[0] or theirs[1] <= mine[0]
            assert apart or (isinstance(transfer, Message) and isinstance(other, Message))
        self.under_way[transfer] = mine

    def _take(self, receive, *, wait):
        way = self.network.way(*receive.way)
        try:
            message = way.get(timeout=PATIENCE_S) if wait else way.get_nowait()
        except queue.Empty:
            return
        assert message.tensor.numel() == receive.tensor.numel()
        receive.tensor.copy_(message.tensor)
        receive.arrived = True
        message.taken.set()


def run_ranks(size, work, *, eager):
    """Run ``work(wire)`` on ``size`` ranks; no message may be left in any queue.

    Returns:
        The result of each rank, and its wire.
    """
    network = Network(eager=eager)
    wires = [SimulatedWire(network, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(work, wires))
    assert network.num_left() == 0
    assert not any(wire.under_way for wire in wires)
    return results, wires
