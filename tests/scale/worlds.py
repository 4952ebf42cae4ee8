"""Worlds of simulated ranks: the package runs on them as on ranks of MPI, with virtual time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from hpctrain.cluster.process import ProcessIdentity
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm import (
    factory,
    flight_recorder,
    liveness,
    node_processes,
    requests,
    survivors,
    waiting,
    watched_calls,
)
from hpctrain.comm.control_channel import mailbox
from hpctrain.comm.control_channel.mailbox import Tree
from hpctrain.comm.waiting import Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.config import Settings
from hpctrain.core.pickles import unpickled
from hpctrain.core.units import format_numbers, format_ranks
from hpctrain.negotiation import stall
from hpctrain.runtime import initialization, process_set_table, recovery, world
from hpctrain.runtime.attachments import Origin
from tests.scale.engines import RANKS_PER_NODE, all_trees
from tests.scale.network import Network, Traffic
from tests.scale.rank_threads import RankThreads
from tests.scale.simulated_mpi import Members, SimulatedComm

T = TypeVar("T")

EXACT = 64
"""Up to this number of ranks, each rank receives its own copies of gathered objects."""
FIRST = Origin(given=None)
STATE = (
    (world, "_world", lambda: None),
    (survivors, "_in_use", list),
    (requests, "_pending", set),
)
_CLOCKED = [
    *("comm.waiting", "comm.liveness", "comm.blocks", "comm.node_processes", "comm.survivors"),
    *("negotiation.progress_engine", "negotiation.request", "negotiation.stall"),
    "negotiation.engine_driver",
]
"""Modules that read the virtual time instead of ``time``."""
_WAITING = [
    *("comm.waiting", "comm.liveness", "comm.direct_messages"),
    *("comm.control_channel.mailbox", "comm.control_channel.message_network"),
]
"""Modules whose waits let other ranks run."""
_THREADED = [
    *("comm.watched_calls", "negotiation.engine_driver"),
    *("runtime.process_set_table", "collectives.barrier"),
]
"""Modules that must not start threads."""


class SimulatedWorld:
    """The ranks of a world, each with a thread, and a function that starts them.

    Args:
        size: number of ranks.
        network: counts and delivers the messages.
        recovers: whether the world recovers from lost ranks.
        ranks_per_node: ranks per host; ranks of a host see each other's processes.
        patience_s: virtual time after which ranks that wait for ever are an error.
    """

    def __init__(
        self,
        size: int,
        network: Network | None = None,
        *,
        recovers: bool = False,
        ranks_per_node: int = RANKS_PER_NODE,
        patience_s: float = 20.0,
    ) -> None:
        self.size, self.network = size, network or Network(size)
        self.threads = RankThreads(self.network, STATE, patience_s)
        self.threads.on_death = self._on_death
        self._ranks_per_node = ranks_per_node
        self.members = Members(self.threads, range(size), has_ulfm=recovers)
        self.settings = Settings(
            shared_memory="off", probe="off", recover=recovers, check_weights="off"
        )
        self._topologies: dict[int, Topology] = {}
        self._hosts: dict[int, dict[int, str]] = {}
        self._trees: dict[int, dict[int, Tree]] = {}
        self._num_arrived, self._num_phases = 0, 0
        self.traffic: dict[str, Traffic] = {}
        """By the name passed to ``end_phase``: the messages since the previous phase."""

    def run(self, work: Callable[[SimulatedComm], T]) -> list[T]:
        """Return the results of ``work`` of all ranks, which gets the MPI communicator."""
        with self._patched():
            return self.threads.run(lambda rank: work(SimulatedComm(self.members, rank)))

    def init(self, comm: SimulatedComm, origin: Origin = FIRST) -> None:
        """Make the world of this rank, as ``hpctrain.init`` does. Collective."""
        hooks = SimpleNamespace(
            abort=lambda _: None,
            install=lambda: None,
            uninstall=lambda: None,
            last_words=[],
            communicates=None,
        )
        initialization._make(self.settings, comm, hooks, origin)

    def end_phase(self, name: str) -> None:
        """Wait for all ranks that are not lost, without messages; store the traffic so far."""
        number, self._num_arrived = self._num_phases, self._num_arrived + 1
        self._try_end_phase(name)
        while self._num_phases == number:
            self.threads.park()
            self._try_end_phase(name)

    def _try_end_phase(self, name: str) -> None:
        if self._num_arrived + len(self.network.lost) == self.size:
            self.network.run()  # deliver what is in flight
            self.traffic[name] = self.network.traffic()
            self.network.forget()
            self._num_arrived, self._num_phases = 0, self._num_phases + 1
            for rank in range(self.size):
                self.threads.wake(rank)

    def kill(self, rank: int) -> None:
        """End a rank; the other ranks detect it as they do a process that has ended."""
        self.threads.kill(rank)

    def _on_death(self, _: int) -> None:
        for rank in range(self.size):
            self.threads.wake(rank)

    # -- replacements -----------------------------------------------------------------------

    @contextmanager
    def _patched(self) -> Iterator[None]:
        def module(name: str) -> Any:
            return import_module(f"hpctrain.{name}")

        clock = SimpleNamespace(monotonic=self._now, perf_counter=self._now, sleep=self._sleep)
        changes = [(module(name), "time", clock) for name in _CLOCKED]
        changes += [(module(name), "wait_until", self._wait_until) for name in _WAITING]
        changes += [(module(name), "calls_from_threads", lambda: False) for name in _THREADED]
        changes += [
            (waiting, "yield_core", lambda: None),
            (node_processes, "identity", self._identity),
            (node_processes, "birth", lambda pid: None if pid in self.network.lost else 1),
            (node_processes, "os", SimpleNamespace(getpid=lambda: self.threads.rank)),
            (factory, "_facts", self._facts),
            (factory, "bound", lambda facts: facts),
            (factory, "bind", lambda _cores: None),
            (factory, "Topology", SimpleNamespace(from_facts=self._topology)),
            (factory, "Watch", self._watch),
            (mailbox, "tree_of", self._tree),
            (flight_recorder, "format_ranks", _cached(format_ranks)),
            (flight_recorder, "format_numbers", _cached(format_numbers)),
            (watched_calls.WatchedCalls, "allgather", _allgather),
            (liveness, "gather_bytes", _gather_bytes),
            (survivors, "lost", self._lost),
            (survivors, "failed", lambda ranks: ranks.members.lost()),
            (recovery, "_limited", lambda _: nullcontext()),
            (initialization, "atexit", SimpleNamespace(register=bool, unregister=bool)),
            (initialization, "_leave_before_finalize", lambda: None),
            (initialization, "_join", lambda _, *arguments: self.init(*arguments)),
            (initialization.logs, "setup", lambda *_, **__: None),
            (process_set_table, "SetMember", lru_cache(maxsize=None)(stall.SetMember)),
            (initialization, "_configure_torch", lambda _: None),
            (initialization, "set_torch_ranks", lambda *_: None),
        ]
        with ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(patch.object(owner, name, value))
            yield

    def _now(self) -> float:
        return self.network.clocks[self.threads.rank]

    def _sleep(self, seconds: float) -> None:
        self.network.clocks[self.threads.rank] += seconds

    def _wait_until(
        self,
        done: Callable[[], object],
        look: Callable[[float], object],
        pace: object,
        *,
        sleep: object = None,
        timeout_s: float = float("inf"),
    ) -> bool:
        del pace, sleep
        return self.threads.wait_until(done, look, timeout_s)

    def _identity(self) -> ProcessIdentity:
        rank = self.threads.rank
        return ProcessIdentity(rank, ("", rank // self._ranks_per_node))

    def _facts(self, _settings: Any) -> RankFacts:
        number = self.threads.rank // self._ranks_per_node
        return RankFacts(host=f"node{number}", cores=(self.threads.rank % 256,), launcher="srun")

    def _topology(self, facts: Any, rank: int, ranks_per_node: int | None = None) -> Topology:
        """Return the topology of a rank, whose lists of all ranks are one object for all ranks."""
        if (found := self._topologies.get(len(facts))) is None:
            found = Topology.from_facts(facts, rank, ranks_per_node)
            self._topologies[len(facts)] = found
        return replace(
            found, rank=rank, cores=facts[rank].cores, core_peers=(rank,), num_peer_cores=1
        )

    def _watch(self, *args: Any, **options: Any) -> Watch:
        """Create a watch, whose names of hosts are one object for all ranks."""
        if hosts := options.get("hosts"):
            options["hosts"] = self._hosts.setdefault(len(hosts), hosts)
        return Watch(*args, **options)

    def _tree(self, nodes: list[list[int]], rank: int) -> Tree:
        if len(nodes) not in self._trees:
            self._trees[len(nodes)] = all_trees(nodes)
        return self._trees[len(nodes)][rank]

    @staticmethod
    def _lost(before: SimulatedComm, left: SimulatedComm) -> list[int]:
        alive = {*left.members.world_ranks}
        return [rank for rank, one in enumerate(before.members.world_ranks) if one not in alive]


def _cached(function: Callable[[tuple[int, ...]], str]) -> Callable[[Any], str]:
    """Return ``function`` of a list of ranks, which is computed once for all ranks."""
    cached = lru_cache(function)
    return lambda ranks: cached(tuple(ranks))


_ALLGATHER, _GATHER_BYTES = WatchedCalls.allgather, liveness.gather_bytes


def _allgather(self: WatchedCalls, value: T) -> list[T]:
    if self.size <= EXACT:
        return _ALLGATHER(self, value)
    packed = watched_calls._packed(value)
    found = self._comm.gather_shared(packed, self._watch.wait, unpickled)
    self._watch.confirm()
    return found


def _gather_bytes(comm: SimulatedComm, mine: bytes, wait: Any, root: int | None = None) -> Any:
    if comm.size <= EXACT or root is not None:
        return _GATHER_BYTES(comm, mine, wait, root)
    return comm.gather_shared(mine, wait)
