"""A communicator of NCCL over the ranks of a communicator of hpctrain.

Queued operations of NCCL wait on the GPU for all ranks, without a limit: if a rank dies, no call
of the host returns an error, and a host that waits for a stream sleeps. So a thread of each rank
checks twice per second whether NCCL reports an error, and whether the other ranks of this machine
exist. After an error or the end of a rank, the checking thread aborts the queued operations and
raises an error in the training thread, before the training thread can use wrong sums.
"""

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hpctrain.cluster.env import SHARES_GPUS, ranks_share_gpus
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device
from hpctrain.comm.nccl import library as nccl
from hpctrain.comm.waiting import Pace, wait_until
from hpctrain.core import config
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.units import by_rank, format_ranks

LOOK_S = 0.5
START_S = 120.0
"""Limit for the ranks to find each other, and for NCCL to connect them."""
END_S = 30.0  # limit for queued operations at the end of the program

_PACE = Pace(spin_s=0.0, shortest_s=20e-6, longest_s=1e-3)  # backward needs the GIL during a wait
_LOG = logging.getLogger(__name__)
_numbers = itertools.count()


class Sign:
    """An open file that shows other processes of the machine that this rank exists."""

    def __init__(self) -> None:
        name = f"hpctrain-nccl-{os.getpid()}-{next(_numbers)}"
        self._file: int | None = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.text = str(Path(self.path).readlink())

    def remove(self) -> None:
        """Close the file, so that other processes see that this rank has ended."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Offer:
    """Facts that each rank sends to the other ranks before NCCL starts."""

    refusal: str  # why this rank cannot use NCCL; empty if it can
    version: int
    card: str  # unique name of the GPU of the rank
    may_share: bool  # whether NCCL accepts several ranks per GPU
    path: str  # path of the ``Sign`` of the rank
    text: str  # target of the link at ``path``

    @property
    def is_seen(self) -> bool:
        """Whether this process sees the ``Sign`` of the rank, which exists as long as the rank."""
        with suppress(OSError):
            return str(Path(self.path).readlink()) == self.text
        return False


class NcclCommunicator:
    """An NCCL communicator on this rank, with a thread that detects lost ranks.

    Created by ``nccl_over``.
    """

    def __init__(self, device: Device, rank: int, offers: Sequence[Offer], sign: Sign) -> None:
        self.stream = device.new_stream()
        """Not shared: two communicators on one stream could wait for each other."""
        self._device, self._rank, self._size, self._sign = device, rank, len(offers), sign
        self._others = {
            number: other
            for number, other in enumerate(offers)
            if number != rank and other.is_seen  # ranks of this machine
        }
        self._library = nccl.library()
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._failure = ""
        self._is_queueing = False
        self._last: torch.Event | None = None  # recorded after the last queued operation
        self._values: Tensor | None = None
        """Values of the last queued sum, kept because the sum is in flight after an exception."""
        self._trainer = threading.get_ident()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hpctrain-nccl", daemon=True)

    def start(self, unique_id: bytes) -> None:
        """Connect to the other ranks. Collective. Raises ``CommError`` on failure or timeout."""
        try:
            with self._device.on(self.stream):
                self._handle = self._library.start(unique_id, self._size, self._rank)
            self._settle("to find the other ranks")
        except CommError as error:
            self.break_off(str(error))
            raise
        self._watcher.start()

    def all_reduce_(self, values: Tensor) -> None:
        """Queue the in-place sum over all ranks on ``stream``, which must be the current stream.

        Collective. The ranks must have synchronized before the call.

        Args:
            values: flat, of a dtype in ``nccl.TYPES``.

        Raises:
            RankLostError: a rank is lost.
        """
        self._is_queueing, self._values = True, values
        try:
            with self._working() as handle:
                stream = self._device.handle_of(self.stream)
                of_values = values.data_ptr(), values.numel(), values.dtype
                self._library.all_reduce(*of_values, handle, stream)
            self._settle("to queue a sum")
        except CommError as error:
            self.break_off(str(error))
            raise

    def ends_with(self, event: torch.Event) -> None:
        """Store ``event``, recorded after the last sum. Must be called after every sum."""
        self._last, self._is_queueing = event, False

    def break_off(self, reason: str) -> None:
        """Abort queued operations, with undefined results; reject later calls. Not collective."""
        with self._lock:
            if self._failure:
                return
            self._failure = reason
            handle, self._handle = self._handle, None
        self._is_over.set()
        self._sign.remove()
        if handle is not None:
            self._library.abort(handle)

    def close(self) -> None:
        """Wait for queued operations and free the communicator. Every rank must call ``close``."""
        if self._failure:
            return
        in_time = wait_until(self._is_done, _check_nothing, _PACE, timeout_s=END_S)
        self._is_over.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:  # not aborted by the thread
            self._failure = (
                "a communicator must be open when it is used, but this one was closed; create a "
                "new one"
            )
            self._free(handle, in_time=in_time)
        self._sign.remove()

    def _free(self, handle: int, *, in_time: bool) -> None:
        library = self._library
        if in_time:
            with suppress(CommError):
                library.finalize(handle)
                in_time = wait_until(
                    lambda: library.async_error(handle) != nccl.IN_PROGRESS,
                    *(_check_nothing, _PACE),
                    timeout_s=END_S,
                )
        (library.destroy if in_time else library.abort)(handle)

    @contextmanager
    def _working(self) -> Iterator[int]:
        """Yield the handle, which is not freed inside this context."""
        with self._lock:
            if self._handle is None:
                raise RankLostError(self._failure)
            yield self._handle

    def _is_done(self) -> bool:
        if self._failure:
            return True
        return not self._is_queueing and (self._last is None or self._last.query())

    def _settle(self, what: str) -> None:
        """Wait until NCCL has processed the last call; ``what`` is the purpose, for messages."""
        code = nccl.IN_PROGRESS

        def is_settled() -> bool:
            nonlocal code
            with self._working() as handle:
                code = self._library.async_error(handle)
            return code != nccl.IN_PROGRESS

        def look(waited_s: float) -> None:
            if waited_s > LOOK_S and not self._watcher.is_alive() and (lost := self._lost()):
                raise RankLostError(f"{_loss_of(lost)} while NCCL started on rank {self._rank}")

        if not wait_until(is_settled, look, _PACE, timeout_s=START_S):
            raise CommError(
                f"NCCL must take at most {START_S:g} s {what}, but takes longer; check the "
                f"network (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), or use HPCTRAIN_DEVICE_SUMS=auto"
            )
        if code != nccl.SUCCESS:
            raise CommError(f"NCCL failed {what}: {self._library.describe(code)}")

    def _watch(self) -> None:
        """Abort if NCCL reports an error or a rank is lost; runs until the communicator ends."""
        missed: list[int] = []
        while not self._is_over.wait(LOOK_S):
            reason, lost = self._error(), self._lost()
            if not reason and lost and lost == missed:
                reason = f"{_loss_of(lost)} while rank {self._rank} waits for a sum"
            missed = lost
            # Ranks that end normally have completed the queued operations, and so will this one.
            if reason and not self._is_done():
                self._raise_in_trainer(reason)

    def _error(self) -> str:
        with suppress(CommError), self._working() as handle:
            code = self._library.async_error(handle)
            if code not in (nccl.SUCCESS, nccl.IN_PROGRESS):
                return f"NCCL has failed: {self._library.describe(code)}"
        return ""

    def _lost(self) -> list[int]:
        return [number for number, other in self._others.items() if not other.is_seen]

    def _raise_in_trainer(self, reason: str) -> None:
        """Raise an error in the training thread, which may wait for a stream."""
        _LOG.error("sums by NCCL were aborted: %s", reason)
        members = {"__str__": lambda _: reason, "__module__": RankLostError.__module__}
        error = type(RankLostError.__name__, (RankLostError,), members)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._trainer), ctypes.py_object(error)
        )
        self.break_off(reason)


_made: WeakKeyDictionary[Communicator, dict[torch.device, NcclCommunicator]] = WeakKeyDictionary()


def nccl_over(comm: Communicator, device: Device) -> NcclCommunicator:
    """Return the NCCL communicator over ``comm``; the first call creates it. Collective.

    Raises:
        CommError: on all ranks, if NCCL cannot be used.
    """
    of_comm = _made.setdefault(comm, {})
    if device.device not in of_comm:
        made = of_comm[device.device] = _joined(comm, device)
        comm.before_close(made.close)
    return of_comm[device.device]


def asked_over(comm: Communicator, device: Device) -> tuple[str, str]:
    """Return the version of NCCL, and why these ranks cannot use it. Collective.

    The version is empty if this rank cannot use NCCL; the reason is empty if all ranks can. Does
    not start NCCL.
    """
    sign = Sign()
    offers = comm.allgather_object(_offer(device, sign))
    sign.remove()
    return str(nccl.library()) if offers[comm.rank].version else "", why_not(offers)


def _joined(comm: Communicator, device: Device) -> NcclCommunicator:
    sign = Sign()
    offers = comm.allgather_object(_offer(device, sign))
    made, unique_id, refusal = None, b"", why_not(offers)
    if not refusal:
        with _refusals() as refused:
            made = NcclCommunicator(device, comm.rank, offers, sign)
            unique_id = nccl.library().unique_id() if comm.rank == 0 else b""
        unique_id, refusal = comm.broadcast_object((unique_id, "".join(refused)))
    if made is not None and not refusal:
        with _refusals() as refused:
            made.start(unique_id)
        refusal = by_rank(comm.allgather_object("".join(refused) or None))
    if made is None or refusal:
        if made is not None:
            made.break_off(refusal)
        sign.remove()
        raise CommError(refusal)
    return made


def _offer(device: Device, sign: Sign) -> Offer:
    with _refusals() as refused:
        version = nccl.library().version if not device.without_nccl else 0
    refusal = device.without_nccl or "".join(refused)
    if not refusal and config.setting("recover"):
        refusal = (
            "NCCL cannot be used with HPCTRAIN_RECOVER, because its sums do not return errors"
        )
    may_share = ranks_share_gpus()
    card = "" if refusal else device.card()
    return Offer(refusal, 0 if refusal else version, card, may_share, sign.path, sign.text)


@contextmanager
def _refusals() -> Iterator[list[str]]:
    """Catch a ``CommError`` in the block, and store its text in the yielded list."""
    found: list[str] = []
    try:
        yield found
    except CommError as error:
        found.append(str(error))


def why_not(offers: Sequence[Offer]) -> str:
    """Return why these ranks cannot use NCCL; empty if they can."""
    if any(offer.refusal for offer in offers):
        return by_rank([offer.refusal or None for offer in offers])
    if len({offer.version for offer in offers}) > 1:
        versions = by_rank([str(offer.version) for offer in offers])
        return f"NCCL must have the same version on all ranks, got {versions}"
    ranks_of: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        ranks_of.setdefault(offer.card, []).append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if shared is None or (
        offers[0].version >= nccl.SHARED_GPU_VERSION and all(offer.may_share for offer in offers)
    ):
        return ""
    return (
        f"each rank must have its own GPU for NCCL, but {format_ranks(shared)} share one; start "
        f"one rank per GPU, or for trials set {SHARES_GPUS}=1, with NCCL 2.30 or later"
    )


def _loss_of(lost: Sequence[int]) -> str:
    return f"{format_ranks(lost)} died, or failed,"


def _check_nothing(_waited_s: float) -> None:
    """No-op: the watcher thread checks the other ranks."""
