"""A communicator of NCCL over the ranks of one of ours, which find each other through that.

What NCCL has queued waits for all ranks, on the accelerator, without an end: where one dies or
fails, no call of the host returns with an error, and the host that waits for a stream sleeps.
So a thread of each rank looks twice a second whether NCCL knows of an error, and whether the
others of this machine are still there. Then it breaks off what is queued, and raises an error in
the thread that trains, before that can go on with values that are no sums.
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
"""How long the ranks may take to find each other, and NCCL to connect them."""
END_S = 30.0  # and how long to carry out what is queued, at the end of the program

_PACE = Pace(spin_s=0.0, shortest_s=20e-6, longest_s=1e-3)  # backward needs Python meanwhile
_LOG = logging.getLogger(__name__)
_numbers = itertools.count()


class Sign:
    """An open file by which other processes of the machine see that this rank is at work."""

    def __init__(self) -> None:
        name = f"hpctrain-nccl-{os.getpid()}-{next(_numbers)}"
        self._file: int | None = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.text = str(Path(self.path).readlink())

    def take_down(self) -> None:
        """Let the others see that it is not, any more."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the others before NCCL begins."""

    refusal: str  # why it has no NCCL for them; empty where it has
    version: int
    card: str  # the name of its accelerator, of which there is one in the world
    may_share: bool  # whether NCCL lets several ranks have one
    path: str  # of its sign
    text: str  # what a reader of that finds

    @property
    def is_seen(self) -> bool:
        """Whether the sign is there, as seen by this process."""
        with suppress(OSError):
            return str(Path(self.path).readlink()) == self.text
        return False


