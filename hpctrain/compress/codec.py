"""Protocols of codecs, which reduce buckets, and of Horovod's compressors of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import FINISHED, Work
from hpctrain.comm.plan.plan import Plan, expected_s


class Codec(Protocol):
    """Reduces buckets over the ranks, usually with compression.

    If ranks share memory, a codec compresses only the data sent between nodes; sums inside a node
    are exact. Each optimizer has a separate codec for its buckets. The default methods are for a
    codec without state.
    """

    rail_s: float = 0.0
    """Seconds that this rank has spent on coding and on communication between nodes."""

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Allocate the state for a new bucket.

        Collective: every rank calls this method, for the same buckets, in the same order.

        Args:
            bucket: bucket, which exists until ``forget`` is called.
            parts: views of the bucket: its tensors in their shapes, then one tensor with a mark
                for each of these tensors. Each rank sets a mark to 0 or 1. After the sum, a mark
                must be above 0 if any rank has set the mark to 1.
            comm: communicator that reduces the bucket.
        """
        del bucket, parts, comm

    def forget(self) -> None:
        """Discard the state of all prepared buckets. Not collective.

        Called before new buckets are prepared.
        """
        return

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the compressed size of a bucket in bytes. Local; the same on all ranks."""

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Replace the bucket by ``scale`` times its exact or approximate sum over ``comm``.

        Collective: every rank calls this method, for the same buckets, in the same order.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, such as unsent errors. Not collective."""
        return {}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if ``state`` was saved for the same buckets and can be loaded. Local."""
        return not state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of ``state_dict``. Not collective.

        Raises:
            ConfigError: the state was saved for other buckets.
        """
        del state

    def shared_state(self, comm: Communicator) -> dict[str, Any]:
        """Return a state that can be loaded on any number of ranks. Collective.

        The state is the same on all ranks, and contains the sums of unsent errors. Other state is
        reset when the state is loaded.
        """
        del comm
        return {}

    def load_shared_state(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Restore a result of ``shared_state``. Collective."""
        del state, comm

    def warning(self, optimizer: Optimizer) -> str:
        """Return a warning if training with ``optimizer`` may not converge; else an empty text."""
        del optimizer
        return ""


class Identity(Codec):
    """Codec without compression."""

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the size of the bucket in bytes."""
        return bucket.flat.nbytes

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum the bucket in place."""
        return comm.allreduce_(bucket, scale=scale)


class Compressor(Protocol):
    """Interface of Horovod's compressors, which replace a tensor by a smaller tensor."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for ``decompress``."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Convert the sum of compressed tensors to the form of the original tensor."""


class TensorByTensor(Codec):
    """Codec for a user-defined compressor; sends each tensor of a bucket separately."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._parts_of: dict[int, Sequence[Tensor]] = {}

    @override
    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Store the parts of the bucket; see ``Codec``."""
        self._parts_of[id(bucket)] = parts

    def forget(self) -> None:
        """Drop the parts of all buckets; see ``Codec``."""
        self._parts_of.clear()

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the size of the compressed tensors in bytes."""
        return sum(
            self._compressor.compress(part)[0].nbytes for part in self._parts_of[id(bucket)]
        )

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum the compressed tensors, and the uncompressed marks; see ``Codec``."""
        *tensors, marks = self._parts_of[id(bucket)]
        for tensor in tensors:
            compressed, ctx = self._compressor.compress(tensor)
            comm.allreduce_(compressed, scale=scale).wait()
            tensor.copy_(self._compressor.decompress(compressed, ctx))
        comm.allreduce_(marks, scale=scale).wait()
        return FINISHED


def settings_of(codec: object) -> str:
    """Return the settings of a codec as text that ranks compare.

    For a user-defined codec, the text is the name of the class.
    """
    if isinstance(codec, bool | int | float | str | tuple | torch.dtype):
        return repr(codec)
    if not type(codec).__module__.startswith(__package__):
        return type(codec).__name__
    settings = [
        f"{name.strip('_')}={settings_of(value)}"
        for name, value in vars(codec).items()
        if name != "rail_s" and not isinstance(value, dict | list)  # without the state
    ]
    return f"{type(codec).__name__}({', '.join(settings)})"


class Savings(NamedTuple):
    """Cost of communication between nodes, with and without a codec."""

    plain_bytes: int
    """Bytes that all nodes together send in a step without a codec."""
    plain_s: float | None
    """Seconds per step of this rank without a codec; None if the link was not measured."""
    rail_s: float
    """Seconds of this rank with the codec, summed over all steps."""


def savings_of(codec: Codec, buckets: Sequence[Bucket], comm: Communicator, plan: Plan) -> Savings:
    """Compute the cost with and without a codec, from measurements of the plan. Local."""
    sizes = [bucket.flat.nbytes for bucket in buckets]
    num_nodes = 1 if comm.internode is None else comm.internode.size
    if num_nodes == 1:
        return Savings(0, 0.0, codec.rail_s)
    times: dict[int, float] = {}
    for each in plan.measured:
        if each.what == "rail":
            fastest = min(each.seconds, times.get(each.num_bytes, each.seconds))
            times[each.num_bytes] = fastest
    least = min(times.values(), default=0.0)
    parts = [size // comm.num_rails for size in sizes]
    plain_s = sum(max(expected_s(times, part), least) for part in parts) if times else None
    return Savings(2 * (num_nodes - 1) * sum(sizes), plain_s, codec.rail_s)
