"""What the laws of reproducible steps are stated on: three small models, their data and hashes."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.comm.communicator import Communicator
from hpctrain.gradients.micro_shards import ALIGNMENT, own_micro_shards, sample_range
from hpctrain.gradients.reproducible import Reproducible

CLASSES = 5


class Attention(nn.Module):
    """A transformer of one layer over 6 tokens."""

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
    """Return some samples of the global batch of a step, at a place in memory of its own."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (64,), generator=generator)
    if kind == "transformer":
        inputs = torch.randint(11, (64, 6), generator=generator)
    else:
        shape = (19,) if kind == "mlp" else (3, 6, 6)
        inputs = torch.randn(64, *shape, generator=generator)
    own = slice(samples.start, samples.stop)
    return inputs[own], labels[own]


def make(kind: str, comm: Communicator, micro_shards: int, optimizer=torch.optim.AdamW):
    """Make a model, its optimizer and what takes the steps, the same on every rank."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    stepping = optimizer(model.parameters(), lr=0.01)
    steps = Reproducible(model, stepping, comm, num_micro_shards=micro_shards, seed=7)
    return model, stepping, steps


def loss_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Return the loss of a micro-shard, whose inputs lie in aligned memory."""

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
    told = num_samples if num_samples % micro_shards else None
    losses = [
        steps.step(batch_of(kind, step, samples), loss_of(model), num_samples=told)
        for step in range(num_steps)
    ]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    return state_hash(state)


def digest(tensors: list[Tensor]) -> str:
    """Return a hash of tensors by other means than ours."""
    data = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()