class NcclCommunicator:
    """This rank's end of it; ``nccl_over`` makes it."""

    def __init__(self, device: Device, rank: int, offers: Sequence[Offer], sign: Sign) -> None:
        """Take what the ranks have told each other."""
        self.stream = device.new_stream()
        """Of this communicator alone: else two of them could wait for each other."""
        self._device, self._rank, self._size, self._sign = device, rank, len(offers), sign
        self._others = {
            number: other
            for number, other in enumerate(offers)
            if number != rank and other.is_seen  # not those of other machines
        }
        self._library = nccl.library()
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._failure = ""
        self._is_queueing = False
        self._last: torch.Event | None = None  # behind what was queued before
        self._values: Tensor | None = None
        """Memory of the sum that was queued last: an exception may leave it in flight."""
        self._trainer = threading.get_ident()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hpctrain-nccl", daemon=True)

    def start(self, unique_id: bytes) -> None:
        """Join the others. Collective. Raises ``CommError``: this rank cannot, or not in time."""
        try:
            with self._device.on(self.stream):
                self._handle = self._library.start(unique_id, self._size, self._rank)
            self._settle("to find the other ranks")
        except CommError as error:
            self.break_off(str(error))
            raise
        self._watcher.start()

    def all_reduce_(self, values: Tensor) -> None:
        """Queue the sum over all ranks, in place, on the current stream, ``stream``.

        Collective; all ranks have said before that they are here for it. ``values`` are flat, of
        one of ``nccl.TYPES``. ``RankLostError`` where a rank is lost.
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
        """Take what comes behind all that was queued so far; every sum needs it."""
        self._last, self._is_queueing = event, False

    def break_off(self, reason: str) -> None:
        """End all that is queued, with any values, and refuse all else. Not collective."""
        with self._lock:
            if self._failure:
                return
            self._failure = reason
            handle, self._handle = self._handle, None
        self._is_over.set()
        self._sign.take_down()
        if handle is not None:
            self._library.abort(handle)

    def close(self) -> None:
        """Wait for what is queued, and free what it holds. Every rank does it."""
        if self._failure:
            return
        in_time = wait_until(self._is_done, _nobody, _PACE, timeout_s=END_S)
        self._is_over.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:  # nothing was broken off meanwhile
            self._failure = "this communicator was closed; make a new one"
            self._free(handle, in_time=in_time)
        self._sign.take_down()

    def _free(self, handle: int, *, in_time: bool) -> None:
        library = self._library
        if in_time:
            with suppress(CommError):
                library.finalize(handle)
                in_time = wait_until(
                    lambda: library.async_error(handle) != nccl.IN_PROGRESS,
                    *(_nobody, _PACE),
                    timeout_s=END_S,
                )
        (library.destroy if in_time else library.abort)(handle)

    @contextmanager
    def _working(self) -> Iterator[int]:
        """Give the handle, which nobody frees inside."""
        with self._lock:
            if self._handle is None:
                raise RankLostError(self._failure)
            yield self._handle

    def _is_done(self) -> bool:
        if self._failure:
            return True
        return not self._is_queueing and (self._last is None or self._last.query())

    def _settle(self, what: str) -> None:
        """Wait until NCCL has begun what it was asked for."""
        code = nccl.IN_PROGRESS

        def is_settled() -> bool:
            nonlocal code
            with self._working() as handle:
                code = self._library.async_error(handle)
            return code != nccl.IN_PROGRESS

        def look(waited_s: float) -> None:
            if waited_s > LOOK_S and not self._watcher.is_alive() and (lost := self._lost()):
                raise RankLostError(f"{_gone(lost)} while NCCL started on rank {self._rank}")

        if not wait_until(is_settled, look, _PACE, timeout_s=START_S):
            raise CommError(
                f"NCCL takes longer than {START_S:g} s {what}; see whether the ranks reach each "
                f"other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), or set HPCTRAIN_DEVICE_SUMS=auto"
            )
        if code != nccl.SUCCESS:
            raise CommError(f"NCCL fails {what}: {self._library.told(code)}")

    def _watch(self) -> None:
        """Break off where something is wrong, until it is over."""
        missed: list[int] = []
        while not self._is_over.wait(LOOK_S):
            reason, lost = self._error(), self._lost()
            if not reason and lost and lost == missed:
                reason = f"{_gone(lost)} while rank {self._rank} waits for a sum"
            missed = lost
            # Those that end in peace have carried out what is queued, and so, soon, has this one.
            if reason and not self._is_done():
                self._tell(reason)

    def _error(self) -> str:
        with suppress(CommError), self._working() as handle:
            code = self._library.async_error(handle)
            if code not in (nccl.SUCCESS, nccl.IN_PROGRESS):
                return f"NCCL has failed: {self._library.told(code)}"
        return ""

    def _lost(self) -> list[int]:
        return [number for number, other in self._others.items() if not other.is_seen]

    def _tell(self, reason: str) -> None:
        """Raise in the thread that trains: it may wait for a stream, and nobody else would."""
        _LOG.error("what NCCL was to sum is broken off: %s", reason)
        members = {"__str__": lambda _: reason, "__module__": RankLostError.__module__}
        error = type(RankLostError.__name__, (RankLostError,), members)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._trainer), ctypes.py_object(error)
        )
        self.break_off(reason)


_made: WeakKeyDictionary[Communicator, dict[torch.device, NcclCommunicator]] = WeakKeyDictionary()


def nccl_over(comm: Communicator, device: Device) -> NcclCommunicator:
    """Return what sums over the ranks of ``comm``, each with its device. Collective.

    ``CommError``, on all ranks, where NCCL cannot do that.
    """
    of_comm = _made.setdefault(comm, {})
    if device.device not in of_comm:
        made = of_comm[device.device] = _joined(comm, device)
        comm.before_close(made.close)
    return of_comm[device.device]


def asked_over(comm: Communicator, device: Device) -> tuple[str, str]:
    """Return this rank's version, if it has NCCL, and why NCCL cannot sum over all. Collective.

    Nothing is started.
    """
    sign = Sign()
    offers = comm.allgather_object(_offer(device, sign))
    sign.take_down()
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
        told = comm.allgather_object("".join(refused) or None)
        refusal = by_rank(told)
    if made is None or refusal:
        if made is not None:
            made.break_off(refusal)
        sign.take_down()
        raise CommError(refusal)
    return made


def _offer(device: Device, sign: Sign) -> Offer:
    with _refusals() as refused:
        version = nccl.library().version if not device.without_nccl else 0
    refusal = device.without_nccl or "".join(refused)
    if not refusal and config.setting("recover"):
        refusal = "ranks that outlive others need sums that end by an error: HPCTRAIN_RECOVER"
    may_share = ranks_share_gpus()
    card = "" if refusal else device.card()
    return Offer(refusal, 0 if refusal else version, card, may_share, sign.path, sign.text)


@contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect what a rank cannot do, for all to hear of."""
    found: list[str] = []
    try:
        yield found
    except CommError as error:
        found.append(str(error))


def why_not(offers: Sequence[Offer]) -> str:
    """Say why NCCL cannot sum over these ranks; empty if it can."""
    if any(offer.refusal for offer in offers):
        return by_rank([offer.refusal or None for offer in offers])
    if len({offer.version for offer in offers}) > 1:
        versions = by_rank([str(offer.version) for offer in offers])
        return f"NCCL must be of one version on all ranks, got {versions}"
    ranks_of: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        ranks_of.setdefault(offer.card, []).append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if shared is None or (
        offers[0].version >= nccl.MANY_PER_CARD and all(offer.may_share for offer in offers)
    ):
        return ""
    return (
        f"NCCL wants a card for each rank, and {format_ranks(shared)} share one; start as many "
        f"ranks on a node as there are cards, or for trials set {SHARES_GPUS}=1, from NCCL 2.30 on"
    )


def _gone(lost: Sequence[int]) -> str:
    return f"{format_ranks(lost)} died, or failed,"


def _nobody(_waited_s: float) -> None:
    """Look for nobody: the watcher does."""
