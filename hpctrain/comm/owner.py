"""Detection of forked children, which must not communicate."""

import os

from hpctrain.core.errors import CommError


class _Process:
    """The cached process id, since ``os.getpid`` takes a tenth of the time of a call."""

    def __init__(self) -> None:
        self.look()
        os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Update the process id, also after a fork."""
        self.pid = os.getpid()


_process = _Process()


class Owner:
    """Records the process that created an object for communication between ranks."""

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
                f"only the process that has called init(), {self._pid}, may communicate, but this "
                f"is {os.getpid()}, a child forked from it, such as a worker of a DataLoader; "
                "communicate in the training loop, and let workers only prepare samples"
            )
