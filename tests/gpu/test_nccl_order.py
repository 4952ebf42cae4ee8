"""Check that gradients summed by NCCL have no race, and that each omitted wait is found.

Streams and events come from ``race_checker``, buckets from the library.
"""

import gc
from functools import partial

import pytest
import torch

from hpctrain.comm.bucket_storage import NcclBucket
from tests.gpu.test_order import (
    NUMEL,
    DroppedUnderWay,
    DroppedUnknown,
    Staged,
    WrittenAfterDeparture,
    _before,
    nothing,
)


class QueuedSums:
    """Replace NCCL: sums of a rank read and write only the elements of that rank."""

    def __init__(self, device):
        self.stream = device.new_stream("nccl")

    def all_reduce_(self, values):
        values.mul_(2.0)  # on the current stream

    def ends_with(self, event):
        pass


class ByNccl(Staged):
    """Run the steps of one rank with NCCL buckets; subclasses omit waits."""

    def new_bucket(self, _):
        bucket = NcclBucket(self.device, QueuedSums(self.device), NUMEL, torch.float32)
        bucket.reduce = partial(bucket.reduce, scale=0.5)
        return bucket

    def step(self):
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.fill(bucket, weight * 0.5 + 1)
            with self.checker.thread("progress"):
                bucket.reduce(nothing)
                known = dict(self.checker.clocks["progress"])
            self.checker.join("host", known)
        for bucket, weight in zip(self.buckets, self.weights, strict=True):
            self.arrive(bucket)
            weight.add_(bucket.flat, alpha=-0.1)


class NcclDroppedUnderWay(ByNccl, DroppedUnderWay):
    def end(self):
        for bucket in self.buckets:
            bucket.flat.fill_(1.0)
            bucket.depart()
            bucket.reduce(nothing)
        self.buckets.clear()
        del bucket
        gc.collect()
        self.device.zeros(NUMEL, torch.float32, ())


class NcclDroppedUnknown(NcclDroppedUnderWay, DroppedUnknown):
    pass


class NcclDoesNotWait(ByNccl):
    def new_bucket(self, _):
        bucket = super().new_bucket(_)
        bucket._nccl.stream.wait_event = nothing
        return bucket


class NcclCallerDoesNotWait(ByNccl):
    def arrive(self, bucket):
        pass


class NcclRecordedBeforeTheSum(ByNccl):
    def new_bucket(self, _):
        bucket = super().new_bucket(_)
        record, bucket._back.record = bucket._back.record, nothing
        bucket._sum = _before(lambda: record(bucket._nccl.stream), bucket._sum)
        return bucket


class NcclRecordedOnTheOtherStream(ByNccl):
    def new_bucket(self, _):
        bucket = super().new_bucket(_)
        record = bucket._back.record
        bucket._back.record = lambda _: record(self.device.up)
        return bucket


class NcclSumsOnTheOtherStream(ByNccl):
    def new_bucket(self, _):
        bucket = super().new_bucket(_)
        bucket._sum = self.device.on(self.device.up)(bucket._sum)
        return bucket


class NcclScalesOnTheHostsStream(ByNccl):
    def new_bucket(self, _):
        bucket = super().new_bucket(_)
        bucket.reduce = partial(bucket.reduce.func, scale=None)
        reduce = bucket.reduce

        def scaled_behind(check_call):
            reduce(check_call)
            bucket.flat.mul_(0.5)

        bucket.reduce = scaled_behind
        return bucket


class WrittenAfterDepartureToNccl(ByNccl, WrittenAfterDeparture):
    pass


@pytest.mark.parametrize("program", [ByNccl, NcclDroppedUnderWay])
def test_buckets_summed_by_nccl_have_no_race(program):
    assert program().races() == []


@pytest.mark.parametrize(
    "program",
    [
        NcclDroppedUnknown,
        NcclDoesNotWait,
        NcclCallerDoesNotWait,
        NcclRecordedBeforeTheSum,
        NcclRecordedOnTheOtherStream,
        NcclSumsOnTheOtherStream,
        NcclScalesOnTheHostsStream,
        WrittenAfterDepartureToNccl,
    ],
)
def test_omitted_waits_around_nccl_are_found(program):
    assert program().races()
