"""Process-shared POSIX semaphores, laid into memory that several processes map."""

import ctypes
import time

from hpctrain.core.errors import NodeMemoryError

LINE_BYTES = 64
"""Room for one semaphore, which takes 32 bytes: a cache line each avoids false sharing."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_POINTER = ctypes.c_void_p
_SLEEPING = ctypes.CDLL(None)  # gives up Python's lock during a call
_INSTANT = ctypes.PyDLL(None)  # keeps it: these calls take less time than giving it up
for _library, _name, _arguments in (
    (_INSTANT, "sem_init", [_POINTER, ctypes.c_int, ctypes.c_uint]),
    (_INSTANT, "sem_post", [_POINTER]),
    (_INSTANT, "sem_trywait", [_POINTER]),
    (_SLEEPING, "sem_timedwait", [_POINTER, ctypes.POINTER(_Timespec)]),
):
    getattr(_library, _name).argtypes = _arguments
_POST, _TRY_WAIT = _INSTANT.sem_post, _INSTANT.sem_trywait


class Semaphore:
    """A counter that one process raises and another waits for; both pass its address."""

    __slots__ = ("_address", "_keeps")

    def __init__(self, address: int, keeps: object = None) -> None:
        """Take 32 bytes.

        Args:
            address: a multiple of eight.
            keeps: what the memory lives as long as; None where the caller sees to that.
        """
        self._address = _POINTER(address)
        self._keeps = keeps

    def initialise(self) -> None:
        """Set the counter to zero; the owner calls this before anybody else uses it."""
        if _INSTANT.sem_init(self._address, 1, 0) != 0:
            raise NodeMemoryError("this system has no process-shared semaphores")

    def post(self) -> None:
        """Add one, and wake a waiter."""
        _POST(self._address)

    def try_wait(self) -> bool:
        """Take one if there is one."""
        return bool(_TRY_WAIT(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Sleep in the kernel until there is one and take it; False when the time is over."""
        nanoseconds, one_second = time.time_ns() + int(timeout_s * 1e9), 1_000_000_000
        deadline = _Timespec(*divmod(nanoseconds, one_second))
        return bool(_SLEEPING.sem_timedwait(self._address, ctypes.byref(deadline)) == 0)
