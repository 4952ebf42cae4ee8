"""Creation of the store of a process group; rank 0 sends its address to the other ranks by MPI."""

import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hpctrain.core.torch_compat import HashStore, Store, TCPStore

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

CONNECT_S = 3.0
"""Longest wait for a connection to one address, in seconds."""
_SIOCGIFADDR = 0x8915


def store_of(comm: "Communicator", timeout: timedelta) -> Store:
    """Create a store that rank 0 serves on a free port. Collective.

    Raises:
        MismatchError: a rank cannot connect to any address of rank 0; on every rank.
    """
    if comm.size == 1:
        return HashStore()
    mine: Store | None = None
    offer: tuple[int, str, Sequence[str]] | None = None
    if comm.rank == 0:
        served = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        mine, offer = served, (served.port, socket.gethostname(), list(_own_addresses()))
    found = comm.broadcast_object(offer)
    assert found is not None
    port, host, addresses = found
    if mine is None:
        here = ["127.0.0.1"] if host == socket.gethostname() else []
        address = next((one for one in (*here, host, *addresses) if _answers(one, port)), None)
        if address is not None:
            mine = TCPStore(address, port, timeout=timeout, wait_for_workers=False)
    comm.agree(
        mine is not None,
        f"cannot reach rank 0 on {host} by {', '.join(addresses)}, port {port}; set MASTER_ADDR "
        f"and MASTER_PORT to an address that all nodes reach, and RANK and WORLD_SIZE",
    )
    assert mine is not None
    return mine


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _own_addresses() -> Iterator[str]:
    """Yield the IPv4 addresses of this host, without loopback addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    yield address
