"""Check that steps of ``DistributedOptimizer`` have no race, but one if a wait is omitted.

Host tensors count as tensors of a ``CheckedDevice``. Communication runs immediately, as
another host thread that the program waits for where it waits for communication.
"""

import pytest
import torch
from torch import nn

from hpctrain.comm import bucket_storage, device
from hpctrain.comm.operation_result import FINISHED
from hpctrain.gradients import reduction
from tests.gpu.race_checker import CheckedDevice, Checker, Watching


class Staged(bucket_storage.StagedBucket):
    """Report the host's own accesses to the checker."""

    def reduce(self, sum_on_host, scale):
        def seen():
            self.summed.mul_(1.0)
            sum_on_host()

        super().reduce(seen, scale)


@pytest.fixture(autouse=True)
def _inside(monkeypatch):
    """Send buckets during backward, whatever the number of cores of this machine."""
    monkeypatch.setenv("HPCTRAIN_OVERLAP", "inline")


@pytest.fixture
def new_checker(monkeypatch):
    def made():
        checker = Checker()
        stand_in = checker.device = CheckedDevice(checker)
        monkeypatch.setattr(bucket_storage, "device_of", lambda _: stand_in)
        monkeypatch.setattr(bucket_storage, "StagedBucket", Staged)
        monkeypatch.setattr(reduction, "start_on", lambda *call: start_beside(checker, *call))
        return checker

    return made


def start_beside(checker, _comm, function, *args):
    with checker.thread("progress"):
        function(*args)
        known = dict(checker.clocks["progress"])

    class Work:
        def wait(self):
            checker.join("host", known)
            FINISHED.wait()

    return Work()


class Program:
    """Run training steps as users write them."""

    options: dict = {}  # noqa: RUF012
    passes = 1

    def __init__(self, checker, hvd):
        self.checker, self.hvd = checker, hvd

    def plain(self):
        torch.manual_seed(0)
        model = nn.Sequential(*self.layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = self.hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), **self.options
        )
        batch = torch.randn(8, 64) * (1 + self.hvd.rank())
        self.checker.on_device(batch, *model.parameters())
        return model, optimizer, batch

    def layers(self):
        return nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4)

    def run(self):
        model, optimizer, batch = self.plain()
        with Watching(self.checker):
            for _ in range(3):
                for _ in range(self.passes):
                    self.backward(model, batch)
                self.step(optimizer)
            buckets = optimizer._exchange.reduction.layout.buckets
            assert {type(bucket.storage) for bucket in buckets} == {Staged}
        return list(self.checker.races)

    def backward(self, model, batch):
        model(batch).square().mean().backward()

    def step(self, optimizer):
        optimizer.step()
        optimizer.zero_grad()


class KeepsGradients(Program):
    def step(self, optimizer):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class SeveralPasses(Program):
    options, passes = {"backward_passes_per_step": 2}, 2


class SmallBuckets(Program):
    options = {"groups": 3}  # noqa: RUF012


class OnSide(torch.autograd.Function):
    """Compute earlier gradients on another stream; autograd makes it wait for the first stream."""

    @staticmethod
    def forward(ctx, values, checker):
        ctx.checker = checker
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        checker = ctx.checker
        checker.join("side", checker.clocks[checker.stream])
        checker.used_by(grad, "side")
        checker.sides = checker.on("side")
        checker.sides.__enter__()
        return grad, None


class Back(torch.autograd.Function):
    """End the work on the other stream without using a value of it."""

    @staticmethod
    def forward(ctx, values, _leaf, checker):
        ctx.checker = checker
        return values.view_as(values)

    @staticmethod
    def backward(ctx, _grad):
        ctx.checker.sides.__exit__(None, None, None)
        return None, None, None


class Joined(torch.autograd.Function):
    """Let autograd join the streams at the end of backward, before all other work."""

    @staticmethod
    def forward(ctx, values, checker):
        ctx.checker = checker
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        checker = ctx.checker
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: checker.join("compute", checker.clocks["side"])
        )
        return grad, None


class TwoStreams(Program):
    """Train a model with two branches, one of them on a separate stream."""

    def backward(self, model, batch):
        checker, leaf = self.checker, torch.zeros(1, requires_grad=True)
        first = model[0](batch)
        checker.join("side", checker.clocks["compute"])
        with checker.on("side"):
            second = OnSide.apply(model[0].twin(Back.apply(batch, leaf, checker)), checker)
        checker.join("compute", checker.clocks["side"])
        Joined.apply(model[1:](first + second).square().mean(), checker).backward()

    def layers(self):
        layers = super().layers()
        layers[0].twin = nn.Linear(64, 256)
        return layers


@pytest.mark.ranks(2)
def test_steps_have_no_race(hvd, new_checker):
    for program in (Program, KeepsGradients, SeveralPasses, SmallBuckets, TwoStreams):
        assert program(new_checker(), hvd).run() == []


def copies_do_not_wait(device):
    device.down.wait_event = lambda _: None


def caller_does_not_wait(device):
    stream_of = device.current_stream

    def deaf():
        stream = stream_of()
        stream.wait_event = lambda _: None
        return stream

    device.current_stream = deaf


def host_does_not_wait(device):
    event_of = device.new_event

    def hasty():
        event = event_of()
        event.synchronize = lambda: None
        return event

    device.new_event = hasty


def events_are_old(device):
    event_of = device.new_event

    def stale():
        event = event_of()
        event.record = lambda _: None
        return event

    device.new_event = stale


def way_back_is_on_the_wrong_stream(device):
    stream, inside = device.up, device.on
    device.on = lambda chosen: inside(device.new_stream()) if chosen is stream else inside(chosen)


OMISSIONS = (
    copies_do_not_wait,
    caller_does_not_wait,
    host_does_not_wait,
    events_are_old,
    way_back_is_on_the_wrong_stream,
)


@pytest.mark.ranks(2)
def test_waits_omitted_from_a_step_are_found(hvd, new_checker):
    found = {}
    for omission in OMISSIONS:
        for program in (Program, KeepsGradients):
            checker = new_checker()
            omission(checker.device)
            found[omission.__name__, program.__name__] = program(checker, hvd).run()
    assert [name for name, races in found.items() if not races] == []


@pytest.mark.ranks(2)
def test_gradients_of_another_stream_without_a_wait_are_found(hvd, new_checker, monkeypatch):
    monkeypatch.setattr(device.Makers, "join", lambda *_: None)
    assert TwoStreams(new_checker(), hvd).run()
