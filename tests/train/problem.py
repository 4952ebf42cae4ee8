"""A small learning problem in float64, and faulty variants, for the tests of this folder."""

import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import hpctrain
from hpctrain.core.errors import DataError
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Ragged
from hpctrain.data.subset import Subset
from hpctrain.data.writer import write_arrays

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 53, 6, 3


def samples() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_SAMPLES, NUM_FEATURES))
    return {"x": x, "y": np.argmax(x[:, :NUM_CLASSES], axis=1)}


def model(width: int = 8, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    layers = [
        nn.BatchNorm1d(NUM_FEATURES) if norm else nn.Identity(),
        nn.Linear(NUM_FEATURES, width),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(width, NUM_CLASSES),
    ]
    return nn.Sequential(*layers).to(torch.float64)


def dying_model(width: int = 12) -> nn.Sequential:
    """Return a model whose third training forward kills the process that started as rank 1."""
    made, passes = model(width), iter(range(1, 100))

    def die(module: nn.Module, _: object) -> None:
        is_due = module.training and next(passes) == 3
        if is_due and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    made.register_forward_pre_hook(die)
    return made


class Noise(nn.Module):
    """A layer that draws from every random generator of the process."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = random.random() + np.random.standard_normal()  # noqa: NPY002 - the global one
        return x * (1 + 0.01 * drawn) + 0.01 * torch.randn_like(x)


class Flawed(torch.autograd.Function):
    """Identity with infinite gradients."""

    @staticmethod
    def forward(_, values):
        return values.clone()

    @staticmethod
    def backward(_, gradient):
        return torch.full_like(gradient, torch.inf)


class Underived(torch.autograd.Function):
    """Identity whose third backward pass raises an error on the last rank."""

    num_passes = 0

    @staticmethod
    def forward(_, values):
        return values.clone()

    @staticmethod
    def backward(_, gradient):
        Underived.num_passes += 1
        if hpctrain.rank() == hpctrain.size() - 1 and Underived.num_passes == 3:
            raise ValueError("this layer has no gradient")
        return gradient


class Underivable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Underived.apply(x)


def underivable() -> nn.Sequential:
    return model(12).append(Underivable())


class Flaw(nn.Module):
    """A network with a faulty training sample: its loss is NaN, or the gradient of its batch
    infinite."""

    def __init__(self, network: nn.Module, sample: int, *, in_loss: bool) -> None:
        super().__init__()
        self.network, self.in_loss = network, in_loss
        self.value = samples()["x"][sample, 0].item()

    def forward(self, x: Tensor) -> Tensor:
        hit = x[:, :1] == self.value
        if not self.training or not hit.any():
            return self.network(x)
        if self.in_loss:
            return self.network(torch.where(hit, torch.nan, x))
        return Flawed.apply(self.network(x))


def flawed_model(sample: int = 13, *, in_loss: bool = True, norm: bool = True) -> nn.Module:
    return Flaw(model(norm=norm), sample, in_loss=in_loss)


class Spiking(nn.Module):
    """A network that predicts a wrong class with certainty for one sample."""

    def __init__(self, network: nn.Module, sample: int) -> None:
        super().__init__()
        self.network, values = network, samples()
        self.value = values["x"][sample, 0].item()
        self.wrong = 1e3 * nn.functional.one_hot(
            torch.tensor((values["y"][sample] + 1) % NUM_CLASSES), NUM_CLASSES
        )
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hit = x[:, :1] == self.value
        self.passes += self.training
        return self.network(x) + self.wrong * (hit & torch.tensor(self.training))


def spiking_model(sample: int = 13) -> nn.Module:
    return Spiking(model(dropout=0.2, norm=True), sample)


class Blind(nn.Module):
    """A network that returns NaN in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) if self.training else self.network(x) * torch.nan


class Parting(nn.Module):
    """A network in which the last rank changes one weight in its third training step."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.passes = model(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and self.passes == 3 and hpctrain.rank() == hpctrain.size() - 1:
            with torch.no_grad():
                self.network[4].weight[0, 0] += 1e-9
        return self.network(x)


class Late(nn.Module):
    """A network that is slower on the last rank in training."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.network, self.seconds = model(), seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training and hpctrain.rank() == hpctrain.size() - 1:
            time.sleep(self.seconds)
        return self.network(x)


