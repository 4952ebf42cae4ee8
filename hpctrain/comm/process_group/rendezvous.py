"""Registration of the backend with torch, and rendezvous over MPI.

Torch imports this module in every program; other modules are imported when a group is created.
"""

import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpctrain.cluster.env import torch_finds_ranks
from hpctrain.core.torch_compat import (
    HashStore,
    Store,
    TCPStore,
    rendezvous_handlers,
)

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

NAME = "hpctrain"

Create = Callable[[Any, Any], Any]
"""Creates a process group from the options of torch and of the user."""
FindRanks = Callable[[timedelta], tuple[Any, int, int]]
"""Returns a store for all ranks, this rank, and the number of ranks. Collective."""


def register(create: Create, find_ranks: FindRanks) -> None:
    """Register the backend ``hpctrain``; a no-op the second time. Not collective.

    For all backends, ``env://`` uses ``find_ranks`` if ``MASTER_ADDR`` is not set. Torch alone
    would raise an error.

    Args:
        create: creates a process group.
        find_ranks: performs the rendezvous.
    """
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    handlers = rendezvous_handlers()
    of_torch = handlers["env"]

    def meet(
        url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
    ) -> Iterator[Any]:
        if torch_finds_ranks():
            yield from of_torch(url, timeout=timeout, **options)
        else:
            yield find_ranks(timeout)

    handlers["env"] = meet


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
