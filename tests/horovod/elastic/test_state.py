"""States are restored bitwise, and ``sync`` copies the state of rank 0."""

import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.elastic import (
    ElasticSampler,
    HostsUpdatedInterrupt,
    HostUpdate,
    ObjectState,
    State,
    TorchState,
)

SIZES = pytest.mark.ranks(1, 2, 3)
SEVERAL = pytest.mark.ranks(2, 3)


class Scaled(nn.Linear):
    """A module whose state contains an object that is not a tensor."""

    scale = 1

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def training(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Scaled(4, 2))
    model[2].scale = rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + rank))
    return model, optimizer, StepLR(optimizer, 2, gamma=0.5)


def steps(model, optimizer, scheduler, number):
    for seed in range(number):
        torch.manual_seed(100 + seed)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def contents(model, optimizer):
    state = optimizer.state_dict()
    moments = [v for each in state["state"].values() for v in each.values()]
    tensors = [v.clone() for v in model.state_dict().values() if isinstance(v, torch.Tensor)]
    return [*tensors, *(m.clone() for m in moments), torch.tensor(state["param_groups"][0]["lr"])]


def equal(these, those):
    return len(these) == len(those) and all(map(torch.equal, these, those))


@pytest.mark.usefixtures("hvd")
def test_restore_returns_the_committed_state_repeatedly():
    model, optimizer, scheduler = training(0)
    losses = [1.0]
    state = TorchState(model, optimizer, scheduler=scheduler, epoch=0, losses=losses)
    steps(model, optimizer, scheduler, 3)
    state.epoch = 1
    state.losses.append(0.5)
    state.commit()
    committed = contents(model, optimizer)
    for _ in range(2):
        steps(model, optimizer, scheduler, 2)
        assert not equal(contents(model, optimizer), committed)
        state.epoch = 2
        state.losses.append(0.25)
        state.restore()
        assert equal(contents(model, optimizer), committed)
        assert all(p.grad is None for p in model.parameters())  # gradients of the interrupted step
        assert (state.epoch, state.losses) == (1, [1.0, 0.5])
        assert scheduler.last_epoch == 3
    assert (state.model, state.optimizer, state.scheduler) == (model, optimizer, scheduler)


@SIZES
def test_sync_copies_the_state_of_rank_0_and_commits_it(hvd):
    rank = hvd.rank()
    model, optimizer, scheduler = training(rank)
    steps(model, optimizer, scheduler, 3 if rank == 0 else rank)
    state = TorchState(model, optimizer, scheduler=scheduler, batch=20 + rank, names=[rank])
    state.sync()
    reference = training(0)
    steps(*reference, 3)
    assert equal(contents(model, optimizer), contents(*reference[:2]))
    assert (state.batch, state.names, model[2].scale) == (20, [0], 0)
    assert scheduler.last_epoch == 3
    steps(model, optimizer, scheduler, 1)
    state.batch, state.names[0] = 21, 7
    state.restore()
    assert equal(contents(model, optimizer), contents(*reference[:2]))
    assert (state.batch, state.names) == (20, [0])


@SIZES
def test_a_host_update_on_one_rank_interrupts_all_ranks_at_the_next_commit(hvd):
    state = ObjectState(step=1)
    last = hvd.size() - 1
    state.check_host_updates()
    for time, update, skips in ((1.0, HostUpdate.REMOVED, True), (2.0, HostUpdate.ADDED, False)):
        if hvd.rank() == last:
            state.on_hosts_updated(time, update)
        state.step += 1
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is skips
    if hvd.rank() == last:
        state.on_hosts_updated(1.5, HostUpdate.ADDED)  # older than the last update
    state.commit()
    if hvd.rank() == last:
        state.on_hosts_updated(3.0, HostUpdate.REMOVED)
    if hvd.rank() == 0:
        state.on_hosts_updated(2.5, HostUpdate.ADDED)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync
    assert state.step == 3
    assert state.num_commits == 3


@pytest.mark.usefixtures("hvd")
def test_reset_callbacks_run_in_order_after_the_samplers_are_reset():
    sampler = ElasticSampler(range(8))
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 2)
    seen = []
    state.register_reset_callbacks([lambda: seen.append(len(sampler)), lambda: seen.append("b")])
    state.register_reset_callbacks([lambda: seen.append("c")])
    state.on_reset()
    assert seen == [6, "b", "c"]


@pytest.mark.usefixtures("hvd")
def test_a_replaced_model_is_saved_under_its_name():
    state = TorchState(nn.Linear(2, 2))
    other = nn.Linear(3, 1)
    before = other.weight.clone()
    state.model = other
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert torch.equal(other.weight, before)
    with pytest.raises(ConfigError, match=r"a new model must have a state_dict\(\).*, got a int"):
        state.model = 3


@SIZES
def test_attributes_set_later_are_saved_like_arguments(hvd):
    state = TorchState(epoch=0)
    first, values = nn.Linear(2, 2), [hvd.rank()]
    if hvd.rank() == 0:  # spares have not executed this assignment
        state.values = values
    state.model, state.nothing, state._own = first, None, threading.Lock()
    state.restore()
    assert state.values == values if hvd.rank() == 0 else not hasattr(state, "values")
    state.sync()
    assert state.values == [0]
    state.commit()
    sums = hvd.allreduce(first.weight.detach(), op=hvd.Sum)
    torch.testing.assert_close(first.weight.detach() * hvd.size(), sums)
    state.values.append(3)
    state.nothing = nn.init.zeros_(first.weight)
    state.restore()
    assert (state.values, state.nothing, state.epoch, state.model) == ([0], None, 0, first)
    assert first.weight.any()
    with pytest.raises(ConfigError, match=r"lock, of type lock, does not: .* as _lock"):
        state.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"rate, of type function, does not: .* as _rate"):
        state.rate = lambda: 0.1


@SEVERAL
def test_different_model_names_are_an_error_on_all_ranks(hvd):
    state = TorchState(nn.Linear(2, 2))
    if hvd.rank():
        state.other = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match=r"has model, other, and that of rank 0 model"):
        state.sync()


@SEVERAL
def test_models_are_paired_by_name_in_any_order(hvd):
    state, models = TorchState(), {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    for number, model in enumerate(models.values()):
        nn.init.constant_(model.weight, 10 * hvd.rank() + number)
    for name in sorted(models, reverse=hvd.rank() > 0):
        setattr(state, name, models[name])
    state.sync()
    assert [model.weight.unique().tolist() for model in models.values()] == [[0.0], [1.0]]


@pytest.mark.parametrize("name", ["commit", "sync", "_handlers"])
def test_a_reserved_name_is_rejected(name):
    with pytest.raises(ConfigError, match=f"itself uses, got {name}; use"):
        TorchState(**{name: 1})


def test_a_reserved_name_is_rejected_later_too():
    with pytest.raises(ConfigError, match="itself uses, got commit; use"):
        TorchState().commit = 1


@SIZES
def test_a_custom_state_needs_save_restore_and_sync(hvd):
    class Counter(State):
        """A state with one integer."""

        def __init__(self):
            super().__init__(hvd.broadcast_object, hvd.rank)
            self.value = self.saved = hvd.rank()

        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

        def sync(self):
            self.value = self.saved = hvd.broadcast_object(self.value)

    state = Counter()
    state.sync()
    state.value = 5
    state.restore()
    assert state.value == 0
    with pytest.raises(TypeError, match="abstract"):
        State()