class Stopping(nn.Sequential):
    """A network that, at some world sizes, requests a stop on the last rank in the fifth forward.

    With ``notes`` it appends its training samples to a file.
    """

    def __init__(self, layers: nn.Sequential, notes: str, stops: tuple[int, ...]) -> None:
        super().__init__(*layers)
        self.notes, self.stops, self.passes = notes, stops, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self._note(x[:, 0].tolist())
            size = hpctrain.size()
            is_last = size in self.stops and hpctrain.rank() == size - 1
            if is_last and self.passes == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)

    def _note(self, values: list[float]) -> None:
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write("".join(f"{value!r}\n" for value in values))


def stopping_model(notes: str = "", stops: tuple[int, ...] = (2, 4), **how) -> nn.Module:
    return Stopping(model(**how), notes, stops)


def noisy_model(width: int = 8, *, single: bool = False, norm: bool = True) -> nn.Sequential:
    """Return a network whose steps depend on random numbers and on each rank's own buffers."""
    network = nn.Sequential(Noise(), *model(width, dropout=0.3, norm=norm))
    return network.to(torch.float32) if single else network


class Half(nn.Module):
    """A network with bfloat16 parameters and float64 input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.to(torch.bfloat16)).double()


def data(
    comm, folder: str, *, single: bool = False, label_type: str = "<i8"
) -> tuple[ShardedDataset, ShardedDataset]:
    """Return the same samples as training and test data, written once. Collective.

    With ``single``, a sample has 24 bytes, so batches start at addresses of any alignment.
    """
    if comm.rank == 0 and not Path(folder).exists():
        values = samples()
        values["x"] = values["x"].astype(np.float32 if single else np.float64)
        values["y"] = values["y"].astype(label_type)
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=Path(folder).parent) as aside:
            made = Path(aside) / "data"
            write_arrays(made, values, samples_per_shard=20)
            with contextlib.suppress(OSError):  # another job has already renamed its copy
                made.rename(folder)
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def three_sets(comm, folder: str) -> tuple[ShardedDataset | Subset, ...]:
    """Return training and validation samples that are disjoint, and all samples as the test set.

    Collective.
    """
    whole, _ = data(comm, folder)
    return Subset(whole, range(37)), Subset(whole, range(37, NUM_SAMPLES)), whole


def ragged_data(comm, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    if comm.rank == 0 and not Path(folder).exists():
        words = Ragged.of([torch.ones(length) for length in range(1, 9)])
        write_arrays(
            Path(folder), {"words": words, "y": np.zeros(8, np.int64)}, samples_per_shard=8
        )
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def steep(output: Tensor, label: Tensor) -> Tensor:
    """Return a loss whose gradients overflow float16 at the initial loss scale."""
    return 30 * nn.functional.cross_entropy(output.float(), label)


def unchanged(columns):
    return columns


def jittered(sample, generator):
    return {**sample, "x": sample["x"] + 0.1 * generator.standard_normal()}


def jolted(sample):
    """Transform a sample with draws from every generator of the process."""
    drawn = random.random() + np.random.standard_normal()  # noqa: NPY002 - the global one
    return {**sample, "x": sample["x"] + 0.1 * drawn + 0.1 * torch.randn_like(sample["x"])}


def shorter(columns):
    return {name: values[1:] for name, values in columns.items()}


def without_labels(columns):
    return {"x": columns["x"]}


def renamed(columns):
    """Transform a batch into the fields that the model expects."""
    return {"image": columns["x"] * 2, "y": columns["y"]}


def renamed_for_test(columns):
    return {"image": columns["x"], "y": columns["y"]}


def distance(output: Tensor, label: Tensor) -> Tensor:
    return output.gather(1, label[:, None])[:, 0].abs()


def loss_of_each(output: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(output, label, reduction="none")


class Pair(nn.Module):
    """A network that returns two values."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(x), x


def float_model() -> nn.Module:
    return model().float()


def two_classes() -> nn.Module:
    return nn.Linear(NUM_FEATURES, 2).double()


def no_model() -> int:
    return 3


def no_data(comm):
    return comm


def broken_data(comm) -> None:
    if comm.rank == comm.size - 1:
        raise DataError("the disk of this rank is gone")
