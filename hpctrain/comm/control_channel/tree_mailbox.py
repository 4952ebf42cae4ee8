"""Mailboxes by rings inside the node and by MPI between nodes, and one bell for all of them."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.comm.control_channel.message_tree import Tree
from hpctrain.comm.control_channel.ring import Inlet, Outlet
from hpctrain.comm.node.semaphore import Semaphore
from hpctrain.comm.waiting import NAP_S, NAP_SHARE, SLICE_S, SPIN_S
from hpctrain.comm.watch import Watch

if TYPE_CHECKING:
    from hpctrain.comm.control_channel.message_network import Network

_IDLE_NAP_S = 20e-3
"""Between two looks at the network where nobody waits: they take a thousandth of the time."""
_FLUSH_S = 1e-3
"""Between two looks whether large messages have left."""
_SLEEP_S = 60.0
"""Longest sleep without a network that nobody watches."""


class Edge(NamedTuple):
    """A neighbour on the same node."""

    outlet: Outlet
    inlet: Inlet


class TreeMailbox:
    """See ``Post``."""

    def __init__(
        self,
        tree: Tree,
        edges: Mapping[int, Edge],
        bell: Semaphore,
        *,
        network: "Network | None" = None,
        watch: Watch,
        spin: bool,
    ) -> None:
        """Take the ways to the neighbours.

        Args:
            tree: of all ranks.
            edges: the neighbours on this node, by rank; the others are reached by ``network``.
            bell: of this process.
            network: None where all neighbours are on this node.
            watch: looks at the others during sleeps.
            spin: whether each rank has a core of its own.
        """
        self.tree = tree
        self._outlets = {rank: edge.outlet for rank, edge in edges.items()}
        self._ways_out = tuple(self._outlets.values())
        self._ways_down = tuple(
            outlet for rank, outlet in self._outlets.items() if rank in tree.children
        )
        self._inlets = [(rank, edge.inlet.receive) for rank, edge in edges.items()]
        self._bell = bell
        self._try_wait = bell.try_wait
        self._network = network
        self._watch = watch
        self._spin_s = SPIN_S if spin else 0.0
        self._inbox: list[tuple[int, bytes]] = []

    def send(self, to: int, message: bytes) -> None:
        """Write into the ring, or hand over to MPI."""
        outlet = self._outlets.get(to)
        if outlet is not None:
            outlet.send(message)
        else:
            assert self._network is not None and to in self.tree.neighbours  # noqa: PT018
            self._network.send(to, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Empty the rings and the inbox of the network."""
        self._push()
        found, self._inbox = self._inbox, []
        for rank, receive in self._inlets:
            messages = receive()
            if messages is not None:
                found += [(rank, message) for message in messages]
        network = self._network
        if network is not None and network.look():
            found += network.inbox
            network.inbox.clear()
        return found

    def flush(self, *, down: bool = False) -> None:
        """Read meanwhile, so that neighbours that send too get on."""
        start = time.perf_counter()
        woken = False
        while self._is_sending(down=down):
            self._inbox = self.receive()
            if self._is_sending(down=down):
                woken |= self._bell.wait(_FLUSH_S)
                self._watch.look(time.perf_counter() - start)
        if woken:
            self.ring()  # it may have been for somebody else

    def sleep(self, timeout_s: float, *, watch: bool = True, spin: bool = True) -> bool:
        """Try the bell; stay awake for a moment; then sleep until it rings."""
        self._push()
        if self._something_came() or self._inbox:
            return True
        start = time.perf_counter()
        came = spin and self._spin(start + min(self._spin_s, timeout_s))
        if not came:
            came = self._rest(start, timeout_s, watch=watch)
        if watch:
            self._watch.waited_s += time.perf_counter() - start
        return came

    def ring(self) -> None:
        """Post the semaphore that ``sleep`` waits for."""
        self._bell.post()

    def close(self) -> None:
        """Free what MPI holds; memory lives as long as something refers to it."""
        if self._network is not None:
            self._network.close(self._watch)
            self._network = None

    def _is_sending(self, *, down: bool) -> bool:
        for outlet in self._ways_down if down else self._ways_out:
            if outlet.is_stuck:
                return True
        if self._network is None:
            return False
        return self._network.is_sending(self.tree.children if down else None)

    def _push(self) -> None:
        for outlet in self._ways_out:
            if outlet.is_stuck:
                outlet.push()

    def _something_came(self) -> bool:
        if self._try_wait():
            while self._try_wait():  # one look finds all that was rung for
                pass
            return True
        return self._network is not None and self._network.look()

    def _spin(self, end: float) -> bool:
        while time.perf_counter() < end:
            if self._something_came():
                return True
        return False

    def _rest(self, start: float, timeout_s: float, *, watch: bool) -> bool:
        now = time.perf_counter()
        next_look = start + SLICE_S
        while now < start + timeout_s:
            nap_s = min(self._nap_s(now - start, watch=watch), start + timeout_s - now)
            if self._bell.wait(nap_s) or self._something_came():
                self._something_came()
                return True
            now = time.perf_counter()
            if watch and now >= next_look:
                self._watch.look(now - start)
                next_look = now + SLICE_S
        return False

    def _nap_s(self, waited_s: float, *, watch: bool) -> float:
        if self._network is None:
            return SLICE_S if watch else _SLEEP_S
        shortest, longest = NAP_S
        return min(max(NAP_SHARE * waited_s, shortest), longest if watch else _IDLE_NAP_S)
