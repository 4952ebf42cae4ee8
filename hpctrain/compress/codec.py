"""What stands between a full bucket and the ranks' sum of it."""

from typing import Protocol

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.work import Work


class Codec(Protocol):
    """Owns the middle of the all-reduce of a bucket: it may send less, or in several rounds."""

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Replace the bucket by (an approximation of) its sum over ``comm``, times ``scale``.

        Collective: every rank calls it, for the same buckets, in the same order.
        """
