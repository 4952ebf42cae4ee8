"""Automatic choice of the fastest codec, by a measurement before training begins."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.ops import Op
from hpctrain.compress.codec import Codec, Identity
from hpctrain.compress.half import HalfCodec
from hpctrain.compress.int8 import Int8
from hpctrain.core.units import MIB, format_bytes

_LOG = logging.getLogger(__name__)

_ROUNDS = 3
_MOST_BYTES = 4 * MIB  # maximum size of the trial bucket
_WORTH = 0.9  # a lossy codec must be at least 10 % faster than no compression


_TRIED: Mapping[str, Callable[[], Codec]] = {
    "none": Identity,
    "bf16": partial(HalfCodec, torch.bfloat16),
    "int8": Int8,
}


class Auto(Codec):
    """Codec that sends gradients uncompressed, in bfloat16 or in int8, whichever is fastest.

    A trial reduces a bucket as large as the first bucket, at most 4 MiB, several times with each
    codec, and compares the times of the slowest rank. On a single node gradients are not
    compressed. Codecs that change the convergence of training are excluded and must be chosen
    manually.
    """

    def __init__(self) -> None:
        self.reason = ""
        """Reason of the choice; empty before the first bucket."""
        self.name = "none"
        self._codec: Codec | None = None
        self._prepared: list[tuple[Bucket, Sequence[Tensor], Communicator]] = []

    @property
    def rail_s(self) -> float:  # type: ignore[override]
        """Seconds that the chosen codec has spent; see ``Codec``."""
        return 0.0 if self._codec is None else self._codec.rail_s

    @property
    def choice(self) -> str:
        """Name of the chosen codec and the reason; empty before the first bucket."""
        return f"{self.name}: {self.reason}" if self.reason else ""

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Choose a codec at the first bucket, and prepare the bucket with it; see ``Codec``."""
        if self._codec is None:
            self._codec = self._choose(bucket, comm)
            if comm.rank == 0:
                _LOG.info("compression = auto: %s; %s", self.name, self.reason)
        self._prepared.append((bucket, parts, comm))
        self._codec.prepare(bucket, parts, comm)

    def forget(self) -> None:
        """Drop the state of the codec, but keep the choice; see ``Codec``."""
        self._prepared.clear()
        if self._codec is not None:
            self._codec.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, because another trial could choose another codec; see ``Codec``."""
        return {"name": self.name}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if ``state`` contains the name of a codec of the trial; see ``Codec``."""
        return state.get("name") in _TRIED

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice, without another trial. Collective if ranks share no memory."""
        self.name, self.reason = state["name"], "chosen before the run was stopped"
        self._codec = _TRIED[self.name]()
        for bucket, parts, comm in self._prepared:
            self._codec.prepare(bucket, parts, comm)

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the size of the bucket with the chosen codec, in bytes; see ``Codec``."""
        return bucket.flat.nbytes if self._codec is None else self._codec.num_bytes(bucket)

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Reduce by the chosen codec; see ``Codec``."""
        assert self._codec is not None, "prepare() must be called before allreduce_()"
        return self._codec.allreduce_(bucket, comm, scale=scale)

    def _choose(self, bucket: Bucket, comm: Communicator) -> Codec:
        """Measure the codecs, and return the fastest codec. Collective."""
        dtype = bucket.flat.dtype
        if not comm.num_rails:
            self.reason = "all ranks are on one node, which sums gradients in node memory"
            return Identity()
        if not dtype.is_floating_point or dtype.itemsize < 4:
            self.reason = f"gradients of {dtype} need no compression"
            return Identity()
        numel = min(bucket.numel, _MOST_BYTES // dtype.itemsize)
        trial = comm.new_bucket(numel, dtype)
        codecs = {name: make() for name, make in _TRIED.items()}
        for codec in codecs.values():
            codec.prepare(trial, [trial.flat, trial.flat[:0]], comm)
        rounds = [_times(codecs, trial, comm) for _ in range(1 + _ROUNDS)][1:]
        seconds = torch.tensor([median(each) for each in zip(*rounds, strict=True)])
        comm.allreduce_(seconds, op=Op.MAX).wait()
        took = dict(zip(codecs, seconds.tolist(), strict=True))
        best = min(took, key=took.__getitem__)
        self.name = best if took[best] < _WORTH * took["none"] else "none"
        times = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in took.items())
        self.reason = f"{format_bytes(trial.flat.nbytes)} between nodes take {times}"
        chosen = codecs[self.name]
        chosen.forget()
        return chosen


def _times(codecs: Mapping[str, Codec], bucket: Bucket, comm: Communicator) -> list[float]:
    seconds = []
    for codec in codecs.values():
        bucket.flat.fill_(1.0)
        comm.barrier()
        start = time.perf_counter()
        codec.allreduce_(bucket, comm, scale=1.0 / comm.size).wait()
        seconds.append(time.perf_counter() - start)
    return seconds
