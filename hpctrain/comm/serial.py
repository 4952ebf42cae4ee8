"""A world of one rank: nothing moves, and nothing is scaled."""

from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.work import FINISHED, Work
from hpctrain.errors import CommError

T = TypeVar("T")


class SerialCommunicator:
    """The communicator of a single process; see ``Communicator`` for the methods."""

    rank = 0
    size = 1

    def allreduce_(self, tensor: Tensor | Bucket, *, scale: float | None = None) -> Work:
        """Scale ``tensor``: the sum over one rank is already there."""
        if scale is not None and scale != 1.0:
            (tensor.flat if isinstance(tensor, Bucket) else tensor).mul_(scale)
        return FINISHED

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:  # noqa: ARG002
        """Leave ``tensor`` as it is."""
        return FINISHED

    def broadcast_object(self, value: T, root: int = 0) -> T:  # noqa: ARG002
        """Return ``value``."""
        return value

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:  # noqa: ARG002
        """Return ``[value]``."""
        return [value]

    def allgather_object(self, value: T) -> list[T]:
        """Return ``[value]``."""
        return [value]

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> NoReturn:  # noqa: ARG002
        """Refuse: there is nobody to send to."""
        raise CommError(f"a world of one rank has nobody to talk to, got dest={dest}, tag={tag}")

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> NoReturn:  # noqa: ARG002
        """Refuse: there is nobody to receive from."""
        raise CommError(f"a world of one rank has nobody to hear, got source={source}, tag={tag}")

    def barrier(self) -> None:
        """Return at once."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001
        """Raise if not ``ok``."""
        raise_if_any([None if ok else message])

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in private memory."""
        return Bucket(torch.zeros(numel, dtype=dtype))

    def close(self) -> None:
        """Hold nothing, give back nothing."""
