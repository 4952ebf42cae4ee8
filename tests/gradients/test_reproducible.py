"""Check that reproducible steps are bitwise equal on any number of ranks."""

import hashlib
import pickle
import random
from collections.abc import Callable, Generator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.gradients.fixed_tree import ALIGNMENT, own_micro_shards, sample_range
from hpctrain.gradients.reproducible import Reproducible
from hpctrain.runtime.world import current
from tests.gradients.training import EVERY_SIZE, MANY, ONE_NODE, distributed, make_model, sgd

CLASSES = 5


class Attention(nn.Module):
    """Define a transformer of one layer over 6 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)).mean(dim=1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(19, 33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 17), nn.Linear(17, CLASSES)
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 9, 3),
        nn.BatchNorm2d(9, momentum=None),
        nn.Flatten(),
        nn.Linear(9 * 16, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv, "transformer": Attention}


def batch_of(kind: str, step: int, samples: range) -> tuple[Tensor, Tensor]:
    """Return some samples of the global batch of a step, in separate memory."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (64,), generator=generator)
    if kind == "transformer":
        inputs = torch.randint(11, (64, 6), generator=generator)
    else:
        shape = (19,) if kind == "mlp" else (3, 6, 6)
        inputs = torch.randn(64, *shape, generator=generator)
    own = slice(samples.start, samples.stop)
    return inputs[own], labels[own]


def own_batch(steps: Reproducible, num_samples: int = 16, step: int = 0):
    """Return this rank's samples of a global batch of four micro-shards."""
    return batch_of("mlp", step, sample_range(num_samples, 4, steps.own))


def make(kind: str, comm: Communicator, micro_shards: int, optimizer=torch.optim.AdamW):
    """Make a model, its optimizer and ``Reproducible``, identical on every rank."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    stepping = optimizer(model.parameters(), lr=0.01)
    steps = Reproducible(model, stepping, comm, num_micro_shards=micro_shards, seed=7)
    return model, stepping, steps


def loss_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Return the loss of a micro-shard, and assert that its inputs are aligned."""

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        assert part[0].data_ptr() % ALIGNMENT == 0
        return cross_entropy(model(part[0]), part[1])

    return loss


def train(
    kind: str,
    comm: Communicator,
    *,
    num_steps: int,
    micro_shards: int = 4,
    num_samples: int = 32,
) -> str:
    """Train; return the hash of weights, buffers, optimizer state and losses."""
    model, optimizer, steps = make(kind, comm, micro_shards)
    own = own_micro_shards(micro_shards, comm.rank, comm.size)
    samples = sample_range(num_samples, micro_shards, own)
    output = num_samples if num_samples % micro_shards else None
    losses = [
        steps.step(batch_of(kind, step, samples), loss_of(model), num_samples=output)
        for step in range(num_steps)
    ]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    return state_hash(state)


