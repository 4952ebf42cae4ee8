"""How much a virtual node has of its own."""

from typing import Literal, get_args

Mode = Literal["plain", "uts", "net"]
"""``plain``: a ``slurmd`` with a port, which takes no privilege. All nodes have the machine's host
name, so Open MPI does not tell them apart; MPICH does.

``uts``: also a host name, processes, ``/dev/shm`` and ``/var/tmp``; takes root.

``net``: also a network and an address of its own behind a link, as ``tests.cluster.vcluster`` has
it; clients run on the host ``login``.
"""

MODES: tuple[Mode, ...] = get_args(Mode)
