"""Base class of context managers; all ranks leave the block together."""

from types import TracebackType

from hpctrain.comm.blocks import Block
from hpctrain.comm.liveness import Liveness
from hpctrain.core.python_compat import Self


class CommonBlock:
    """A context manager that synchronizes the ranks at the end of its block.

    A rank that leaves the block by an error reports the error to the other ranks. Collective:
    every rank enters and leaves the block.
    """

    _presence: Liveness | None
    _block: int | None = None  # number of the block that this rank is in

    def _steps_begun(self) -> int:
        """Return the number of steps that this rank has begun in the block."""
        return 0

    def _begin_block(self) -> None:
        """Raise an error if the block cannot begin. Subclasses override this method."""

    def _end_block(self) -> None:
        """Synchronize the ranks. Collective; not called after an error."""

    def _leave_block(self, error: BaseException | None) -> None:
        """Restore objects of the program that the block has changed. Not collective."""

    def __enter__(self) -> Self:
        self._begin_block()
        self._enter()
        return self

    def _enter(self) -> None:
        if self._presence is not None:
            block = Block(type(self).__name__, self._steps_begun)
            self._block = self._presence.blocks.enter(block)

    def _enter_again(self) -> None:
        """After the loss of ranks, enter the block again if this rank is in the block."""
        if self._block is not None:
            self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._end_block()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._leave_block(error)
            if self._presence is not None and self._block is not None:
                self._presence.blocks.leave(self._block, error)
                self._block = None
