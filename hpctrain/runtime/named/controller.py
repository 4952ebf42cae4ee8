"""Carries out the named operations of one process set."""

from typing import TYPE_CHECKING

from hpctrain.runtime.named.handle import Handle
from hpctrain.runtime.named.request import Request, Result

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class Controller:
    """Takes requests from any thread and finishes each once all ranks have made it."""

    def __init__(self, comm: "Communicator") -> None:
        """Take a communicator of the ranks of the set, which nobody else may use. Collective."""
        self.comm = comm

    def submit(self, request: Request) -> Handle:
        """Start an operation; somebody will ask for its result later."""
        from hpctrain.runtime.named.execution import carry_out  # noqa: PLC0415

        handle = Handle(self, request, request.name or "noname")
        try:
            carry_out(self.comm, [handle])
        except Exception as error:  # for wait()
            handle.fail(error)
        return handle

    def run(self, request: Request) -> Result:
        """Start an operation and wait for its result."""
        return self.submit(request).wait()

    def finish(self, handle: Handle) -> None:
        """Return when an operation is done."""

    def join(self) -> int:
        """Take part in everything with nothing until all ranks do; return the last to come."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish what is under way. Collective."""
        self.comm.close()
