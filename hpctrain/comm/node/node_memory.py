"""Memory that all ranks of a node map: a segment per rank, owned by the rank that made it."""

import contextlib
import errno
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpctrain.cluster.resources import rooms, shortage
from hpctrain.comm.node.segments import clear, map_shared, take_pages
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.libc import Segment, memory_at
from hpctrain.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpi4py import MPI


SHM = "/dev/shm"  # noqa: S108 - the place where MPI libraries put their windows


class NodeMemory(Protocol):
    """One way to share memory inside a node."""

    name: str

    def allocate(self, node: "MPI.Intracomm", num_bytes: int) -> "Sequence[Segment]":
        """Make a zeroed segment of ``num_bytes`` on every rank and map those of all ranks.

        Collective over ``node``; every rank gives the same number of bytes. A segment lives as
        long as something refers to it.

        Returns:
            The segments by local rank.

        Raises:
            NodeMemoryError: this rank could not; the caller agrees with the others.
        """


class Memfd:
    """Anonymous memory, mapped by the peers through ``/proc/PID/fd`` or a descriptor of it.

    It is as fast as an MPI window, not limited by /dev/shm and gone with its last process.
    ``posix_fallocate`` by the owner takes the pages at once: on the memory of the owner's socket,
    where they stay whoever stores to them first, and so that too little memory is an error here
    and not a SIGBUS at some later store. What is clearly too much is refused before that: taking
    it page by page would wake the kernel's out-of-memory killer.

    Where /proc does not lead to the peers (another PID namespace, processes that hide), they hand
    their descriptors over by Unix sockets.
    """

    name = "memfd"

    def allocate(self, node: "MPI.Intracomm", num_bytes: int) -> "Sequence[Segment]":
        """Make, exchange and map; see ``NodeMemory``."""
        _check_room(node, num_bytes)
        descriptor, refusal = -1, None
        try:
            descriptor = self.reserve(num_bytes)
        except OSError as error:
            refusal = (
                f"local rank {node.rank} cannot reserve {format_bytes(num_bytes)} of node memory: "
                f"{error}; give the job more memory, let its container call memfd_create and "
                f"fallocate, or set HPCTRAIN_SHARED_MEMORY=off"
            )
        try:
            answers = node.allgather(refusal or _offer(descriptor))
            given = [answer for answer in answers if isinstance(answer, _Offer)]
            if len(given) < len(answers):
                raise NodeMemoryError(next(text for text in answers if isinstance(text, str)))
            return self._map(node, descriptor, given, num_bytes)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def reserve(self, num_bytes: int) -> int:
        """Make this rank's memory with all its pages; return its descriptor.

        Raises:
            OSError: there is too little.
        """
        descriptor = os.memfd_create("hpctrain", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _map(
        self, node: "MPI.Intracomm", descriptor: int, offers: "list[_Offer]", num_bytes: int
    ) -> "Sequence[Segment]":
        """Map all ranks' memory in the first way that works for every rank."""
        segments, closed = None, None
        try:
            segments = [_map_of_process(offer, num_bytes) for offer in offers]
        except OSError as error:
            closed = str(error)
        # From here on nobody needs an open descriptor of a peer.
        closed = next((text for text in node.allgather(closed) if text), None)
        if closed is None and segments is not None:
            return segments
        try:
            found = exchange(node, descriptor)
        except OSError as error:
            raise NodeMemoryError(f"cannot map a peer's memory: {closed}; {error}") from error
        try:
            return [
                _map_opened(one, offer, num_bytes)
                for one, offer in zip(found, offers, strict=True)
            ]
        except OSError as error:
            raise NodeMemoryError(f"cannot map a peer's memory: {error}") from error
        finally:
            close(found)


def _check_room(node: "MPI.Intracomm", num_bytes: int) -> None:
    """Refuse what is clearly too much, on all ranks and before the first one takes any."""
    if refusal := shortage(node.allgather(rooms()), num_bytes):
        raise NodeMemoryError(refusal)


class _Offer(NamedTuple):
    """What a peer needs in order to map a rank's memory, and to know that it is that memory."""

    pid: int
    descriptor: int
    device: int
    inode: int


def _offer(descriptor: int) -> _Offer:
    status = os.fstat(descriptor)
    return _Offer(os.getpid(), descriptor, status.st_dev, status.st_ino)


def _map_of_process(offer: _Offer, num_bytes: int) -> Segment:
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    _check_identity(os.stat(path), offer)  # noqa: PTH116 - opening a stranger's may do harm
    opened = os.open(path, os.O_RDWR)
    try:
        return _map_opened(opened, offer, num_bytes)
    finally:
        os.close(opened)


def _map_opened(opened: int, offer: _Offer, num_bytes: int) -> Segment:
    _check_identity(os.fstat(opened), offer)
    return map_shared(opened, num_bytes)


def _check_identity(status: os.stat_result, offer: _Offer) -> None:
    if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
        # Another PID namespace: the same number names somebody else's process.
        raise OSError(f"process {offer.pid} is not the rank that offered its memory")


class Window:
    """An MPI-3 shared window, where neither /proc nor sockets lead to the peers.

    The windows are never freed before the process ends: ``Win.Free`` is collective, and a tensor
    that is touched after it is a SIGSEGV.
    """

    name = "window"

    def __init__(self) -> None:
        self._kept: list[MPI.Win] = []

    def allocate(self, node: "MPI.Intracomm", num_bytes: int) -> "Sequence[Segment]":
        """Make and map; see ``NodeMemory``."""
        from mpi4py import MPI  # noqa: PLC0415 - only ranks that need it

        _check_containers(node)
        _check_folder(node, num_bytes)
        _check_room(node, num_bytes)
        try:
            window = MPI.Win.Allocate_shared(num_bytes, 1, comm=node)
        except MPI.Exception as error:
            raise NodeMemoryError(f"MPI has no shared window for this node: {error}") from error
        window.Lock_all(MPI.MODE_NOCHECK)  # MPICH wants an epoch around every access
        segments = [
            memory_at(window.Shared_query(rank)[0].address, num_bytes) for rank in range(node.size)
        ]
        # Another program may have filled /dev/shm meanwhile; a store would then be a SIGBUS.
        if not all(node.allgather(take_pages(segments[node.rank]))):
            window.Unlock_all()
            window.Free()
            raise NodeMemoryError(
                f"{SHM} was filled by others while a window of {format_bytes(num_bytes)} per rank "
                f"was made; remove what is there or enlarge it"
            )
        self._kept.append(window)
        clear(segments[node.rank])
        node.Barrier()
        return segments


def _check_containers(node: "MPI.Intracomm") -> None:
    """Refuse windows between containers, which Open MPI does not survive; on all ranks.

    It tells its own memory from a peer's by the process id, and opens a peer's by its name.
    """
    found = node.allgather((_device(SHM), os.getpid()))
    way_out = "run them in one container, or set HPCTRAIN_SHARED_MEMORY=auto"
    if len({device for device, _ in found}) > 1:
        raise NodeMemoryError(
            f"an MPI window needs one {SHM} for all ranks of a node, and these have several: each "
            f"is in a container of its own; {way_out}, or give them one with --ipc=host"
        )
    pids = [pid for _, pid in found]
    if len(set(pids)) < len(pids):
        raise NodeMemoryError(
            f"an MPI window needs a process id of its own for each rank of a node, and these have "
            f"{', '.join(map(str, pids))}: each is in a container of its own; {way_out}, or show "
            f"them all processes with --pid=host"
        )


def _check_folder(node: "MPI.Intracomm", num_bytes: int) -> None:
    """Refuse windows that /dev/shm cannot hold, on all ranks.

    Open MPI grants them, and the first store is then a SIGBUS.
    """
    free_bytes, needed_bytes = min(node.allgather(_free_bytes(SHM))), num_bytes * node.size
    if needed_bytes > free_bytes:
        raise NodeMemoryError(
            f"{SHM} has {format_bytes(free_bytes)} free and {format_bytes(needed_bytes)} are "
            f"needed for {node.size} ranks; enlarge it or set HPCTRAIN_SHARED_MEMORY=off"
        )


def _device(folder: str) -> int:
    try:
        return os.stat(folder).st_dev  # noqa: PTH116 - a place, not a path
    except OSError:
        return -1


def _free_bytes(folder: str) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


TIMEOUT_S = 10.0
"""Longest wait for one rank's file; the waits that are usual take less than a millisecond."""
_TOKEN_BYTES = 16


def exchange(node: "MPI.Intracomm", descriptor: int) -> list[int]:
    """Open the file of every rank. Collective over ``node``.

    A file is taken only with the token of the receiver, which its peers got over MPI: other
    processes of the host can see a socket's name and connect to it.

    Returns:
        New descriptors of the ranks' files by local rank; the caller closes them.

    Raises:
        OSError: a rank could not send, on every rank; or this rank could not receive.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    failure: OSError | None = None
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: close(found))
        inbox = _open(stack, node.size)
        doors = node.allgather((inbox and inbox.getsockname(), token))
        if inbox is None or not all(address for address, _ in doors):
            raise OSError("a rank of this node cannot open a Unix socket")
        # One after the other: files on their way count against the limit of open files.
        for owner in range(node.size):
            others = [door for rank, door in enumerate(doors) if rank != owner]
            refusal = _send(descriptor, others) if owner == node.rank else None
            if refusal := node.bcast(refusal, owner):
                raise OSError(f"local rank {owner} could not hand its memory on: {refusal}")
            try:
                mine = owner == node.rank
                found.append(os.dup(descriptor) if mine else _receive(inbox, token))
            except OSError as error:  # the others go on, and so must we
                failure = error
        if failure is not None:
            raise failure
        inbox.close()
        stack.pop_all()
    return found


def close(descriptors: "Iterable[int]") -> None:
    """Close files that ``exchange`` returned."""
    for one in descriptors:
        os.close(one)


def _open(stack: contextlib.ExitStack, num_peers: int) -> socket.socket | None:
    """Open a socket where peers find it, closed with ``stack``; None where there are none."""
    try:
        inbox = stack.enter_context(socket.socket(socket.AF_UNIX))
        inbox.bind(b"\0hpctrain-" + secrets.token_hex(16).encode())
        inbox.listen(num_peers)
    except OSError:
        return None
    return inbox


def _send(descriptor: int, doors: list[tuple[bytes, bytes]]) -> str | None:
    """Hand a file to each of ``doors`` and return why not; it waits there until it is taken."""
    for address, token in doors:
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.settimeout(TIMEOUT_S)
                door.connect(address)
                socket.send_fds(door, [token], [descriptor])
        except OSError as error:
            return str(error)
    return None


def _receive(inbox: socket.socket, token: bytes) -> int:
    """Take the file that comes with our token; what strangers send is closed."""
    end = time.monotonic() + TIMEOUT_S
    while (left_s := end - time.monotonic()) > 0:
        inbox.settimeout(left_s)
        door, _ = inbox.accept()
        with door:
            door.settimeout(min(left_s, 1.0))
            try:
                message, files, _, _ = socket.recv_fds(door, len(token), 1)
            except OSError:  # a stranger who is silent or gone
                continue
            if files and secrets.compare_digest(message, token):
                os.set_inheritable(files[0], False)  # noqa: FBT003
                return files[0]
            close(files)
            if message == token:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    raise TimeoutError(f"no rank handed its memory on within {TIMEOUT_S:g} s")
