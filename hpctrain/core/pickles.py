"""Objects that ranks of a program send each other, or leave in files of a job."""

import pickle
from collections.abc import Iterable
from typing import Any


def unpickled(data: bytes | bytearray | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Return the object of a pickle, with its buffers, that a rank of this program has made."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - not from another program
