"""Send what is there."""

from collections.abc import Sequence

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator, Work
from hpctrain.compress.codec import Stateless


class Identity(Stateless):
    """The codec that loses nothing; see ``Codec``."""

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Need nothing."""

    def forget(self) -> None:
        """Have nothing to drop."""

    def num_bytes(self, bucket: Bucket) -> int:
        """Return all its bytes."""
        return bucket.flat.nbytes

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum the bucket where it lies."""
        return comm.allreduce_(bucket, scale=scale)
