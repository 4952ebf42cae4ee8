"""Ports of clusters that share one network: each cluster has a block of its own."""

import errno
import random
import socket
from collections.abc import Iterator

BLOCK = 64
"""Ports of a cluster: controller, accounting, data base, nodes."""

RANGE = range(15000, 32000 - BLOCK, BLOCK)
"""Below the ports that the kernel hands out."""


class Ports:
    """A block of free ports, claimed until ``close``, or until this process ends."""

    def __init__(self, first: int | None = None) -> None:
        """Claim a block.

        Args:
            first: where it begins; by default a free one is found.

        Raises:
            RuntimeError: the ports are taken.
        """
        for start in [first] if first is not None else _tries():
            self._claim = socket.socket(socket.AF_UNIX)
            try:
                # An abstract name is free again the moment its owner ends, however it ends.
                self._claim.bind(f"\0hpctrain-slurm-{start}")
            except OSError as error:
                self._claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            if all(_is_free(start + k) for k in range(BLOCK)):
                self.first = start
                return
            self._claim.close()
        raise RuntimeError(
            f"{BLOCK} free ports in a row are needed, found none from {first or RANGE.start} on"
        )

    def close(self) -> None:
        """Give the block back."""
        self._claim.close()


def _tries() -> Iterator[int]:
    return iter(random.Random().sample(RANGE, len(RANGE)))


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
