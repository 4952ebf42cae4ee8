"""``elastic.run``: a training with failures ends with the same bits as one without."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain import elastic
from hpctrain.core.errors import (
    CommError,
    HorovodInternalError,
    MismatchError,
    OperationMismatchError,
)
from hpctrain.elastic import ElasticSampler, HostUpdate, ObjectState, TorchState
from hpctrain.horovod.elastic.run import Resets
from hpctrain.horovod.elastic.state import HostsUpdatedInterrupt

SIZES = pytest.mark.ranks(1, 2, 3)
MANY = pytest.mark.ranks(2, 3)
EPOCHS, BATCH, FAIL_AT = 2, 4, 5  # ``FAIL_AT``: an optimizer step between two commits

DATA = torch.arange(48 * 3, dtype=torch.float32).reshape(48, 3).sin()


def mismatch(hvd):
    """Fail on all ranks, by an operation with different shapes."""
    shape = 3 if hvd.rank() == hvd.size() - 1 else 2
    with pytest.raises(OperationMismatchError, match="odd"):
        hvd.allreduce(torch.ones(shape), name="odd")
    raise HorovodInternalError("odd one out")


def last_rank_alone(hvd):
    """Fail on one rank, while the other ranks continue to average gradients."""
    if hvd.rank() == hvd.size() - 1:
        raise HorovodInternalError("the last rank has stumbled")


class Training:
    """A small training that calls each function in ``events`` once, at a given optimizer step."""

    def __init__(self, hvd, **events):
        torch.manual_seed(hvd.rank())
        self.hvd, self.events = hvd, {number: event for event, number in events.values()}
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        sampler = ElasticSampler(DATA, seed=2)
        self.state = TorchState(model, optimizer, sampler=sampler, epoch=0, num_steps=0)
        self.attempts = 0
        self.run = elastic.run(self.train)

    def train(self, state, word="done"):
        self.attempts += 1
        while state.epoch < EPOCHS:
            mine = list(state.sampler)
            for start in range(0, len(mine), BATCH):
                self.step(state, DATA[mine[start : start + BATCH]])
                state.sampler.record_batch(start // BATCH, BATCH)
                state.num_steps += 1
                if state.num_steps % 3 == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
        return word

    def step(self, state, x):
        mse_loss(state.model(x), x[:, :1]).backward()
        if event := self.events.pop(state.num_steps, None):
            event(self.hvd)
        state.optimizer.step()
        state.optimizer.zero_grad()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.state.model.parameters()])


@pytest.fixture
def undisturbed(hvd):
    training = Training(hvd)
    training.run(training.state)
    assert training.attempts == 1
    return training.weights()


@SIZES
@pytest.mark.parametrize("failure", [mismatch, last_rank_alone])
def test_a_training_with_failures_ends_with_the_same_bits(hvd, undisturbed, failure):
    if hvd.size() == 1:
        failure = last_rank_alone
    training = Training(hvd, one=(failure, FAIL_AT), two=(failure, FAIL_AT + 2))
    callbacks = []
    training.state.register_reset_callbacks([lambda: callbacks.append(training.state.num_steps)])
    assert training.run(training.state, word="finished") == "finished"
    assert training.attempts == 3
    assert callbacks == [3, 6] or failure is last_rank_alone  # rank 0 had made one more commit
    assert torch.equal(training.weights(), undisturbed)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="even")[0] == hvd.size()


@MANY
@pytest.mark.parametrize("wait", ["operation", "barrier", "object", "nothing"])
def test_ranks_that_wait_or_have_finished_join_the_next_attempt(hvd, wait):
    attempts = []

    @elastic.run
    def train(state):
        """Train."""
        attempts.append(state.value)
        if len(attempts) == 1:
            last_rank_alone(hvd)
        # "late" is submitted first but waited for second, so it is never announced
        if wait == "operation":
            late = hvd.allreduce_async(torch.ones(3), name="late")
            hvd.allreduce(torch.ones(2), name="early")
            return hvd.synchronize(late)[0]
        if wait == "barrier":
            hvd.barrier()
        return hvd.broadcast_object(hvd.rank()) if wait == "object" else None

    train(ObjectState(value=0))
    assert attempts == [0, 0]
    assert (train.__name__, train.__doc__) == ("train", "Train.")


@SIZES
def test_a_change_of_hosts_loses_no_steps(hvd, undisturbed):
    def news(hvd):
        if hvd.rank() == hvd.size() - 1:
            training.state.on_hosts_updated(1.0, HostUpdate.ADDED)

    training = Training(hvd, one=(news, FAIL_AT))
    callbacks = []
    training.state.register_reset_callbacks([lambda: callbacks.append(training.state.num_steps)])
    training.run(training.state)
    assert training.attempts == 2
    assert callbacks == [6]
    assert torch.equal(training.weights(), undisturbed)


@MANY
def test_other_exceptions_and_mismatched_calls_are_raised(hvd):
    def broken(_):
        raise ValueError("no operation")

    def parts(hvd):
        if hvd.rank() == 0:
            training.state.commit()

    training = Training(hvd, one=(broken, FAIL_AT))
    with pytest.raises(ValueError, match="no operation"):
        training.run(training.state)
    assert training.attempts == 1
    training = Training(hvd, one=(parts, FAIL_AT))
    with pytest.raises(MismatchError, match="same calls in the same order"):
        training.run(training.state)


@MANY
def test_a_mismatch_on_one_rank_is_a_mismatch_on_all(hvd):
    @elastic.run
    def train(_):
        raise HostsUpdatedInterrupt if hvd.rank() == 0 else MismatchError("other calls")

    with pytest.raises(MismatchError, match="other calls"):
        train(ObjectState(value=0))


@SIZES
def test_a_repeated_failure_ends_the_training(hvd):
    attempts = []

    @elastic.run
    def train(state):
        attempts.append(state.value)
        if len(attempts) == 2:
            state.commit()
        last_rank_alone(hvd)
        hvd.barrier()

    with pytest.raises(
        CommError, match=r"in 3 resets, .* rank \d: the last rank has stumbled"
    ) as end:
        train(ObjectState(value=0))
    assert len(attempts) == 5
    assert not isinstance(end.value, HorovodInternalError)


@MANY
def test_a_new_rank_continues_the_count_of_resets(hvd):
    resets = Resets(ObjectState(value=0))
    resets.number = 1 if hvd.rank() else 5  # only rank 0 has taken part from the start
    resets.synchronize()
    assert resets.number == 5


@SIZES
@pytest.mark.usefixtures("hvd")
def test_failures_with_changes_of_hosts_in_between_do_not_end_the_training():
    attempts = []

    @elastic.run
    def train(_):
        attempts.append(len(attempts))
        if len(attempts) < 10:
            raise HostsUpdatedInterrupt if len(attempts) % 2 else HorovodInternalError("again")

    train(ObjectState(value=0))
    assert len(attempts) == 10


@SIZES
def test_the_number_of_resets_can_be_limited(monkeypatch):
    import hpctrain as hvd  # noqa: PLC0415 - the variable must be set before init

    monkeypatch.setenv("HPCTRAIN_ELASTIC_RESET_LIMIT", "1")
    hvd.init()
    attempts = []

    @elastic.run
    def train(state):
        attempts.append(state.value)
        state.commit()
        raise HorovodInternalError("again")

    with pytest.raises(CommError, match=r"1 times, but needs one more reset: .*again; remove"):
        train(ObjectState(value=0))
    assert len(attempts) == 2
    hvd.shutdown()


@SIZES
def test_a_failure_during_sync_starts_another_attempt(hvd):
    class Fragile(ObjectState):
        fails = 1

        def sync(self):
            if self.fails:
                self.fails -= 1
                raise HorovodInternalError("sync")
            super().sync()

    state = Fragile(value=hvd.rank())
    assert elastic.run(lambda state: state.value)(state) == 0


@MANY
@pytest.mark.parametrize("where", ["before a commit", "in a commit"])
def test_all_ranks_return_to_the_same_commit(hvd, where):
    fails = {hvd.size() - 1: {2}}.get(hvd.rank(), set())

    def fail(state, place):
        if place == where and state.step in fails:
            fails.remove(state.step)
            raise HorovodInternalError(f"{where} of one rank")

    class Stumbling(ObjectState):
        def save(self):
            fail(self, "in a commit")  # the other ranks have made that commit
            super().save()

    @elastic.run
    def train(state):
        while state.step < 4:
            state.step += 1
            # the other ranks do not wait for this rank before their commit
            fail(state, "before a commit")
            state.commit()

    state, found = Stumbling(step=0), []
    state.register_reset_callbacks([lambda: found.append((state.step, state.num_commits))])
    train(state)
    common = 1 if where == "before a commit" else 2
    assert found == [(common, common)]
    assert state.num_commits == 4
