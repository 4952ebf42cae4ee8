"""Spare ranks, which wait to replace lost ranks.

A launch has workers and spares in one communicator, workers first. When workers die, the surviving
workers revoke the communicator, which wakes the spares. All survivors shrink the communicator.
Then the first spares become workers, ranked after the surviving workers, so that the world keeps
its size. A stopped spare (SIGSTOP) would block all ranks, so it is killed first.
"""

import itertools
import math
import os
import platform
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI, is_loss
from hpctrain.comm.node_processes import NodeProcesses
from hpctrain.comm.survivors import remake, revoke, shrink
from hpctrain.comm.waiting import Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import ConfigError, RankLostError
from hpctrain.core.logs import logger

LOOK_S = 0.05  # polling interval of a spare
END_S = 10.0  # longest wait for spares to receive the end of the run
_LEADER, _END = 0, 1  # rank that reports the end of the run, and the tag


class Spares:
    """Divides the ranks of a launch into workers and spares, and replaces lost workers.

    The constructor is collective over all ranks of the launch. Spares are distributed evenly over
    the hosts if possible.

    Args:
        whole: all ranks of the launch.
        num_spares: number of spares.
        timeout_s: longest wait for a rank.

    Raises:
        ConfigError: fewer than two workers would remain; on every rank.
        RankLostError: a rank arrives later than ``timeout_s``.
    """

    def __init__(self, whole: MPI.Intracomm, num_spares: int, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._num_workers = whole.size - num_spares
        if self._num_workers < 2:
            raise ConfigError(
                f"two or more ranks must remain as workers, got {whole.size} ranks with "
                f"{num_spares} spares; start more ranks, or omit --spares"
            )
        hosts = self._watched(whole).allgather(platform.node())
        self._arrange(whole, is_worker=whole.rank in workers_of(hosts, self._num_workers))

    def _watched(self, comm: MPI.Intracomm) -> WatchedCalls:
        # A watch per communicator: a failure of a lost world must not affect the next one.
        return WatchedCalls(comm, Watch(rank=comm.rank, timeout_s=self._timeout_s))

    def _arrange(self, whole: MPI.Intracomm, *, is_worker: bool) -> None:
        key = whole.rank if is_worker else whole.size + whole.rank
        self._whole = cast("MPI.Intracomm", self._watched(whole).split(0, key))
        calls = self._watched(self._whole)
        self.is_worker = self._whole.rank < self._num_workers
        color = 0 if self.is_worker else MPI.UNDEFINED
        self.workers = calls.split(color, self._whole.rank) or MPI.Intracomm()
        """Communicator of the workers; ``MPI.COMM_NULL`` on spares."""
        self._processes = NodeProcesses.of(calls)

    def replace(self, make: Callable[[MPI.Intracomm], object]) -> None:
        """Replace lost workers by spares. Collective over all survivors.

        Args:
            make: called on workers with their new communicator; see ``survivors.remake``.
        """

        def arranged(whole: MPI.Intracomm) -> None:
            self._arrange(whole, is_worker=self.is_worker)
            if self.is_worker:
                make(self.workers)

        with self._without_stopped():
            revoke(self._whole)
            remake(shrink(self._whole), arranged)

    @contextmanager
    def _without_stopped(self) -> Iterator[None]:
        """On a worker, kill stopped spares of this host during the block."""
        is_over, end_stopped = threading.Event(), self._end_stopped if self.is_worker else bool

        def look() -> None:
            end_stopped()
            while not is_over.wait(LOOK_S):
                end_stopped()

        watch = threading.Thread(target=look, daemon=True)
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()

    def _end_stopped(self) -> None:
        """Kill the spares of this host that are stopped by SIGSTOP. Not collective."""
        for rank, pid in self._processes.stopped().items():
            if rank >= self._num_workers:
                logger.warning(
                    "process %d of this host, a spare rank, was stopped by a signal and is killed",
                    pid,
                )
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self, make: Callable[[MPI.Intracomm], object]) -> bool:
        """Wait until this rank becomes a worker or the run ends. Not collective.

        Args:
            make: see ``replace``.

        Returns:
            True if this rank is a worker, False if the run has ended.

        Raises:
            RankLostError: all workers died.
        """
        while not self.is_worker:
            time.sleep(LOOK_S)
            try:
                if notice := self._whole.Improbe(_LEADER, _END):
                    notice.Recv([bytearray(), MPI.BYTE])
                    return False
            except MPI.Exception as error:
                if not is_loss(error):
                    raise
                self._check_workers()
            if self._whole.Is_revoked():
                self.replace(make)
        return True

    def _check_workers(self) -> None:
        workers = self._whole.Get_group().Incl(range(self._num_workers))
        lost = MPI.Group.Intersection(workers, self._whole.Get_failed())
        if lost.size == self._num_workers:
            raise RankLostError(
                f"all {lost.size} workers died while this spare waited; read the last output of "
                f"the workers"
            )

    def end(self) -> None:
        """Report the end of the run to the spares. Called by all workers."""
        self._end_stopped()
        if self._whole.rank != _LEADER:
            return
        limit = time.monotonic() + END_S
        for rank in range(self._num_workers, self._whole.size):
            try:
                call = self._whole.Issend
                notice = requests.start(self._whole, call, [b"", MPI.BYTE], rank, _END)
                while not notice.Test() and time.monotonic() < limit:
                    time.sleep(LOOK_S / 10)
            except MPI.Exception as error:
                if not is_loss(error):
                    raise
                logger.warning("a spare rank died before it was needed")


def workers_of(hosts: Sequence[str], num_workers: int) -> list[int]:
    """Return the ranks that are workers, given the host of each rank; the others are spares."""
    places = defaultdict[str, "itertools.count[int]"](itertools.count)
    turns = sorted((next(places[host]), rank) for rank, host in enumerate(hosts))
    return [rank for _, rank in turns[:num_workers]]
