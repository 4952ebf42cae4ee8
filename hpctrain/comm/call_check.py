"""Synchronizes the ranks before an operation and checks that they make the same call."""

import hashlib
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from hpctrain.comm import requests
from hpctrain.comm.flight_recorder import Call, different_calls
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.waiting import Watch, wait_request
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import MismatchError
from hpctrain.core.units import by_rank

Method = TypeVar("Method", bound=Callable[..., Any])

TAGS_PER_CALL = 16
"""Number of tags per collective on a rail; concurrent reductions of parts have different tags."""


@lru_cache(maxsize=1024)
def call_of(text: str) -> Call:
    """Return a ``Call`` whose number and tag are computed from ``text``."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number, largest = int.from_bytes(digest, "big") >> 2, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return Call(text, number, number % (cast("int", largest) // TAGS_PER_CALL) * TAGS_PER_CALL)


@lru_cache(maxsize=1024)
def tensor_call(op: Op, dtype: torch.dtype, numel: int, scale: float | None = None) -> Call:
    """Return the ``Call`` for reducing a tensor, such as ``sum of 10 float32 times 0.5``."""
    return _reduction(op, f"{numel} {name_of(dtype)}", scale)


@lru_cache(maxsize=1024)
def bucket_call(number: int, op: Op = Op.SUM, scale: float | None = None) -> Call:
    """Return the ``Call`` for reducing bucket ``number``, counted from 1."""
    return _reduction(op, f"bucket number {number}", scale)


def _reduction(op: Op, what: str, scale: float | None) -> Call:
    return call_of(f"{op.value} of {what}" + ("" if scale is None else f" times {scale}"))


def check_call(comm: MPI.Intracomm, call: Call, watch: Watch) -> None:
    """Wait until every rank has begun the same ``call``. Collective.

    The comparison is an all-reduce and needs no more messages than a barrier.

    Raises:
        MismatchError: the calls differ; on every rank.
        RankLostError: a rank is lost, or the wait exceeds the limit.
    """
    watch.require_in_step()
    watch.begin(call, is_compared=True)
    extremes = np.array([call.number, -call.number], np.int64)
    request = requests.start(comm, comm.Iallreduce, MPI.IN_PLACE, extremes, MPI.MAX)
    wait_request(request, watch)
    watch.confirm()
    if extremes[0] != -extremes[1]:
        watch.mismatch = disagreement(comm, call, watch)
        raise watch.mismatch


def disagreement(comm: MPI.Intracomm, call: Call, watch: Watch) -> MismatchError:
    """Exchange the calls of all ranks; return an error that names the calls. Collective.

    Raises:
        RankLostError: another rank does not call this function, because a wait of that rank has
            failed.
    """
    texts = dict(WatchedCalls(comm, watch).allgather((watch.rank, call.text)))
    return different_calls(by_rank([texts.get(rank) for rank in range(max(texts) + 1)]))


def in_step(method: Method) -> Method:
    """Decorate a collective: fail the communicator if an exception interrupts the collective."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        number = self._watch.calls.number
        try:
            return method(self, *args, **options)
        except BaseException as error:
            self._watch.fail_if_begun(error, number)
            raise

    return cast("Method", call)
