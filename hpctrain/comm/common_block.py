"""A block of the program that all ranks leave together, by ``with``."""

from types import TracebackType

from hpctrain.comm.liveness import Block, Liveness
from hpctrain.core.python_compat import Self


class CommonBlock:
    """Brings the ranks together at the end of a block; who leaves it by an error tells the others.

    Collective: every rank enters and leaves it.
    """

    _presence: Liveness | None
    _block: int | None = None  # number of the one that this rank is in

    def _steps_begun(self) -> int:
        """Return how many steps this rank has begun in the block."""
        return 0

    def _begin_block(self) -> None:
        """Raise where there can be none."""

    def _end_block(self) -> None:
        """Bring the ranks together. Collective; not where an error has led out."""

    def _leave_block(self, error: BaseException | None) -> None:
        """Take back what was done to the program's objects. Not collective."""

    def __enter__(self) -> Self:
        self._begin_block()
        self._enter()
        return self

    def _enter(self) -> None:
        if self._presence is not None:
            block = Block(type(self).__name__, self._steps_begun)
            self._block = self._presence.enter(block)

    def _enter_again(self) -> None:
        """Be in the block, if this rank is, in a world of those that are left."""
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
                self._presence.leave(self._block, error)
                self._block = None
