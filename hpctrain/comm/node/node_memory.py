"""Memory that all ranks of a node map: a segment per rank, owned by the rank that made it."""

import contextlib
import errno
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpctrain.cluster.resources import rooms, shortage
from hpctrain.comm.node.segments import map_shared
from hpctrain.core.atomic import refusal
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.libc import Segment
from hpctrain.core.units import format_bytes

if TYPE_CHECKING:
    from hpctrain.comm.watched_calls import WatchedCalls

T = TypeVar("T")


def reserve(num_bytes: int) -> int:
    """Make this rank's memory with all its pages, else OSError; return its descriptor."""
    descriptor = os.memfd_create("hpctrain", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reserve_lazily(num_bytes: int) -> int:
    """Do as ``reserve``, but take each page when it is stored to; more than there is kills."""
    descriptor = os.memfd_create("hpctrain", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class OnDisk:
    """Does as ``reserve`` in a file without a name, in a folder; gone with its last process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, num_bytes: int) -> int:
        """Make the file with all its blocks, else OSError; return its descriptor."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return os.dup(file.fileno())

    def __str__(self) -> str:
        return f"the folder {self._folder}"


def allocate(
    node: "WatchedCalls", num_bytes: int, reserve: Callable[[int], int] = reserve
) -> Sequence[Segment]:
    """Make a zeroed segment on every rank and map those of all; return them by local rank.

    A segment lives as long as something refers to it; else as ``allocate_by``. Collective.
    """
    return allocate_by(
        lambda files: [map_shared(one, num_bytes) for one in files], node, num_bytes, reserve
    )


def allocate_by(
    map_all: Callable[[Sequence[int]], T],
    node: "WatchedCalls",
    num_bytes: int,
    reserve: Callable[[int], int] = reserve,
) -> T:
    """Make zeroed memory on every rank; return what ``map_all`` makes of the open files of all.

    Collective over ``node``; every rank gives the same number of bytes. ``NodeMemoryError`` if
    this rank could not: the caller agrees with the others.

    It is anonymous memory, mapped by the peers through ``/proc/PID/fd``, not limited by /dev/shm
    and gone with its last process. ``posix_fallocate`` by the owner takes the pages at once: on
    the memory of the owner's socket, where they stay whoever stores to them first, and so that too
    little memory is an error here and not a SIGBUS at some later store. What is clearly too much
    is refused before that: taking it page by page would wake the kernel's out-of-memory killer.

    Where /proc does not lead to the peers (another PID namespace, processes that hide), they hand
    their descriptors over by Unix sockets.
    """
    is_file = isinstance(reserve, OnDisk)
    if not is_file and (lacking := shortage(node.allgather(rooms()), num_bytes)):
        raise NodeMemoryError(lacking)
    descriptor, failure = -1, None
    try:
        descriptor = reserve(num_bytes)
    except OSError as error:
        way_out = (
            "give the job more memory, let its container call memfd_create and fallocate, or set "
            "HPCTRAIN_SHARED_MEMORY=off"
        )
        failure = (
            f"local rank {node.rank} cannot reserve {format_bytes(num_bytes)} of "
            f"{reserve if is_file else 'node memory'}: "
            f"{refusal(error, 'name another folder') if is_file else f'{error}; {way_out}'}"
        )
    try:
        answers = node.allgather(failure or _offer(descriptor))
        given = [answer for answer in answers if isinstance(answer, _Offer)]
        if len(given) < len(answers):
            raise NodeMemoryError(next(text for text in answers if isinstance(text, str)))
        return _map(node, descriptor, given, map_all)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _map(
    node: "WatchedCalls",
    descriptor: int,
    offers: "list[_Offer]",
    map_all: Callable[[Sequence[int]], T],
) -> T:
    """Map all ranks' memory in the first way that works for every rank."""
    made, closed = None, None
    try:
        made = _map_of_processes(offers, map_all)
    except OSError as error:
        closed = str(error)
    # From here on nobody needs an open descriptor of a peer.
    closed = next((text for text in node.allgather(closed) if text), None)
    if closed is None and made is not None:
        return made
    try:
        found = exchange(node, descriptor)
    except OSError as error:
        raise NodeMemoryError(f"cannot map a peer's memory: {closed}; {error}") from error
    try:
        for one, offer in zip(found, offers, strict=True):
            _check_identity(os.fstat(one), offer)
        return map_all(found)
    except OSError as error:
        raise NodeMemoryError(f"cannot map a peer's memory: {error}") from error
    finally:
        close(found)


class _Offer(NamedTuple):
    """What a peer needs in order to map a rank's memory, and to know that it is that memory."""

    pid: int
    descriptor: int
    device: int
    inode: int


def _offer(descriptor: int) -> _Offer:
    status = os.fstat(descriptor)
    return _Offer(os.getpid(), descriptor, status.st_dev, status.st_ino)


def _map_of_processes(offers: "list[_Offer]", map_all: Callable[[Sequence[int]], T]) -> T:
    opened: list[int] = []
    try:
        for offer in offers:
            path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
            _check_identity(os.stat(path), offer)  # noqa: PTH116 - opening a stranger's may do harm
            opened.append(os.open(path, os.O_RDWR))
            _check_identity(os.fstat(opened[-1]), offer)
        return map_all(opened)
    finally:
        close(opened)


def _check_identity(status: os.stat_result, offer: _Offer) -> None:
    if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
        # Another PID namespace: the same number names somebody else's process.
        raise OSError(f"process {offer.pid} is not the rank that offered its memory")


TIMEOUT_S = 10.0
"""Longest wait for one rank's file; the waits that are usual take less than a millisecond."""
_TOKEN_BYTES = 16


def exchange(node: "WatchedCalls", descriptor: int) -> list[int]:
    """Return new descriptors of the file of every rank, for the caller to close. Collective.

    A file is taken only with the token of the receiver, which its peers got over MPI: other
    processes of the host can see a socket's name and connect to it. OSError if a rank could not
    send, on every rank; or this rank could not receive.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    failure: OSError | None = None
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: close(found))
        inbox = _open(stack, node.size)
        doors: list[tuple[Any, bytes]] = node.allgather((inbox and inbox.getsockname(), token))
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


def close(descriptors: Iterable[int]) -> None:
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
