"""Codecs, between a full bucket and the ranks' sum of it; and Horovod's form of compression."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import FINISHED, Work


class Codec(Protocol):
    """Owns the middle of the all-reduce of buckets: it may send less, or in several rounds.

    Where ranks share memory it acts on what crosses the rail alone: inside a node nothing is lost.
    One codec serves the buckets of one optimizer. The methods below that do nothing are those of a
    codec of which no step depends on another.
    """

    rail_s: float = 0.0
    """Seconds that this rank has spent so far on coding, and between nodes."""

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Make what is needed to reduce a new bucket, which lives as long as it is reduced.

        Collective: every rank calls it, for the same buckets, in the same order. ``parts`` are
        views of the bucket: its tensors in their shapes, then their marks, a zero or one for each,
        of which only "more than zero" matters after the sum.
        """
        del bucket, parts, comm

    def forget(self) -> None:
        """Drop all that was prepared: other buckets will come, perhaps alike. Not collective."""
        return

    def num_bytes(self, bucket: Bucket) -> int:
        """Return how many bytes stand for a bucket, the same on all ranks. Not collective."""

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Replace the bucket by (an approximation of) its sum over ``comm``, times ``scale``.

        Collective: every rank calls it, for the same buckets, in the same order.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's next step depends on: an unsent error, say. Not collective."""
        return {}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Say whether ``load_state_dict`` can go on from a state: its buckets are these."""
        return not state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` has given. Not collective.

        ``ConfigError`` if it does not fit.
        """
        del state

    def shared_state(self, comm: Communicator) -> dict[str, Any]:
        """Return what other numbers of ranks can go on from; the same on all ranks. Collective.

        What was not sent yet arrives all the same. Other things that it remembers begin anew.
        """
        del comm
        return {}

    def load_shared_state(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Go on from what ``shared_state`` has given. Collective."""
        del state, comm

    def warning(self, optimizer: Optimizer) -> str:
        """Return why training by this optimizer would not converge, empty if nothing is known."""
        del optimizer
        return ""


class Identity(Codec):
    """The codec that loses nothing: what is there is sent."""

    def num_bytes(self, bucket: Bucket) -> int:
        """Return all its bytes."""
        return bucket.flat.nbytes

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum the bucket where it lies."""
        return comm.allreduce_(bucket, scale=scale)


class Compressor(Protocol):
    """Makes another tensor of each one, which travels and is summed in its place."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what ``decompress`` needs to know."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the sum of what has travelled, in the form of the original tensors."""


class TensorByTensor(Codec):
    """The codec for a compressor of somebody else: every tensor of a bucket is sent by itself."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._parts_of: dict[int, Sequence[Tensor]] = {}

    @override
    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Keep the parts."""
        self._parts_of[id(bucket)] = parts

    def forget(self) -> None:
        """Drop all parts."""
        self._parts_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of what the compressor makes of each tensor."""
        return sum(
            self._compressor.compress(part)[0].nbytes for part in self._parts_of[id(bucket)]
        )

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum what the compressor makes of each tensor; the marks travel as they are."""
        *tensors, marks = self._parts_of[id(bucket)]
        for tensor in tensors:
            compressed, ctx = self._compressor.compress(tensor)
            comm.allreduce_(compressed, scale=scale).wait()
            tensor.copy_(self._compressor.decompress(compressed, ctx))
        comm.allreduce_(marks, scale=scale).wait()
        return FINISHED


def settings_of(codec: object) -> str:
    """Say what a codec was made with, for ranks to compare; of a user's own the class."""
    if isinstance(codec, bool | int | float | str | tuple | torch.dtype):
        return repr(codec)
    if not type(codec).__module__.startswith(__package__):
        return type(codec).__name__
    settings = [
        f"{name.strip('_')}={settings_of(value)}"
        for name, value in vars(codec).items()
        if name != "rail_s" and not isinstance(value, dict | list)  # what changes by steps
    ]
    return f"{type(codec).__name__}({', '.join(settings)})"