def digest(tensors: list[Tensor]) -> str:
    """Return a hash of tensors, independent of the library."""
    data = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def threads() -> Generator[None]:
    """Start with two threads, and restore the number of threads after the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def comm(hvd):
    assert hvd.is_initialized()
    return current().comm


def same_as_alone(comm, kind: str, **how) -> None:
    together = train(kind, comm, **how)
    alone = train(kind, SerialCommunicator(), **how) if comm.rank == 0 else ""
    hashes = comm.allgather_object(together)
    assert set(hashes) == {comm.broadcast_object(alone)}


@MANY
@ONE_NODE
@pytest.mark.parametrize("kind", MODELS)
def test_training_has_the_bits_of_one_rank(comm, kind):
    same_as_alone(comm, kind, num_steps=8)


@MANY
@pytest.mark.parametrize(
    ("kind", "micro_shards", "num_samples"),
    [("mlp", 8, 64), ("mlp", 16, 11), ("conv", 8, 43), ("transformer", 32, 61)],
)
def test_ranges_without_whole_nodes_and_unequal_micro_shards_have_the_same_bits(
    comm, kind, micro_shards, num_samples
):
    same_as_alone(comm, kind, num_steps=4, micro_shards=micro_shards, num_samples=num_samples)


@pytest.mark.ranks(1)
@ONE_NODE
def test_another_number_of_micro_shards_has_other_bits(comm):
    hashes = {train("mlp", comm, num_steps=3, micro_shards=shards) for shards in (1, 2, 4, 8)}
    assert len(hashes) == 4


@MANY
@ONE_NODE
@pytest.mark.parametrize("message_bytes", [1, 1 << 30])
def test_messages_of_any_size_have_the_same_bits(comm, monkeypatch, message_bytes):
    monkeypatch.setattr("hpctrain.gradients.fixed_tree.MESSAGE_BYTES", message_bytes)
    same_as_alone(comm, "conv", num_steps=3, micro_shards=8)


@EVERY_SIZE
@ONE_NODE
@pytest.mark.parametrize("num_samples", [32, 13])
def test_gradient_and_loss_are_those_of_the_global_batch(comm, num_samples):
    model, _, steps = make("mlp", comm, 4)
    model.eval()  # no dropout
    batch = own_batch(steps, num_samples)
    loss = steps.backward(batch, loss_of(model), num_samples=num_samples)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    inputs, labels = batch_of("mlp", 0, range(num_samples))
    expected = cross_entropy(model(inputs), labels)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for gradient, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)


@EVERY_SIZE
@ONE_NODE
def test_running_statistics_use_the_mean_over_micro_shards(comm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(19), nn.Linear(19, 5))
    steps = Reproducible(model, sgd(model), comm, num_micro_shards=4, seed=0)
    for _ in range(2):
        steps.step(own_batch(steps, 32), loss_of(model))
    parts = batch_of("mlp", 0, range(32))[0].split(8)
    mean = sum(part.mean(0) for part in parts) / 4
    torch.testing.assert_close(model[0].running_mean, mean * (1 - 0.9**2))
    var = sum(part.var(0) for part in parts) / 4
    torch.testing.assert_close(model[0].running_var, 0.81 + var * (1 - 0.9**2))
    assert int(model[0].num_batches_tracked) == 2


@EVERY_SIZE
@ONE_NODE
def test_reports_of_a_step_do_not_grow_with_the_number_of_tensors(comm, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.BatchNorm1d(19) for _ in range(30)), nn.Linear(19, 5))
    steps = Reproducible(model, sgd(model), comm, num_micro_shards=4, seed=0)
    gather, sent = comm.allgather_object, []
    monkeypatch.setattr(
        comm, "allgather_object", lambda value: gather(sent.append(value) or value)
    )
    steps.step(own_batch(steps, 32), loss_of(model))
    assert len(pickle.dumps(sent)) < 400
    assert all(int(layer.num_batches_tracked) == 1 for layer in model[:-1])


class Odd(nn.Module):
    """Define unused and partly used parameters, a shared gradient, and a replaced buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(19, 5), nn.Linear(19, 5)
        self.left, self.right = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(1, 5))
        self.table = nn.Embedding(8, 5, sparse=True)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("largest", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs):
        self.largest = self.largest + 1
        self.last = (inputs[0, :3] * 1000).long()
        both = self.left.view(5, 1) + self.right.view(
            5, 1
        )  # autograd computes one gradient for both
        scores = both.view(5) + self.table(inputs[:, 0].long() % 8)
        if inputs[0, 0] > 0.5:
            self.seen = self.seen + inputs[0, :3]
            scores = scores + self.sometimes(inputs)
        return scores


@EVERY_SIZE
@ONE_NODE
def test_parameters_used_by_some_micro_shards_have_the_same_bits(comm):
    def odd(comm):
        torch.manual_seed(0)
        model = Odd()
        optimizer = sgd(model, weight_decay=0.1)
        steps = Reproducible(model, optimizer, comm, num_micro_shards=8, seed=0)
        for step in range(4):
            own = range(4 * steps.own.start, 4 * steps.own.stop)
            steps.step(batch_of("mlp", step, own), loss_of(model))
        assert model.never.weight.grad is None
        assert model.left.grad.data_ptr() != model.right.grad.data_ptr()
        assert int(model.largest) == 4
        (first,) = batch_of("mlp", 3, range(1))[0]  # the start of the first micro-shard
        assert model.last.tolist() == (first[:3] * 1000).long().tolist()
        assert model.seen.any()
        return digest([*model.parameters(), *model.buffers()])

    assert set(comm.allgather_object(odd(comm))) == {odd(SerialCommunicator())}


