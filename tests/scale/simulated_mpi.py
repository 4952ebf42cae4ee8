"""MPI communicators of simulated ranks, with the methods of mpi4py that the package calls.

Messages between two ranks pass through the network one by one. A collective of the library is
complete when all ranks have called it; its messages are those of recursive doubling, or of a
binomial tree for a broadcast.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.scale.rank_threads import RankThreads

# ruff: noqa: N802 - the names in MPI

_TYPES = (MPI.FLOAT, "f4"), (MPI.DOUBLE, "f8"), (MPI.INT32_T, "i4"), (MPI.INT64_T, "i8")
OF_SURVIVORS = {"agree", "shrink"}
ANY = (MPI.ANY_SOURCE, MPI.ANY_TAG)


def log2(size: int) -> int:
    """Return the number of rounds of an algorithm that doubles its reach in each round."""
    return (size - 1).bit_length()


def _bytes_of(buffer: Any) -> memoryview:
    data = memoryview(buffer[0] if isinstance(buffer, list) else buffer)
    return data.cast("B") if data.nbytes else memoryview(bytearray())


def _array_of(buffer: Any) -> np.ndarray:
    if isinstance(buffer, np.ndarray):
        return buffer
    data, _, kind = buffer
    return np.frombuffer(data, next(name for one, name in _TYPES if one == kind))


class _Collective:
    """A collective in progress."""

    def __init__(self, name: str, finish: Callable[[dict[int, Any]], Any], num_bytes: Any) -> None:
        self.name, self.finish, self.num_bytes = name, finish, num_bytes
        self.given = dict[int, Any]()
        """Arguments of the ranks that have called it."""
        self.is_done, self.result = False, None


class _Message:
    """A message that has arrived or is in flight, and the request of a synchronous sender."""

    def __init__(self, source: int, tag: int, data: bytes, sender: "_Send | None") -> None:
        self.source, self.tag, self.data, self.sender = source, tag, data, sender

    def take(self, buffer: Any, status: MPI.Status | None, threads: RankThreads) -> None:
        _bytes_of(buffer)[: len(self.data)] = self.data
        self.describe(status)
        if self.sender is not None:
            self.sender.is_done = True
            threads.wake(self.sender.rank)

    def describe(self, status: MPI.Status | None) -> None:
        if status is not None:
            status.Set_source(self.source)
            status.Set_tag(self.tag)
            status.Set_elements(MPI.BYTE, len(self.data))


class _Request:
    """Request of an operation: ``test`` returns True, or sets ``is_done``, once it is complete."""

    is_done = False

    def __init__(self, rank: int) -> None:
        self.rank = rank  # in the world

    def __bool__(self) -> bool:
        return not self.is_done

    def Test(self, _: MPI.Status | None = None) -> bool:
        return self.is_done


class _Send(_Request):
    """Request of a send, which is complete at once, or when the message is received."""


class _Receive(_Request):
    """Request of a receive; ``check`` raises if no message can arrive any more."""

    def __init__(self, rank: int, match: Any, take: Any, check: Callable[[], object]) -> None:
        super().__init__(rank)
        self._match, self._take, self._check = match, take, check

    def Test(self, status: MPI.Status | None = None) -> bool:
        if not self.is_done and (message := self._match()) is not None:
            self._take(message, status)
            self.is_done = True
        elif not self.is_done:
            self._check()
        return self.is_done

    def Cancel(self) -> None:
        self.is_done = True


class _Joined(_Request):
    """Request of a collective."""

    def __init__(self, rank: int, comm: "SimulatedComm", op: _Collective) -> None:
        super().__init__(rank)
        self._comm, self.op = comm, op

    def Test(self, _: MPI.Status | None = None) -> bool:
        self.is_done = self.op.is_done
        if not self.is_done:
            self._comm.require_alive()
        return self.is_done


class _Matched:
    """A message that ``Improbe`` has returned."""

    def __init__(self, rank: int, message: _Message, threads: RankThreads) -> None:
        self._rank, self._message, self._threads = rank, message, threads

    def Irecv(self, buffer: Any) -> _Request:
        self.Recv(buffer)
        request = _Send(self._rank)
        request.is_done = True
        return request

    def Recv(self, buffer: Any, status: MPI.Status | None = None) -> None:
        self._message.take(buffer, status, self._threads)


class Members:
    """What the ranks of one communicator share.

    Args:
        threads: the ranks.
        world_ranks: ranks of the communicator.
        has_ulfm: whether operations fail when a rank is lost.
    """

    def __init__(
        self, threads: RankThreads, world_ranks: Sequence[int], *, has_ulfm: bool
    ) -> None:
        self.threads, self.world_ranks, self.has_ulfm = threads, list(world_ranks), has_ulfm
        size = len(self.world_ranks)
        self.ops = dict[tuple[bool, int], _Collective]()
        self.numbers = [0] * size, [0] * size  # calls of each rank: usual, and of survivors
        self.inboxes = defaultdict[int, list[_Message]](list)
        self.is_revoked = False

    def lost(self) -> list[int]:
        """Return the lost ranks of the communicator."""
        lost = self.threads.network.lost
        return [rank for rank, one in enumerate(self.world_ranks) if one in lost] if lost else []

    def wake(self) -> None:
        for rank in self.world_ranks:
            self.threads.wake(rank)


class SimulatedComm:
    """Communicator of one rank; the methods are those of ``mpi4py.MPI.Intracomm``."""

    def __init__(self, members: Members, rank: int) -> None:
        self.members, self.rank, self.size = members, rank, len(members.world_ranks)
        self.world_rank = members.world_ranks[rank]
        self._threads, self._network = members.threads, members.threads.network

    # -- messages ---------------------------------------------------------------------------

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> _Request:
        return self._send(buffer, dest, tag, None)

    def Issend(self, buffer: Any, dest: int, tag: int = 0) -> _Request:
        return self._send(buffer, dest, tag, _Send(self.world_rank))

    def _send(self, buffer: Any, dest: int, tag: int, sender: _Send | None) -> _Request:
        message = _Message(self.rank, tag, bytes(_bytes_of(buffer)), sender)
        inbox, whom = self.members.inboxes[dest], self.members.world_ranks[dest]

        def deliver() -> None:
            inbox.append(message)
            self._threads.wake(whom)

        self._network.send(self.world_rank, whom, len(message.data), deliver)
        if sender is None:
            sender = _Send(self.world_rank)
            sender.is_done = True
        return sender

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> _Request:
        return _Receive(
            self.world_rank,
            lambda: self._match(source, tag),
            lambda message, status: message.take(buffer, status, self._threads),
            self.require_alive,
        )

    def Improbe(
        self, source: int = ANY[0], tag: int = ANY[1], status: MPI.Status | None = None
    ) -> _Matched | None:
        message = self._match(source, tag)
        if message is None:
            self.require_alive()
            return None
        message.describe(status)
        return _Matched(self.world_rank, message, self._threads)

    def Iprobe(self) -> bool:
        self.require_alive()
        return bool(self.members.inboxes[self.rank])

    def _match(self, source: int, tag: int) -> _Message | None:
        inbox = self.members.inboxes[self.rank]
        for place, one in enumerate(inbox):
            if source in (one.source, ANY[0]) and tag in (one.tag, ANY[1]):
                return inbox.pop(place)
        return None

    # -- collectives of the library ---------------------------------------------------------

    def _join(
        self,
        name: str,
        given: Any,
        finish: Callable[[dict[int, Any]], Any],
        num_bytes: int | Callable[[dict[int, Any]], int] = 0,
    ) -> _Joined:
        members = self.members
        number = members.numbers[name in OF_SURVIVORS][self.rank]
        members.numbers[name in OF_SURVIVORS][self.rank] += 1
        key = name in OF_SURVIVORS, number
        op = members.ops.setdefault(key, _Collective(name, finish, num_bytes))
        assert op.name == name, f"rank {self.rank} calls {name}, another rank {op.name}"
        op.given[self.rank] = given
        self._complete(op)
        if op.is_done:
            del members.ops[key]
        return _Joined(self.world_rank, self, op)

    def _complete(self, op: _Collective) -> None:
        """Complete a collective if all ranks, or all survivors, have called it."""
        members, is_of_survivors = self.members, op.name in OF_SURVIVORS
        missing = self.size - len(op.given)
        if missing and is_of_survivors:
            missing = len({*range(self.size)} - {*op.given} - {*members.lost()})
        if op.is_done or missing:
            return
        op.is_done, op.result = True, op.finish(op.given)
        size = op.num_bytes(op.given) if callable(op.num_bytes) else op.num_bytes
        ranks = [members.world_ranks[rank] for rank in sorted(op.given)]
        if op.name.startswith("bcast"):
            self._network.broadcast(ranks, size)
        else:
            self._network.meet(ranks, size, log2(len(ranks)) * (1 + is_of_survivors))
        members.wake()

    def Ibarrier(self) -> _Request:
        return self._join("barrier", None, lambda _: None)

    def Iallreduce(self, given: Any, buffer: Any, op: MPI.Op = MPI.SUM) -> _Request:
        assert given is MPI.IN_PLACE
        array = _array_of(buffer)

        def finish(arrays: dict[int, np.ndarray]) -> None:
            reduce = np.add if op == MPI.SUM else np.maximum
            assert op in (MPI.SUM, MPI.MAX)
            total = arrays[0].copy()
            for rank in range(1, self.size):
                reduce(total, arrays[rank], out=total)
            for one in arrays.values():
                one[:] = total

        return self._join("allreduce", array, finish, array.nbytes)

    def Ibcast(self, buffer: Any, root: int = 0) -> _Request:
        data = _bytes_of(buffer)

        def finish(of_ranks: dict[int, memoryview]) -> None:
            for rank, one in of_ranks.items():
                if rank != root:
                    one[:] = of_ranks[root]

        return self._join(f"bcast from {root}", data, finish, data.nbytes)

    def gather_shared(
        self,
        data: bytes,
        wait: Callable[[Callable[[], bool]], object],
        read: Callable[[bytes], Any] = lambda part: part,
    ) -> list[Any]:
        """Return ``read`` of the data of all ranks, with the messages of ``gather_bytes``.

        Every rank gets the same objects. A process has no memory for N copies of N objects.
        """

        def num_bytes(of_ranks: dict[int, bytes]) -> int:
            # Each rank receives each part of other ranks once, and 8 bytes for its length.
            total = sum(map(len, of_ranks.values()))
            return (total + 8 * self.size) * (self.size - 1) // self.size // log2(self.size)

        def finish(of_ranks: dict[int, bytes]) -> list[Any]:
            return [read(of_ranks[rank]) for rank in range(self.size)]

        request = self._join("gather", data, finish, num_bytes)
        wait(request.Test)
        return list(request.op.result)

    # -- other communicators ----------------------------------------------------------------

    def Idup(self) -> "tuple[SimulatedComm, _Request]":
        made = SimulatedComm.__new__(SimulatedComm)
        return made, self._join("dup", made, self._make_all)

    def _make_all(self, made: "dict[int, SimulatedComm]") -> None:
        ranks = [self.members.world_ranks[rank] for rank in sorted(made)]
        members = Members(self._threads, ranks, has_ulfm=self.members.has_ulfm)
        for place, rank in enumerate(sorted(made)):
            made[rank].__init__(members, place)

    def Split(self, color: int, key: int = 0) -> "SimulatedComm":
        def finish(of_ranks: dict[int, tuple[int, int]]) -> dict[int, SimulatedComm]:
            colors = defaultdict[int, list[tuple[int, int]]](list)
            for rank, (one, order) in of_ranks.items():
                colors[one].append((order, rank))
            found = {}
            for one, members in colors.items():
                ranks = [rank for _, rank in sorted(members)]
                world_ranks = [self.members.world_ranks[rank] for rank in ranks]
                shared = Members(self._threads, world_ranks, has_ulfm=self.members.has_ulfm)
                for place, rank in enumerate(ranks):
                    comm = SimulatedComm(shared, place)
                    found[rank] = MPI.COMM_NULL if one == MPI.UNDEFINED else comm
            return found

        return self._block(self._join("split", (color, key), finish, 16))[self.rank]

    def Free(self) -> None:
        pass

    def Get_group(self) -> list[int]:
        return self.members.world_ranks

    # -- lost ranks -------------------------------------------------------------------------

    def require_alive(self) -> None:
        """Raise the error of MPI if this communicator is revoked or has lost a rank."""
        if self.members.has_ulfm:
            if self.members.is_revoked:
                raise MPI.Exception(MPI.ERR_REVOKED)
            if self.members.lost():
                raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def Is_revoked(self) -> bool:
        return self.members.is_revoked

    def Revoke(self) -> None:
        self.members.is_revoked = True
        lost = self._network.lost
        alive = [rank for rank in self.members.world_ranks if rank not in lost]
        self._network.meet(alive, 0, log2(len(alive)))
        self.members.wake()

    def Agree(self, flag: int) -> int:
        agreed = self._block(self._join("agree", flag, lambda flags: min(flags.values()), 4))
        if self.members.lost():
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        return agreed

    def Shrink(self) -> "SimulatedComm":
        made = SimulatedComm.__new__(SimulatedComm)
        self._block(self._join("shrink", made, self._make_all, 4))
        return made

    def _block(self, request: _Joined) -> Any:
        while not request.op.is_done:
            self._threads.park()
            self._complete(request.op)
        return request.op.result
