"""Memory that all ranks of a node map: a segment per rank, owned by the rank that made it."""

import ctypes
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpctrain.cluster.memory import available_bytes
from hpctrain.comm.mapping import Segment, map_shared, view_of
from hpctrain.errors import NodeMemoryError
from hpctrain.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Anonymous memory, mapped by the peers through ``/proc/PID/fd``.

    It is as fast as an MPI window, not limited by /dev/shm and gone with its last process.
    ``posix_fallocate`` takes the pages at once, on the memory of the owner's socket, so that too
    little memory is an error here and not a SIGBUS at some later store. What is clearly too much
    is refused before that: taking it page by page would wake the kernel's out-of-memory killer.
    """

    name = "memfd"

    def allocate(self, node: "MPI.Intracomm", num_bytes: int) -> "Sequence[Segment]":
        """Make, exchange and map; see ``NodeMemory``."""
        descriptor, refusal = -1, _too_much(num_bytes * node.size)
        if not refusal:
            try:
                descriptor = _reserve(num_bytes)
            except OSError as error:
                refusal = f"cannot reserve {format_bytes(num_bytes)} of node memory: {error}"
        try:
            offers = node.allgather(None if refusal else _offer(descriptor))
            given = [offer for offer in offers if offer is not None]
            if refusal or len(given) < len(offers):
                raise NodeMemoryError(refusal or "a rank of this node could not reserve memory")
            return [_map(offer, num_bytes) for offer in given]
        finally:
            node.Barrier()  # nobody closes a descriptor that a peer still has to open
            if descriptor >= 0:
                os.close(descriptor)


def _too_much(needed_bytes: int) -> str | None:
    left_bytes = available_bytes()
    if left_bytes is None or needed_bytes <= left_bytes:
        return None
    return (
        f"the ranks of this node need {format_bytes(needed_bytes)} of shared memory and "
        f"{format_bytes(left_bytes)} are left; start fewer ranks per node, or give the job more"
    )


def _reserve(num_bytes: int) -> int:
    descriptor = os.memfd_create("hpctrain", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Offer(NamedTuple):
    """What a peer needs in order to map a rank's memory, and to know that it is that memory."""

    pid: int
    descriptor: int
    device: int
    inode: int


def _offer(descriptor: int) -> _Offer:
    status = os.fstat(descriptor)
    return _Offer(os.getpid(), descriptor, status.st_dev, status.st_ino)


def _map(offer: _Offer, num_bytes: int) -> Segment:
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    try:
        opened = os.open(path, os.O_RDWR)
    except OSError as error:
        raise NodeMemoryError(f"cannot map a peer's memory: {path}: {error.strerror}") from error
    try:
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
            # Another PID namespace: the same number names somebody else's process.
            raise NodeMemoryError(f"{path} is not the memory of the rank that offered it")
        return map_shared(opened, num_bytes)
    except OSError as error:
        raise NodeMemoryError(
            f"cannot map {format_bytes(num_bytes)} of a peer: {error}"
        ) from error
    finally:
        os.close(opened)


class Window:
    """An MPI-3 shared window, for places where /proc is closed.

    The windows are never freed before the process ends: ``Win.Free`` is collective, and a tensor
    that is touched after it is a SIGSEGV.
    """

    name = "window"

    def __init__(self) -> None:
        self._kept: list[MPI.Win] = []

    def allocate(self, node: "MPI.Intracomm", num_bytes: int) -> "Sequence[Segment]":
        """Make and map; see ``NodeMemory``."""
        from mpi4py import MPI  # noqa: PLC0415 - only ranks that need it

        # Open MPI grants windows that /dev/shm cannot hold; the first store is then a SIGBUS.
        free_bytes = min(node.allgather(_free_bytes(SHM)))
        needed_bytes = num_bytes * node.size
        if needed_bytes > free_bytes:
            raise NodeMemoryError(
                f"{SHM} has {format_bytes(free_bytes)} free and {format_bytes(needed_bytes)} are "
                f"needed for {node.size} ranks; enlarge it or set HPCTRAIN_SHARED_MEMORY=off"
            )
        try:
            window = MPI.Win.Allocate_shared(num_bytes, 1, comm=node)
        except MPI.Exception as error:
            raise NodeMemoryError(f"MPI has no shared window for this node: {error}") from error
        window.Lock_all(MPI.MODE_NOCHECK)  # MPICH wants an epoch around every access
        self._kept.append(window)
        segments = [
            view_of(window.Shared_query(rank)[0].address, num_bytes) for rank in range(node.size)
        ]
        ctypes.memset(segments[node.rank], 0, num_bytes)
        node.Barrier()
        return segments


def _free_bytes(folder: str) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
