"""Open files handed from rank to rank over Unix sockets, where /proc does not lead to them.

The sockets are abstract: they have no file, so that nothing is left behind by a killed job, and
reach from container to container as long as these share the network of their host.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi4py import MPI

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
