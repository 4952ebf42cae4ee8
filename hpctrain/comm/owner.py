"""The process that may communicate: the one that joined the world, no forked child of it."""

import os

from hpctrain.core.errors import CommError


class Owner:
    """The process that made something which other ranks wait for."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Return in that process.

        Raises:
            CommError: this is a forked child: what it sends would be taken for its parent's.
        """
        if not self.is_here:
            raise CommError(
                f"ranks communicate by the process that has called init(), here {self._pid}, this "
                f"is {os.getpid()}, a child forked from it, such as a worker of a DataLoader; "
                "communicate in the training loop, and let workers prepare samples only"
            )
