"""Functions of the NCCL library that torch has loaded.

All communicators are non-blocking: a call that is not complete returns ``IN_PROGRESS``, and
``async_error`` reports its completion.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from hpctrain.core.errors import CommError

SUCCESS, IN_PROGRESS = 0, 7
OLDEST = 21800  # first version whose configuration has the fields below
SHARED_GPU_VERSION = 23000
"""From this version on several ranks can share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1."""
TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
"""NCCL's codes of data types."""

_ID_BYTES = 128
_SUM = 0
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_NAMES = ("libnccl.so.2", "librccl.so.1")
"""File names of the library that torch has loaded, for CUDA and ROCm."""


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _ID_BYTES),)


class _Config(ctypes.Structure):
    """Configuration of a communicator in NCCL 2.18; later versions add fields with defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRankConfig": [
        *(ctypes.POINTER(_POINTER), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config))
    ],
    "ncclAllReduce": [
        *(_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _POINTER, _POINTER)
    ],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(ctypes.c_int)],
    "ncclCommFinalize": [_POINTER],
    "ncclCommDestroy": [_POINTER],
    "ncclCommAbort": [_POINTER],
}
_TEXTS: dict[str, list[Any]] = {
    "ncclGetErrorString": [ctypes.c_int],
    "ncclGetLastError": [_POINTER],
}


class Library:
    """Functions of NCCL, which return a code and raise ``CommError`` on failure.

    Args:
        handle: the loaded library.

    Raises:
        CommError: the library is too old.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle
        found = ctypes.c_int()
        for name, arguments in {**_ARGUMENTS, **_TEXTS}.items():
            function = getattr(handle, name, None)
            if function is not None:
                function.argtypes = arguments
                function.restype = ctypes.c_char_p if name in _TEXTS else ctypes.c_int
        self.check(handle.ncclGetVersion(ctypes.byref(found)), "ncclGetVersion")
        self.version = found.value
        if self.version < OLDEST:
            raise CommError(
                f"NCCL must be version 2.18 or later, got {self}; install a newer torch"
            )

    def __str__(self) -> str:
        """Return the version, such as ``2.28.9``."""
        major, rest = divmod(self.version, 10_000 if self.version >= 10_000 else 1000)
        return ".".join(map(str, (major, *divmod(rest, 100))))

    def unique_id(self) -> bytes:
        """Return a new id, with which ranks connect to form a communicator."""
        made = _Id()
        self.check(self._handle.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def start(self, unique_id: bytes, size: int, rank: int) -> int:
        """Start creating a communicator on the current device; return its handle."""
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=OLDEST,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        comm, name = _POINTER(), "ncclCommInitRankConfig"
        shared = _Id.from_buffer_copy(unique_id)
        code = self._handle.ncclCommInitRankConfig(
            ctypes.byref(comm), size, shared, rank, ctypes.byref(config)
        )
        self.check(code, name)
        if not comm.value:
            raise CommError(f"{name} of NCCL {self} returned no communicator; set NCCL_DEBUG=INFO")
        return comm.value

    def all_reduce(
        self, address: int, numel: int, dtype: torch.dtype, comm: int, stream: int
    ) -> int:
        """Queue an in-place sum over the ranks on ``stream``; return the code."""
        code = self._handle.ncclAllReduce(
            *(address, address, numel, TYPES[dtype], _SUM, comm, stream)
        )
        return self.check(code, "ncclAllReduce", comm)

    def async_error(self, comm: int) -> int:
        """Return the code of the last operation, or of an asynchronous error."""
        code = ctypes.c_int()
        name = "ncclCommGetAsyncError"
        self.check(self._handle.ncclCommGetAsyncError(comm, ctypes.byref(code)), name, comm)
        return code.value

    def finalize(self, comm: int) -> int:
        """Start finalizing a communicator whose operations are complete."""
        return self.check(self._handle.ncclCommFinalize(comm), "ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """Free a communicator that is finalized."""
        self._handle.ncclCommDestroy(comm)

    def abort(self, comm: int) -> None:
        """Free a communicator immediately; queued operations end with undefined results."""
        self._handle.ncclCommAbort(comm)

    def check(self, code: int, what: str, comm: int | None = None) -> int:
        """Return the code of a call; raise ``CommError`` if it is a failure."""
        if code not in (SUCCESS, IN_PROGRESS):
            raise CommError(f"{what} has failed: {self.describe(code, comm)}")
        return code

    def describe(self, code: int, comm: int | None = None) -> str:
        """Return the error text of a code, with the last error message of NCCL."""
        text = self._handle.ncclGetErrorString(code)
        more = self._handle.ncclGetLastError(comm)
        lines = [each.decode(errors="replace").strip() for each in (text, more) if each]
        return f"{': '.join(filter(None, lines))} (code {code})"


@cache
def library() -> Library:
    """Return the NCCL library of torch. Raises ``CommError`` if absent or too old."""
    found = []
    for name in _NAMES:
        try:
            return Library(ctypes.CDLL(name))
        except OSError as error:
            found.append(str(error))
    raise CommError(f"torch must contain NCCL, but {'; '.join(found)}; install torch for CUDA")
