"""Calls of the compiled kernel of node memory, ``kernel.c``.

The kernel performs the protocol of ``shared_memory`` with the same bits. Without it, Python does.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.node.kernel_library import Library
from hpctrain.comm.ops import Combination, Op

if TYPE_CHECKING:
    from hpctrain.comm.waiting import Pace

DONE, LATE, DIFFERENT, FAILED = range(4)
"""Results of a call: complete; waits for other ranks; their calls differ; a rank has failed."""

_DTYPES = (
    (torch.float32,),
    (torch.float64,),
    (torch.float16,),
    (torch.bfloat16,),
    (torch.int8, torch.uint8),
    (torch.int16,),
    (torch.int32,),
    (torch.int64,),
    (torch.bool,),
)
_NUMBERS = {dtype: number for number, dtypes in enumerate(_DTYPES) for dtype in dtypes}
MOST_RANKS = 1024
_INSTANT_NUMEL = 1 << 12  # the sum of smaller tensors is shorter than a change of threads


class Kernel:
    """The state of the kernel for one rank of a node. Not for several threads at a time.

    Args:
        library: the compiled functions.
        rank: local rank.
        size: number of ranks of the node.
        pace: how a call waits before it returns ``LATE``.
        addresses: of the cells and the sign; of the slots of each rank; and per round of a barrier
            of the semaphore to wait for and the semaphore to post.
        slot_bytes: size of a slot.
    """

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        pace: "Pace",
        addresses: Sequence[int],
        slot_bytes: int,
    ) -> None:
        calls, instant = library.calls, library.instant
        state = (ctypes.c_int64 * -(-calls.hpctrain_node_bytes() // 8))()
        self._state = ctypes.byref(state)
        given = (ctypes.c_int64 * len(addresses))(*addresses)
        calls.hpctrain_prepare(
            self._state, rank, size, pace.spin_s, pace.yield_s, slot_bytes, given
        )
        self._barrier, self._resume = instant.hpctrain_barrier, calls.hpctrain_resume
        self._bucket = instant.hpctrain_bucket, calls.hpctrain_bucket
        self._values = instant.hpctrain_values, calls.hpctrain_values
        self.code = DONE  # of the last call

    def barrier(self) -> int:
        """Begin a barrier; return the code."""
        return int(self._barrier(self._state))

    def sum_bucket(
        self,
        bucket: Bucket,
        how: Combination,
        scale: float | None,
        number: int,
        turn: int,
        *,
        looks: bool,
    ) -> int:
        """Begin the sum of a bucket in place, as call ``number``; return the code."""
        numel = bucket.flat.nbytes // how.storage_dtype.itemsize
        what = number, turn, _NUMBERS[how.storage_dtype], bucket.addresses, numel
        call = self._bucket[numel > _INSTANT_NUMEL]
        return int(call(self._state, *what, scale or 0.0, scale is not None, looks))

    def sum_values(
        self,
        values: Tensor,
        how: Combination,
        scale: float | None,
        number: int,
        turn: int,
        *,
        in_slices: bool,
    ) -> int:
        """Begin the sum of contiguous ``values`` in place, as call ``number``; return the code."""
        numel = values.numel()
        call = self._values[numel > _INSTANT_NUMEL]
        what = number, turn, _NUMBERS[how.storage_dtype], values.data_ptr(), numel
        return int(call(self._state, *what, scale or 0.0, scale is not None, in_slices))

    def is_over(self, nap_s: float = 0.0) -> bool:
        """Continue a call that was ``LATE``, after at most ``nap_s``; return whether it is over.

        ``code`` is then its result.
        """
        self.code = self._resume(self._state, nap_s)
        return self.code != LATE


def can_sum(how: Combination) -> bool:
    """Return whether the kernel has this combination."""
    return how.op is Op.SUM and how.storage_dtype in _NUMBERS
