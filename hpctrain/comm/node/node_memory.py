"""Memory that all ranks of a node map: one segment per rank, allocated by its owner."""

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
    """Create memory with all pages allocated; return its descriptor, or raise ``OSError``."""
    return _memory_of_size(lambda descriptor: os.posix_fallocate(descriptor, 0, num_bytes))


def reserve_lazily(num_bytes: int) -> int:
    """Create memory whose pages are allocated at the first store; return its descriptor.

    If memory runs out, a store ends the process.
    """
    return _memory_of_size(lambda descriptor: os.ftruncate(descriptor, num_bytes))


def _memory_of_size(resize: Callable[[int], object]) -> int:
    descriptor = os.memfd_create("hpctrain", os.MFD_CLOEXEC)
    try:
        resize(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class OnDisk:
    """Allocates memory as ``reserve`` does, but in an unnamed file in ``folder``.

    The kernel deletes the file when the last process closes or unmaps it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, num_bytes: int) -> int:
        """Create a file with all blocks allocated; return its descriptor, or raise ``OSError``."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return os.dup(file.fileno())

    def __str__(self) -> str:
        return f"the folder {self._folder}"


def allocate(
    node: "WatchedCalls", num_bytes: int, reserve: Callable[[int], int] = reserve
) -> Sequence[Segment]:
    """Create a zeroed segment on every rank, and map all segments; return them by local rank.

    Collective. A segment exists while it is referenced. See ``allocate_by``.
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
    """Create zeroed memory on every rank, and pass the descriptors of all ranks to ``map_all``.

    Collective over ``node``. Returns the result of ``map_all``. The memory is anonymous
    (``memfd_create``), is not limited by the size of /dev/shm, and is freed when the last process
    that maps it ends. Peers open it through ``/proc/PID/fd``. If this is impossible (PID
    namespaces, hidden processes), the ranks send their descriptors over Unix sockets.

    The owner allocates all pages with ``posix_fallocate``. So the pages are on the NUMA node of
    the owner, whichever rank stores first, and a lack of memory raises here instead of SIGBUS at a
    later store. Sizes that clearly exceed the free memory are rejected before, since allocating
    page by page would trigger the out-of-memory killer.

    Args:
        map_all: maps the open descriptors of all ranks, by local rank.
        node: ranks of the node.
        num_bytes: size per rank, the same on every rank.
        reserve: allocates the memory of this rank and returns its descriptor.

    Raises:
        NodeMemoryError: this rank failed. Other ranks may not have failed, so the caller must
            exchange the errors of all ranks.
    """
    is_file = isinstance(reserve, OnDisk)
    if not is_file and (lacking := shortage(node.allgather(rooms()), num_bytes)):
        raise NodeMemoryError(lacking)
    descriptor, failure = -1, None
    try:
        descriptor = reserve(num_bytes)
    except OSError as error:
        remedy = (
            "give the job more memory, let its container call memfd_create and fallocate, or set "
            "HPCTRAIN_SHARED_MEMORY=off"
        )
        failure = (
            f"local rank {node.rank} cannot reserve {format_bytes(num_bytes)} of "
            f"{reserve if is_file else 'node memory'}: "
            f"{refusal(error, 'name another folder') if is_file else f'{error}; {remedy}'}"
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
    """Map the memory of all ranks by the first method that works on every rank."""
    made, closed = None, None
    try:
        made = _map_of_processes(offers, map_all)
    except OSError as error:
        closed = str(error)
    # After this exchange no rank needs an open descriptor of a peer.
    closed = next((text for text in node.allgather(closed) if text), None)
    if closed is None and made is not None:
        return made
    try:
        found = exchange(node, descriptor)
    except OSError as error:
        raise NodeMemoryError(
            f"cannot map the memory of another rank of the node: by /proc: {closed}; by a Unix "
            f"socket: {error}"
        ) from error
    try:
        for one, offer in zip(found, offers, strict=True):
            _check_identity(os.fstat(one), offer)
        return map_all(found)
    except OSError as error:
        raise NodeMemoryError(
            f"cannot map the memory of another rank of the node: {error}"
        ) from error
    finally:
        close(found)


class _Offer(NamedTuple):
    """Data with which a peer opens and identifies the memory of a rank."""

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
            _check_identity(os.stat(path), offer)  # noqa: PTH116 - opening another process's file may have effects
            opened.append(os.open(path, os.O_RDWR))
            _check_identity(os.fstat(opened[-1]), offer)
        return map_all(opened)
    finally:
        close(opened)


def _check_identity(status: os.stat_result, offer: _Offer) -> None:
    if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
        # In another PID namespace the same pid belongs to another process.
        raise OSError(f"process {offer.pid} in /proc is not the rank that shares its memory")


TIMEOUT_S = 10.0
"""Longest wait for the descriptor of one rank; a usual wait is below 1 ms."""
_TOKEN_BYTES = 16


def exchange(node: "WatchedCalls", descriptor: int) -> list[int]:
    """Return new descriptors of the files of all ranks, for the caller to close. Collective.

    Other processes of the host can connect to the socket of a rank. So each rank sends a token to
    its peers by MPI, and accepts a descriptor only together with this token.

    Raises:
        OSError: a rank could not send (raised on every rank), or this rank could not receive.
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
        # One owner at a time: descriptors in flight count against the limit of open files.
        for owner in range(node.size):
            others = [door for rank, door in enumerate(doors) if rank != owner]
            refusal = _send(descriptor, others) if owner == node.rank else None
            if refusal := node.bcast(refusal, owner):
                raise OSError(
                    f"local rank {owner} could not send the file descriptor of its memory: "
                    f"{refusal}"
                )
            try:
                mine = owner == node.rank
                found.append(os.dup(descriptor) if mine else _receive(inbox, token))
            except OSError as error:  # raised after the loop, since the other ranks continue
                failure = error
        if failure is not None:
            raise failure
        inbox.close()
        stack.pop_all()
    return found


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors that ``exchange`` returned."""
    for one in descriptors:
        os.close(one)


def _open(stack: contextlib.ExitStack, num_peers: int) -> socket.socket | None:
    """Return a listening Unix socket, closed with ``stack``; None if it cannot be opened."""
    try:
        inbox = stack.enter_context(socket.socket(socket.AF_UNIX))
        inbox.bind(b"\0hpctrain-" + secrets.token_hex(16).encode())
        inbox.listen(num_peers)
    except OSError:
        return None
    return inbox


def _send(descriptor: int, doors: list[tuple[bytes, bytes]]) -> str | None:
    """Send a descriptor to each socket in ``doors``; return the error, or None.

    The kernel keeps the descriptor until the receiver accepts it.
    """
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
    """Return the descriptor that arrives with ``token``; close descriptors of other senders."""
    end = time.monotonic() + TIMEOUT_S
    while (left_s := end - time.monotonic()) > 0:
        inbox.settimeout(left_s)
        door, _ = inbox.accept()
        with door:
            door.settimeout(min(left_s, 1.0))
            try:
                message, files, _, _ = socket.recv_fds(door, len(token), 1)
            except OSError:  # another process connected and sent nothing
                continue
            if files and secrets.compare_digest(message, token):
                os.set_inheritable(files[0], False)  # noqa: FBT003
                return files[0]
            close(files)
            if message == token:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    raise TimeoutError(
        f"no other rank of the node has sent the file descriptor of its memory within "
        f"{TIMEOUT_S:g} s"
    )