def global_states():
    states = torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()  # noqa: NPY002
    return pickle.dumps(states)


DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": np.random.random,
    "random": random.random,
}


@EVERY_SIZE
@ONE_NODE
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_depend_on_micro_shard_and_step_only(comm, name):
    def numbers(comm):
        drawn = []

        def draw(part):
            drawn.append(DRAWS[name]())
            return model(part[0]).sum()

        model, _, steps = make("mlp", comm, 4)
        before = global_states()
        for _ in range(2):
            steps.backward(own_batch(steps, 4), draw)
        assert global_states() == before
        return drawn

    everywhere = [number for each in comm.allgather_object(numbers(comm)) for number in each]
    assert len(set(everywhere)) == len(everywhere) == 8
    assert set(everywhere) == set(numbers(SerialCommunicator()))


@EVERY_SIZE
@ONE_NODE
def test_state_dict_resumes_the_random_numbers(comm):
    def steps_after(num_before, state=None):
        model, _, steps = make("mlp", comm, 4)
        if state:
            steps.load_state_dict(state)
        for _ in range(num_before + 1):
            loss = steps.backward(own_batch(steps), loss_of(model))
        return loss, steps.state_dict()

    after_two, _ = steps_after(2)
    first, _ = steps_after(0)
    _, state = steps_after(1)
    assert steps_after(0, state)[0] == after_two != first


@EVERY_SIZE
@ONE_NODE
def test_one_thread_is_the_default_and_every_rank_sees_the_flags_of_all(comm):
    model, _, steps = make("mlp", comm, 4)
    steps.raise_flags(2 if comm.rank == comm.size - 1 else 0)
    steps.backward(own_batch(steps), loss_of(model))
    assert steps.raised_flags == 2
    assert torch.get_num_threads() == 1
    assert steps.facts["threads"] == "1"
    assert all(steps.facts.values())


@EVERY_SIZE
@ONE_NODE
def test_part_of_a_wrong_size_raises_on_every_rank(comm):
    model, _, steps = make("mlp", comm, 4)
    bad = comm.rank == comm.size - 1
    samples = range(4 * len(steps.own))
    for batch, output in (
        (batch_of("mlp", 0, range(0) if bad else samples), None),
        (batch_of("mlp", 0, range(1) if bad else samples), 16),
        (["text"] if bad else batch_of("mlp", 0, samples), None),
    ):
        with pytest.raises(MismatchError, match=r"micro-shards|a batch must consist of"):
            steps.backward(batch, loss_of(model), num_samples=output)
    assert steps.next_step == 0  # so that the step can be repeated


@MANY
@ONE_NODE
def test_ranks_must_take_the_same_steps(comm):
    model, _, steps = make("mlp", comm, 4)
    steps.next_step = comm.rank
    with pytest.raises(MismatchError, match=r"rank 0: step 0 of .*; rank"):
        steps.backward(own_batch(steps), loss_of(model))


@EVERY_SIZE
@ONE_NODE
def test_arguments_are_checked(hvd, comm):
    model = make_model()
    for wrong in (0, 3, -4):
        with pytest.raises(ConfigError, match="power of two"):
            Reproducible(model, sgd(model), comm, num_micro_shards=wrong, seed=0)
    if comm.size > 2:
        with pytest.raises(ConfigError, match=r"at least the number of ranks, got .* use 4"):
            Reproducible(model, sgd(model), comm, num_micro_shards=2, seed=0)
    with pytest.raises(ConfigError, match="must get a plain optimizer"):
        Reproducible(model, distributed(hvd, model), comm, num_micro_shards=4, seed=0)
    misplaced = nn.Linear(3, 3)
    misplaced.weight.data = torch.zeros(10)[1:].view(3, 3)
    with pytest.raises(MismatchError, match="64 bytes, but weight are not"):
        Reproducible(misplaced, sgd(misplaced), comm, num_micro_shards=4, seed=0)
    if comm.size > 1:
        with pytest.raises(MismatchError, match="seed must be the same on all ranks"):
            Reproducible(model, sgd(model), comm, num_micro_shards=4, seed=comm.rank)
