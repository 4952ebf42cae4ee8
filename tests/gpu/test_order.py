"""Check that gradients on an accelerator have no race, and that each omitted wait is found.

Streams and events come from ``race_checker``, buckets from the library.
"""

import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hpctrain.comm.bucket_storage import StagedBucket
from hpctrain.comm.node.peer_bucket import PeerBucket
from hpctrain.comm.node.peer_memory import Segment
from hpctrain.comm.operation_result import FINISHED
from tests.gpu import race_checker
from tests.gpu.race_checker import CheckedDevice, Checker, Meeting, Watching

NUMEL, STEPS, BUCKETS = 1000, 3, 2
Plant = Callable[..., object]


def nothing(*_):
    pass


class Staged:
    """Run the steps of one rank with buckets summed by the host; subclasses omit waits."""

    def __init__(self):
        self.checker = Checker()
        self.device = self.new_device()
        hosts = [torch.zeros(NUMEL) for _ in range(BUCKETS)]
        self.buckets = [self.new_bucket(host) for host in self.twins(hosts)]
        self.weights = [torch.zeros(NUMEL) for _ in range(BUCKETS)]
        self.checker.on_device(*self.weights)

    def new_device(self):
        return CheckedDevice(self.checker)

    def new_bucket(self, host):
        return StagedBucket(self.device, host)

    def twins(self, hosts):
        return hosts

    def fill(self, bucket, gradient):
        bucket.flat.copy_(gradient)
        bucket.depart()

    def arrive(self, bucket):
        bucket.arrive()

    def step(self):
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.fill(bucket, weight * 0.5 + 1)
            with self.checker.thread("progress"):
                bucket.reduce(lambda twin=bucket.summed: twin.mul_(2.0), None)
                known = dict(self.checker.clocks["progress"])
            self.checker.join("host", known)  # the host has waited for the reduction
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.arrive(bucket)
            weight.add_(bucket.flat, alpha=-0.1)

    def end(self):
        pass

    def races(self):
        with Watching(self.checker):
            for _ in range(STEPS):
                self.step()
            self.end()
        return list(self.checker.races)


class CopiesDoNotWait(Staged):
    def new_device(self):
        device = super().new_device()
        device.down.wait_event = nothing
        return device


class WrittenAfterDeparture(Staged):
    def fill(self, bucket, gradient):
        bucket.flat.copy_(gradient)
        bucket.depart()
        bucket.flat.mul_(0.5)


class HostDoesNotWait(Staged):
    def new_bucket(self, host):
        bucket = super().new_bucket(host)
        bucket._on_host.synchronize = nothing
        return bucket


class RecordedOnTheOtherStream(Staged):
    def new_bucket(self, host):
        bucket = super().new_bucket(host)
        record = bucket._on_host.record
        bucket._on_host.record = lambda _: record(self.device.up)
        return bucket


class RecordedBeforeTheCopyBack(Staged):
    def new_bucket(self, host):
        bucket = super().new_bucket(host)
        record, bucket._back.record = bucket._back.record, nothing
        bucket.reduce = _before(lambda: record(self.device.up), bucket.reduce)
        return bucket


class CallerDoesNotWait(Staged):
    def arrive(self, bucket):
        pass


class OneTwinForAll(Staged):
    def twins(self, hosts):
        return [hosts[0]] * len(hosts)

    def step(self):  # as in backward: all buckets are sent before the first is summed
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.fill(bucket, weight * 0.5 + 1)
        for bucket in self.buckets:
            bucket.reduce(lambda twin=bucket.summed: twin.mul_(2.0), None)
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.arrive(bucket)
            weight.add_(bucket.flat, alpha=-0.1)


class FilledWhileComingBack(Staged):
    """Start the next backward on another stream than the one that has waited."""

    def fill(self, bucket, gradient):
        with self.checker.on("side"):
            super().fill(bucket, gradient)


class HostWritesWhatTravels(Staged):
    def fill(self, bucket, gradient):
        super().fill(bucket, gradient)
        bucket.summed.zero_()


class DroppedUnderWay(Staged):
    """Drop the buckets while their copies are in flight; ``record_stream`` was called."""

    def end(self):
        for bucket in self.buckets:
            bucket.flat.fill_(1.0)
            bucket.depart()
        self.buckets.clear()
        del bucket
        gc.collect()
        self.device.zeros(NUMEL, torch.float32, ())


class DroppedUnknown(DroppedUnderWay):
    """Drop the buckets while copies are in flight, without ``record_stream``."""

    def new_device(self):
        device = super().new_device()
        zeros = device.zeros
        device.zeros = lambda numel, dtype, _: zeros(numel, dtype, ())
        return device


def _before(first, then):
    def both(*args):
        first()
        then(*args)

    return both


@pytest.mark.parametrize("program", [Staged, DroppedUnderWay])
def test_buckets_summed_by_the_host_have_no_race(program):
    assert program().races() == []


@pytest.mark.parametrize(
    "program",
    [
        CopiesDoNotWait,
        WrittenAfterDeparture,
        HostDoesNotWait,
        RecordedOnTheOtherStream,
        RecordedBeforeTheCopyBack,
        CallerDoesNotWait,
        OneTwinForAll,
        FilledWhileComingBack,
        HostWritesWhatTravels,
        DroppedUnknown,
    ],
)
def test_omitted_waits_around_host_sums_are_found(program):
    assert program().races()


class InProcess(Segment):
    """Hold the memory of a rank that is a thread: its peers can access it directly."""

    offered: list = []  # noqa: RUF012 - of all ranks

    def __init__(self, checker, num_bytes):
        super().__init__(torch.zeros(num_bytes, dtype=torch.uint8))
        checker.on_device(self.own)
        self.handle = len(InProcess.offered).to_bytes(8)
        InProcess.offered.append(self.own)

    def mapped(self, handle):
        return InProcess.offered[int.from_bytes(handle)]


