"""One small instance of each local method, and a training with any local method."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.compress.largest import TopK
from hpctrain.local_sgd.local_method import LocalMethod
from tests.gradients.training import global_batch, make_model, part_of, sgd

Make = Callable[[Any, nn.Module, torch.optim.Optimizer], LocalMethod]

METHODS: dict[str, Make] = {
    "local": lambda hvd, m, o: hvd.LocalSGD(m, o, 4),
    "local, state averaged": lambda hvd, m, o: hvd.LocalSGD(m, o, 3, state="average"),
    "local, state reset": lambda hvd, m, o: hvd.LocalSGD(m, o, 5, state="reset"),
    "local, schedule": lambda hvd, m, o: hvd.LocalSGD(m, o, lambda number: 2 + number % 3),
    "local, bf16": lambda hvd, m, o: hvd.LocalSGD(m, o, 4, compression=hvd.Compression.bf16),
    "post local": lambda hvd, m, o: hvd.PostLocalSGD(m, o, 4, start=2),
    "hierarchical, synchronous node": lambda hvd, m, o: hvd.HierarchicalLocalSGD(m, o, 4),
    "hierarchical": lambda hvd, m, o: hvd.HierarchicalLocalSGD(m, o, 6, node_steps=2),
    "diloco": lambda hvd, m, o: hvd.DiLoCo(m, o, 4),
    "diloco, kept": lambda hvd, m, o: hvd.DiLoCo(m, o, 4, keep=0.5),
    "diloco, fragments": lambda hvd, m, o: hvd.DiLoCo(m, o, 6, fragments=3, delay=4),
    "diloco, bf16": lambda hvd, m, o: hvd.DiLoCo(m, o, 4, compression=hvd.Compression.bf16),
    "staged": lambda hvd, m, o: hvd.StagedSGD(
        m, o, warmup_steps=2, cooldown_start=15, steps=4, delay=2
    ),
}

LOSSY: dict[str, Make] = {
    "local, top k": lambda hvd, m, o: hvd.LocalSGD(m, o, 4, compression=TopK(0.2)),
    "post local, one bit": lambda hvd, m, o: hvd.PostLocalSGD(
        m, o, 4, start=9, compression="one_bit"
    ),
}
"""Methods with codecs that keep the error of earlier rounds."""

FEDERATED: dict[str, Make] = {
    "local, drawn, pulled": lambda hvd, m, o: hvd.LocalSGD(
        m, o, 4, fraction=0.5, seed=5, proximal=0.1
    ),
    "diloco, drawn, pulled": lambda hvd, m, o: hvd.DiLoCo(m, o, 3, fraction=0.5, proximal=0.1),
    "post local, drawn, pulled": lambda hvd, m, o: hvd.PostLocalSGD(
        m, o, 4, start=5, fraction=0.4, state="reset", proximal=0.1
    ),
}
"""Methods with partial participation and a proximal term."""


class Normed(nn.Module):
    """A network with weights, batch-norm statistics and an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 10)
        ).double()

    def forward(self, images):
        return self.layers(images)


def train(
    hvd,
    model: nn.Module,
    optimizer,
    method: LocalMethod | None,
    first: int,
    last: int,
    *,
    observed: bool = False,
) -> None:
    """Take steps ``first`` to ``last - 1`` on this rank's part of the global batches."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        images, labels = part_of(global_batch(step, dtype), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if observed and hasattr(method, "observe") and step % 3 == 2:
            method.observe(loss.item())


class Run:
    """A training by a method, which a test continues step by step.

    Collective.

    Args:
        method: a key of ``METHODS``, ``LOSSY`` or ``FEDERATED``, or the name of a class of
            hpctrain.
        args, options: arguments of that class.
    """

    def __init__(
        self, hvd, method: str, *args, model: nn.Module | None = None, optimizer=sgd, **options
    ) -> None:
        self.hvd, self.at = hvd, 0
        self.model = make_model() if model is None else model
        self.optimizer = optimizer(self.model)
        if make := (METHODS | LOSSY | FEDERATED).get(method):
            self.method = make(hvd, self.model, self.optimizer)
        else:
            self.method = getattr(hvd, method)(self.model, self.optimizer, *args, **options)

    def to(self, step: int, *, observed: bool = False) -> "Run":
        """Take all steps before ``step``."""
        pair = self.model, self.optimizer
        train(self.hvd, *pair, self.method, self.at, step, observed=observed)
        self.at = step
        return self

    def end(self, step: int) -> torch.Tensor:
        """Take all steps before ``step`` and leave the block; return the weights."""
        with self.method:
            self.to(step)
        return self.weights

    def skip(self) -> None:
        """Skip a step on this rank."""
        self.method.skip_step()
        self.at += 1

    @property
    def weights(self) -> torch.Tensor:
        return weights_of(self.model)

    @property
    def replica(self) -> torch.Tensor:
        return replica_of(self.model, self.optimizer)

    def num_kinds(self, world) -> int:
        """Return the number of different models. Collective."""
        return num_kinds(world, self.weights)


def state_of(model: nn.Module, optimizer, method: LocalMethod) -> Mapping[str, Any]:
    """Return a copy of the state from which a rank can resume."""
    parts = {"model": model, "optimizer": optimizer, "method": method}
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def replica_of(model: nn.Module, optimizer) -> torch.Tensor:
    """Return this rank's model and optimizer state as one vector."""
    numbers = [t.detach().double().reshape(-1) for t in model.state_dict().values()]
    for own in optimizer.state_dict()["state"].values():
        numbers += [value.double().reshape(-1) for _, value in sorted(own.items())]
    return torch.cat(numbers)


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def num_kinds(world, numbers: torch.Tensor) -> int:
    """Return the number of different vectors. Collective."""
    return len({of_rank.numpy().tobytes() for of_rank in world.allgather(numbers)})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two kinds of state and a counter."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adam": adam}
