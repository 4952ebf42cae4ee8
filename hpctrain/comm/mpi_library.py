"""The version string of this process's MPI library."""

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
"""How many threads may call MPI: none but the one of the program, ..., all at once."""


def version() -> str:
    """Return the first line of the library's version, such as ``Open MPI v5.0.11``.

    Loads MPI where it is not yet loaded. Not collective after that.
    """
    from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI

    line = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return " ".join(line.partition(",")[0].split())


def thread_level() -> str:
    """Return the thread level that was granted, one of ``LEVELS``. Not collective."""
    from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI

    granted = MPI.Query_thread()
    numbers = (
        MPI.THREAD_SINGLE,
        MPI.THREAD_FUNNELED,
        MPI.THREAD_SERIALIZED,
        MPI.THREAD_MULTIPLE,
    )
    return LEVELS[numbers.index(granted)]