class PeerDevice(CheckedDevice):
    keeps_apart = ""

    def new_segment(self, num_bytes):
        return InProcess(self.checker, num_bytes)

    def shared_event(self, comm, members):
        events = comm.allgather_object(self.new_event())
        return events[comm.rank], [events[rank] for rank in members]


class Threads:
    """Provide the communicators of ranks that are threads, on one node or on two."""

    def __init__(self, checker: Checker, rank: int, meeting: Meeting, *, has_rail: bool):
        self.checker, self.rank, self.size, self._meeting = (
            checker,
            rank,
            meeting.num_ranks,
            meeting,
        )
        self.node = SimpleNamespace(
            local_rank=rank, local_size=self.size, barrier=self.barrier, ranks_of=None
        )
        self.node_ranks = list(range(self.size))
        self.num_rails = self.size if has_rail else 0
        rail = SimpleNamespace(allreduce_=lambda values: (values.mul_(2.0), FINISHED)[1])
        self.internode = rail if has_rail else None

    def allgather_object(self, given):
        known = dict(self.checker.clocks[self.checker.host])
        answers = self._meeting.exchange(self.rank, (given, known))
        for _, state in answers:
            self.checker.join(self.checker.host, state)
        return [each for each, _ in answers]

    def barrier(self):
        self.allgather_object(None)


class Peers:
    """Run steps of several ranks whose accelerators sum in each other's memory."""

    num_ranks, has_rail = 2, False

    def __init__(self):
        self.checker = Checker()

    def new_bucket(self, comm):
        device = PeerDevice(self.checker)
        return PeerBucket(device, comm, NUMEL + 1, torch.float32)

    def check_call(self, comm):
        comm.barrier()

    def arrive(self, bucket):
        bucket.arrive()

    def end(self, comm, buckets):
        pass

    def program(self, rank, meeting):
        checker = self.checker
        checker.name(f"rank {rank}")
        with Watching(checker):
            comm = Threads(checker, rank, meeting, has_rail=self.has_rail)
            buckets = [self.new_bucket(comm) for _ in range(BUCKETS)]
            weights = [torch.zeros(NUMEL + 1) for _ in buckets]
            checker.on_device(*weights)
            for _ in range(STEPS):
                for bucket, weight in zip(buckets, weights, strict=True):
                    bucket.flat.copy_(weight * 0.5 + rank)
                    bucket.depart()
                for bucket in buckets:
                    bucket.reduce(lambda: self.check_call(comm), 0.5)
                for bucket, weight in zip(buckets, weights, strict=True):
                    self.arrive(bucket)
                    weight.add_(bucket.flat, alpha=-0.1)
            self.end(comm, buckets)

    def races(self):
        race_checker.ranks_in_turn(self.num_ranks, self.program)
        return list(self.checker.races)


class ThreePeers(Peers):
    num_ranks = 3


class PeersOfTwoNodes(Peers):
    has_rail = True


class SegmentServesAgain(Peers):
    """Let new buckets reuse the memory of dropped buckets."""

    def end(self, comm, buckets):
        buckets.clear()
        gc.collect()
        buckets += [self.new_bucket(comm) for _ in range(BUCKETS)]
        for bucket in buckets:
            bucket.flat.fill_(1.0)
            bucket.depart()
            bucket.reduce(comm.barrier, None)
            bucket.arrive()
            bucket.flat.mul_(2.0)


class WaitsForNoPeer(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        bucket._fulls = [bucket._full]
        return bucket


class WaitsForPeersAlone(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        bucket._fulls = [full for full in bucket._fulls if full is not bucket._full]
        return bucket


class DoesNotMeetBefore(Peers):
    def check_call(self, comm):
        pass


class DoesNotMeetBehind(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        bucket._node = SimpleNamespace(barrier=nothing)
        return bucket


class WaitsForOwnSliceAlone(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        bucket._dones = [bucket._done]
        return bucket


class RecordedBeforeTheSlices(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        record, bucket._back.record = bucket._back.record, nothing
        bucket._done.record = _before(lambda: record(bucket._device.up), bucket._done.record)
        return bucket


class DoneBeforeTheSum(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        record, bucket._done.record = bucket._done.record, nothing
        bucket._sum_slice = _before(lambda: record(bucket._device.up), bucket._sum_slice)
        return bucket


class PeersGoOn(Peers):
    def arrive(self, bucket):
        pass


class SlicesOverlap(Peers):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        if comm.rank == 0:  # one element of the slice of rank 1
            num = bucket._parts[0].numel() + 1
            bucket._parts = [part.as_strided((num,), (1,)) for part in bucket._parts]
            bucket._total = torch.empty_like(bucket._parts[0])
        return bucket


class HostDoesNotWaitForSlice(PeersOfTwoNodes):
    def new_bucket(self, comm):
        bucket = super().new_bucket(comm)
        bucket._on_host.synchronize = nothing
        return bucket


@pytest.mark.parametrize("program", [Peers, ThreePeers, PeersOfTwoNodes, SegmentServesAgain])
def test_buckets_summed_by_accelerators_have_no_race(program):
    assert program().races() == []


@pytest.mark.parametrize(
    "program",
    [
        WaitsForNoPeer,
        WaitsForPeersAlone,
        DoesNotMeetBefore,
        DoesNotMeetBehind,
        WaitsForOwnSliceAlone,
        RecordedBeforeTheSlices,
        DoneBeforeTheSum,
        PeersGoOn,
        SlicesOverlap,
        HostDoesNotWaitForSlice,
    ],
)
def test_omitted_waits_between_accelerators_are_found(program):
    assert program().races()
