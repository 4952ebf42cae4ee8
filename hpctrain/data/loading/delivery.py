"""Delivery of batches: what failed on one rank fails on all of them, at the same step."""

from typing import Any

import torch

from hpctrain.comm.agreement import by_rank
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import DataError
from hpctrain.data.workers.shm_message import portable


def failures(error: Exception | None, comm: Communicator | None) -> dict[int, Exception]:
    """Return what went wrong with the same step, by rank; nothing, on all ranks, if all is well.

    Collective over ``comm``, if there is one.

    Args:
        error: of this rank's part of the step, or None.
        comm: the ranks that take this step together.
    """
    if comm is None:
        return {} if error is None else {0: error}
    flag = torch.tensor(0 if error is None else 1, dtype=torch.int32)
    comm.allreduce_(flag, op=Op.MAX).wait()
    if not flag.item():
        return {}
    found = comm.allgather_object(None if error is None else portable(error))
    result = {rank: other for rank, other in enumerate(found) if other is not None}
    if error is not None:
        result[comm.rank] = error  # with its traceback
    return result


def raise_first(errors: dict[int, Exception], comm: Communicator | None) -> None:
    """Raise the error of the lowest rank that has one."""
    rank, error = min(errors.items(), key=lambda item: item[0])
    if comm is not None and comm.size > 1 and rank != comm.rank:
        error.add_note(f"(raised on rank {rank})")
    raise error


def require_same(what: dict[str, Any], comm: Communicator | None) -> None:
    """Return if all ranks say the same. Collective over ``comm``, if there is one.

    Raises:
        DataError: they do not; on every rank.
    """
    if comm is None:
        return
    texts = comm.allgather_object(str(what))
    if len(set(texts)) > 1:
        raise DataError(
            f"all ranks must load the same samples, got {by_rank(texts)}; give every loader the "
            f"same data set and arguments, and load the same state"
        )
