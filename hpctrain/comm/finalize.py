"""A callback before ``MPI_Finalize``, which a program may call itself."""

from collections.abc import Callable

from mpi4py import MPI


class BeforeFinalize:
    """Calls a function when ``MPI_Finalize`` begins, while all of MPI still works.

    MPI deletes the attributes of ``MPI_COMM_SELF`` first of all, and tells their owners.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        """Take the function; after ``close`` it is not called any more."""
        self._function: Callable[[], object] | None = function
        self.is_over = False
        """Whether the function was called."""
        self._key = MPI.Comm.Create_keyval(delete_fn=self._on_delete)
        MPI.COMM_SELF.Set_attr(self._key, self)

    def close(self) -> None:
        """Forget the function. Harmless the second time, and after ``MPI_Finalize``."""
        self._function = None
        if self._key != MPI.KEYVAL_INVALID and not MPI.Is_finalized():
            key, self._key = self._key, MPI.KEYVAL_INVALID
            MPI.COMM_SELF.Delete_attr(key)
            MPI.Comm.Free_keyval(key)

    def _on_delete(self, _comm: MPI.Comm, _key: int, _value: object) -> None:
        self._key = MPI.KEYVAL_INVALID
        function, self._function = self._function, None
        if function is not None:
            self.is_over = True
            function()
