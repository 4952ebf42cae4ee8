"""Check ``StaleSynchronous``: equal to synchronous SGD without staleness, bounded with it."""

import os
import random
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.comm.node import segments
from hpctrain.core.errors import (
    CommError,
    ConfigError,
    MismatchError,
    NodeMemoryError,
    ReplicaError,
)
from tests.gradients.training import (
    EVERY_SIZE,
    LAST,
    MANY,
    ONE_NODE,
    TWO_NODES,
    global_batch,
    largest_difference,
    make_model,
    part_of,
    sgd,
    train_alone,
)
from tests.local_sgd.local_methods import weights_of

READS = int(os.environ.get("TEST_READS", "0"))
"""Reads of all ranks together, of each bound; 0 for a few."""

OPTIMIZERS = {
    "momentum": sgd,
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.RMSprop(
        [
            {"params": list(model[0].parameters()), "lr": 0.002},
            {"params": list(model[2].parameters())},
            {"params": list(model[4].parameters()), "weight_decay": 0.1},
        ],
        lr=0.001,
    ),
}


def train(hvd, model, optimizer, first, last):
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        images, labels = part_of(global_batch(step, dtype), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


@EVERY_SIZE
@TWO_NODES
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("momentum", torch.float32), ("adam", torch.float64), ("groups", torch.float32)],
    ids=OPTIMIZERS,
)
def test_staleness_0_is_bitwise_equal_to_the_distributed_optimizer(hvd, name, dtype):
    ours, theirs = make_model(dtype), make_model(dtype)
    optimizer = OPTIMIZERS[name](ours)
    with hvd.StaleSynchronous(ours, optimizer, 0) as method:
        train(hvd, ours, optimizer, 0, 6)
    reference = hvd.DistributedOptimizer(OPTIMIZERS[name](theirs), theirs.named_parameters())
    train(hvd, theirs, reference, 0, 6)
    assert largest_difference(ours, theirs) == 0
    assert method.staleness_histogram in ({0: 6}, {})
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            expected = torch.as_tensor(reference.state[other][key])
            assert torch.equal(torch.as_tensor(value), expected), key


@MANY
@ONE_NODE
def test_messages_use_fences_on_processors_that_reorder_stores(hvd, monkeypatch):
    """Gradients are in node memory when the message that announces them arrives."""
    monkeypatch.setattr(segments, "STORES_IN_ORDER", False)  # as on arm64
    calls, post = [], segments.Semaphore.post
    monkeypatch.setattr(segments.Semaphore, "post", lambda own: (calls.append(own), post(own)))
    model = make_model(torch.float32)
    optimizer = sgd(model)
    with hvd.StaleSynchronous(model, optimizer, 0) as method:
        fences = {
            one._fence
            for one in (method._client.messages.requests, method._client.messages.replies)
        }
        assert None not in fences
        train(hvd, model, optimizer, 0, 3)
    assert len(calls) >= 2 * 3


