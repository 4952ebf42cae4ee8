"""Objects that the ranks of a program exchange by messages or by files of the job."""

import pickle
from collections.abc import Iterable
from typing import Any


def unpickled(data: bytes | bytearray | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle data from a rank of this program; ``buffers`` are the out-of-band buffers."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - not from another program
