"""The all-reduce of any operation and dtype, by messages alone: where the MPI library has none."""

from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.doubling import doubling_allreduce_
from hpctrain.comm.rail.halving import halving_allreduce_
from hpctrain.comm.rail.wire import Wire
from hpctrain.core.units import KIB

DOUBLING_BYTES = 32 * KIB
"""Below this, sending everything in log2(N) rounds beats sending less in twice as many."""


def allreduce_by_messages_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over all ranks. Collective."""
    small = tensor.numel() * tensor.itemsize < DOUBLING_BYTES
    (doubling_allreduce_ if small else halving_allreduce_)(wire, tensor, combination)