class Ages(nn.Module):
    """Hold one weight per rank, which only this rank increments, in every step.

    The weight of a rank therefore shows how many of its updates are included.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def ages_of_reads(hvd, staleness: int, num_steps: int, pause, **options):
    """Take steps; yield the clock of this rank, and the updates of each rank in its values."""
    model = Ages(hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.StaleSynchronous(model, optimizer, staleness, **options) as method:
        workers = len(method.workers)
        for step in range(num_steps if method.is_worker else 0):
            pause(step)
            yield step, [round(age) for age in (model.weight.detach() * workers).tolist()], method
            optimizer.zero_grad()
            model.weight.grad = torch.zeros_like(model.weight)
            model.weight.grad[hvd.rank()] = -1.0
            optimizer.step()
    ages = [round(age) for age in (model.weight.detach() * workers).tolist()]
    assert all(ages[rank] == num_steps for rank in method.workers), ages  # nothing was lost


def check_bound(hvd, world, staleness, num_steps, pause, **options):
    """Assert the bound for every read; return the largest distance to another rank."""
    size, ahead, method = hvd.size(), 0, None
    for clock, ages, method in ages_of_reads(hvd, staleness, num_steps, pause, **options):
        others = [ages[rank] for rank in method.workers]
        assert min(others) >= clock - staleness, (clock, ages)  # all updates that are old enough
        assert max(others) <= clock, (clock, ages)  # no update of later steps
        assert ages[hvd.rank()] == clock  # all own updates
        ahead = max(ahead, clock - min(others))
    counts = method.staleness_histogram if method and size > 1 else {}
    assert all(0 <= key <= staleness for key in counts)
    assert sum(counts.values()) == (num_steps if counts else 0)
    return max(world.allgather(ahead))


def stumble(rank: int, seconds: float, share: float):
    """Return a pause that is long in a fraction of steps."""
    chance = random.Random(rank)

    def pause(_: int) -> None:
        if chance.random() < share:
            time.sleep(seconds)

    return pause


@MANY
@pytest.mark.limit(1800 if READS else 60)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_reads_include_old_and_own_updates_and_no_later_ones(hvd_nodes, world, staleness):
    num_steps, seconds = max(60, READS // world.size), 0.002 if READS else 0.02
    pause = stumble(hvd_nodes.rank(), seconds, 0.1)
    ahead = check_bound(hvd_nodes, world, staleness, num_steps, pause)
    assert ahead <= staleness
    assert staleness == 0 or ahead > 0  # the bound is reached


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("servers", [1, [0, 2]])
def test_dedicated_servers_keep_the_same_bound(hvd, world, servers):
    pause = stumble(hvd.rank(), 0.01, 0.1)
    assert check_bound(hvd, world, 2, 25, pause, servers=servers) <= 2


@MANY
@TWO_NODES
def test_workers_wait_for_a_straggler_at_the_bound_only(hvd, world):
    """All others take exactly ``staleness`` steps more than a rank that is stopped."""
    model = Ages(hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    times, start = [], None
    with hvd.StaleSynchronous(model, optimizer, 3):
        if hvd.rank() == 0:
            for other in range(1, hvd.size()):
                world.recv(source=other)
            time.sleep(0.1)  # in which a rank that does not wait takes another step
            start = time.monotonic()
        for number in range(8):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            times.append(time.monotonic())
            if number == 2 and hvd.rank():
                world.send(None, dest=0)
    start = world.bcast(start)
    taken = sum(each < start for each in times)
    assert world.allgather(taken) == [0] + [3] * (hvd.size() - 1)


@pytest.mark.ranks(1, 2)
def test_a_closed_method_is_rejected(hvd_nodes):
    model = make_model()
    method = hvd_nodes.StaleSynchronous(model, sgd(model), 1)
    method.close()
    for call in (method.skip_step, method.settle, partial(method.set_num_samples, 1)):
        with pytest.raises(ConfigError, match="StaleSynchronous must be open"):
            call()


@MANY
def test_worker_that_ends_early_blocks_no_rank_and_all_have_one_model(hvd_nodes, world):
    hvd, model = hvd_nodes, make_model()
    optimizer = sgd(model)
    with hvd.StaleSynchronous(model, optimizer, 1) as method:
        train(hvd, model, optimizer, 0, 4 + 3 * hvd.rank())
        if hvd.rank() == 0:
            method.skip_step()
    kinds = world.allgather(weights_of(model).numpy().tobytes())
    assert len(set(kinds)) == 1
    assert not hasattr(optimizer, "_local_method")
    for call in (method.settle, method.settled().__enter__, method.reload, method.__enter__):
        with pytest.raises(
            ConfigError,
            match=r"StaleSynchronous must be open .* save and load model and optimizer as plain",
        ):
            call()
    train(hvd, model, optimizer, 0, 1)  # the plain optimizer, with the state of the servers


@MANY
@TWO_NODES
@pytest.mark.parametrize("make", ["StaleSynchronous", "AsyncSGD", "Downpour"])
def test_a_gradient_of_no_samples_is_not_read(hvd, world, make):
    """The mean loss of an empty batch is NaN."""
    model = Ages(hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_last = world.rank == world.size - 1
    with getattr(hvd, make)(model, optimizer) as method:
        method.set_num_samples(0 if is_last else 5)
        for _ in range(0 if is_last and make == "Downpour" else 4):  # replicas differ
            model.weight.grad = torch.full_like(model.weight, float("nan") if is_last else -1.0)
            optimizer.step()
    assert (model.weight > 0).all()


@MANY
@LAST
@ONE_NODE
@pytest.mark.parametrize("what", ["settled", "same steps", "leaves early"])
def test_different_final_values_raise_on_all_ranks(hvd, what):
    model = make_model()
    optimizer = sgd(model)
    method = hvd.StaleSynchronous(model, optimizer)
    train(hvd, model, optimizer, 0, 1 if what == "leaves early" and hvd.rank() == 0 else 2)
    if what == "settled":
        method.settle()
        hvd.shutdown()
        return
    found = "the number of steps" if what == "leaves early" else "0.weight"
    with pytest.raises(ReplicaError, match=f"{found} of StaleSynchronous, whose block .*rank 0"):
        hvd.shutdown()


@MANY
@TWO_NODES
@pytest.mark.parametrize("staleness", [0, 2])
def test_state_is_stored_on_servers_and_restored_bitwise(hvd, world, staleness):
    """Saved in the middle and loaded into new objects; without staleness the run is identical."""
    model, whole = make_model(), make_model()
    optimizer, other = OPTIMIZERS["adam"](model), OPTIMIZERS["adam"](whole)
    with hvd.StaleSynchronous(model, optimizer, staleness) as method:
        train(hvd, model, optimizer, 0, 5)
        assert not optimizer.state
        with method.settled():
            saved = model.state_dict(), optimizer.state_dict()
            saved = torch.load(_bytes_of(saved))
            assert len(set(world.allgather(_bytes_of(saved).getvalue()))) == 1
        train(hvd, model, optimizer, 5, 9)
    whole.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    with hvd.StaleSynchronous(whole, other, staleness) as method:
        with method.settled():
            again = whole.state_dict(), other.state_dict()
            assert _bytes_of(again).getvalue() == _bytes_of(saved).getvalue()
        train(hvd, whole, other, 5, 9)
    if staleness == 0:
        assert largest_difference(model, whole) == 0
    elif hvd.size() > 1:
        assert largest_difference(model, train_alone(9)) > 0


@MANY
@TWO_NODES
def test_changed_values_raise_until_servers_reload_them(hvd):
    model = make_model()
    optimizer = sgd(model)
    with hvd.StaleSynchronous(model, optimizer) as method:
        train(hvd, model, optimizer, 0, 2)
        with method.settled():
            momentum = optimizer.state[model[0].weight]["momentum_buffer"]
            model[0].weight.data = torch.ones_like(model[0].weight)
            method.reload()
        with method.settled():
            assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)
        model[2].load_state_dict(make_model()[2].state_dict())
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"changed outside of step\(\) \(2.weight, 2.bias"
            ):
                method.settle()
        method.reload()
    assert torch.equal(model[0].weight, torch.ones_like(model[0].weight))
    assert torch.equal(model[2].weight, make_model()[2].weight)


def _bytes_of(value):
    import io  # noqa: PLC0415 - of this function alone

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@MANY
@TWO_NODES
@pytest.mark.parametrize(
    ("what", "match"), [("lr", "same settings"), ("samples", r"call set_num_samples\(\) on every")]
)
def test_different_settings_raise_on_all_ranks(hvd, what, match):
    model = make_model()
    optimizer = sgd(model)
    method = hvd.StaleSynchronous(model, optimizer, 0)
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.1 if hvd.rank() else 0.2
    elif hvd.rank() == 0:
        method.set_num_samples(3)
    with pytest.raises(MismatchError, match=match), method:
        train(hvd, model, optimizer, 0, 3)


@pytest.mark.ranks(3)
@LAST
@ONE_NODE
def test_an_error_of_one_rank_ends_the_block_on_all(hvd, world):
    model = make_model()
    optimizer = sgd(model)
    method = hvd.StaleSynchronous(model, optimizer, 1)

    def loop() -> None:
        for step in range(9):
            if step == 3 and hvd.rank() == 1:
                raise ValueError("mine")
            train(hvd, model, optimizer, step, step + 1)

    with pytest.raises((ValueError, CommError)) as caught, method:
        loop()
    kinds = world.allgather(type(caught.value).__name__)
    assert kinds == ["RankLostError", "ValueError", "RankLostError"][: world.size]


@pytest.mark.ranks(2)
@LAST
def test_invalid_arguments_are_rejected_at_construction(hvd, world):
    model = make_model()
    plain = sgd(model)
    for arguments, match in (
        ({"staleness": -1}, "must be (at least 0|an integer)"),
        ({"staleness": True}, "must be (at least 0|an integer)"),
        ({"servers": 2}, "leave a worker"),
        ({"servers": [0, 0]}, "distinct ranks"),
        ({"servers": [5]}, "distinct ranks"),
        ({"curvature": 0.0}, "curvature must be above 0"),
        ({"curvature": float("nan")}, "curvature must be above 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            hvd.StaleSynchronous(model, plain, **arguments)
    with pytest.raises(MismatchError, match="rank 0: staleness=1; rank 1: staleness=2"):
        hvd.StaleSynchronous(model, plain, 1 + world.rank)
    with pytest.raises(NodeMemoryError, match="so a smaller staleness needs less"):
        hvd.StaleSynchronous(model, plain, 10**12)
    for make in (hvd.StaleSynchronous, hvd.Downpour, hvd.Hogwild):
        with pytest.raises(ConfigError, match=r"a torch.nn.Module, got generator"):
            make(model.parameters(), plain)
        with pytest.raises(ConfigError, match=r"one of torch.optim, got list"):
            make(model, [1])
    with pytest.raises(ConfigError, match="got differentiable=True"):
        hvd.StaleSynchronous(model, sgd(model, differentiable=True))
    with pytest.raises(ConfigError, match="got some on meta"):
        hvd.StaleSynchronous(away := nn.Linear(1, 1, device="meta"), sgd(away))
    loaded = sgd(model)
    if world.rank == 0:
        loaded.state[model[0].weight] = {"momentum_buffer": torch.ones_like(model[0].weight)}
    with pytest.raises(MismatchError, match=r"rank 0: 0.weight .*momentum_buffer"):
        hvd.StaleSynchronous(model, loaded)
    other = nn.Linear(2 + world.rank, 1)
    with pytest.raises(MismatchError, match="differs"):
        hvd.StaleSynchronous(other, sgd(other))
    with pytest.raises(ConfigError, match="elementwise"):
        hvd.StaleSynchronous(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="plain"):
        hvd.StaleSynchronous(model, hvd.DistributedOptimizer(sgd(model)))
    method = hvd.StaleSynchronous(model, plain)
    for other in (hvd.StaleSynchronous, hvd.LocalSGD):
        with pytest.raises(ConfigError, match=r"one (local or asynchronous|local) method"):
            other(model, plain)
    for other in (hvd.StaleSynchronous, hvd.Downpour, hvd.AsyncSGD, hvd.Hogwild):
        with pytest.raises(ConfigError, match="a parameter can only have one"):
            other(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="sample count"):
        method.set_num_samples("a")
    with pytest.raises(ConfigError, match="closure"):
        plain.step(lambda: 0.0)
    method.close()


@pytest.mark.ranks(3)
@LAST
@ONE_NODE
@pytest.mark.parametrize("what", ["outside", "end", "close", "settle"])
def test_changes_unknown_to_servers_raise_on_all_ranks(hvd, world, what):
    model = make_model()
    optimizer = sgd(model)
    method = hvd.StaleSynchronous(model, optimizer, 2)
    is_one = world.rank == world.size - 1

    def loop() -> None:
        train(hvd, model, optimizer, 0, 2)
        if is_one and what == "outside":
            optimizer.state[model[2].bias]["momentum_buffer"] = torch.ones(32)
            with pytest.raises(ConfigError, match=r"state of the optimizer was .*\(2.bias"):
                optimizer.step()
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
        if is_one and what == "settle":
            method.settle()
        if is_one and what == "close":
            method.close()
            return
        train(hvd, model, optimizer, 2, 5)
        if what == "end" and not is_one:
            method.finish()

    with pytest.raises((ConfigError, MismatchError, CommError)) as caught, method:
        loop()
    match = {"end": "same settle", "close": "same settle", "settle": "same settle"}
    texts = world.allgather(str(caught.value))
    if what == "close":
        assert "must be open" in texts.pop(), texts
    wanted = match.get(what, "changed outside of step() (0.weight")
    assert all(wanted in text for text in texts), texts
