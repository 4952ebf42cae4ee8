"""Detection of forked children, which must not communicate."""

import os

from hpctrain.core.errors import CommError


class _Process:
    """Caches the process id, since ``os.getpid`` takes a tenth of the time of an operation."""

    def __init__(self) -> None:
        self.look()
        os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Update the cached process id. Called after a fork in the child, too."""
        self.pid = os.getpid()


_process = _Process()


class Owner:
    """Stores which process created an object, since forked children must not communicate."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = _process.pid

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner, not a forked child."""
        return _process.pid == self._pid

    def check(self) -> None:
        """Raise ``CommError`` in a forked child, whose messages would seem to be its parent's."""
        if _process.pid != self._pid:
            raise CommError(
                f"only process {self._pid}, which has called init(), may communicate, but this is "
                f"process {os.getpid()}, a forked child, such as a worker of a DataLoader; "
                "communicate in the training loop, and let workers only prepare samples; a child "
                "that needs its own world must be started by spawn, without a launcher"
            )
