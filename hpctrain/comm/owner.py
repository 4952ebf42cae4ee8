"""The process that may communicate: not a child forked from it."""

import os

from hpctrain.core.errors import CommError


class _Process:
    """This process: to ask the system for its number with every call takes a tenth of it."""

    def __init__(self) -> None:
        self.look()
        os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Learn the number, of a child a new one."""
        self.pid = os.getpid()


_process = _Process()


class Owner:
    """The process that made something which other ranks wait for."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = _process.pid

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return _process.pid == self._pid

    def check(self) -> None:
        """Raise ``CommError`` in a forked child: its messages would be taken for its parent's."""
        if _process.pid != self._pid:
            raise CommError(
                f"ranks communicate by the process that has called init(), here {self._pid}, this "
                f"is {os.getpid()}, a child forked from it, such as a worker of a DataLoader; "
                "communicate in the training loop, and let workers prepare samples only"
            )
