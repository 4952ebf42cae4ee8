"""A rank's own parameters, buffers and state while ranks take steps of their own."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.gradients.parameter_names import places_of
from hpctrain.local_sgd.averaged_tensors import NamedTensors, Roster, entries_with_mean


class Replica:
    """The tensors of a model and its optimizer that have a mean over ranks."""

    def __init__(self, comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
        self._comm, self._model, self.optimizer = comm, model, optimizer
        self.roster = Roster(model, optimizer)
        """The parameters that all ranks average."""

    def inner_roster(self) -> Roster:
        """Make the roster of some ranks that average among themselves in between."""
        made = Roster(self._model, self.optimizer)
        made.set_changed(self.roster.changed())
        self.roster.inner.append(made)
        return made

    def all_agree(self) -> None:
        """Note that all ranks have the same parameters."""
        self.load_own_state(())

    def own_state(self) -> list[list[str]]:
        """Return the names of parameters in which ranks may differ: of all, of some."""
        return [roster.changed() for roster in (self.roster, *self.roster.inner)]

    def load_own_state(self, changed: Sequence[Collection[str]]) -> None:
        """Let ranks differ in these parameters alone, which ``own_state`` returned; in none."""
        for number, roster in enumerate((self.roster, *self.roster.inner)):
            roster.set_changed(changed[number] if changed else ())

    def parameters(self) -> NamedTensors:
        """Return the parameters that are trained."""
        named = self._model.named_parameters()
        return [(name, parameter.detach()) for name, parameter in named if parameter.requires_grad]

    def buffers(self) -> NamedTensors:
        """Return buffers such as running means; counters and truth values have no mean."""
        return [(name, b) for name, b in self._model.named_buffers() if b.is_floating_point()]

    def state(self) -> NamedTensors:
        """Return the optimizer's state of each parameter, but for numbers of steps."""
        return [
            (f"{name}, {key}", value)
            for name, parameter in places_of(self.optimizer)
            for key, value in entries_with_mean(self.optimizer.state.get(parameter, {}))
        ]

    def reset_state(self) -> None:
        """Let the optimizer begin anew."""
        self.optimizer.state.clear()

    @contextmanager
    def as_mean(self) -> Iterator[None]:
        """Let parameters and buffers be their means over all ranks inside. Collective."""
        with self.holding(self.means([*self.unequal_parameters(), *self.buffers()])):
            yield

    def unequal_parameters(self) -> NamedTensors:
        """Return what the next averaging would be of, the same names on every rank. Collective."""
        names = self.roster.union(self._comm)
        return [(n, p.detach()) for n, p in self._model.named_parameters() if n in names]

    def average_buffers(self) -> None:
        """Give all ranks the means of their buffers. Collective."""
        means = self.means(self.buffers())
        for name, buffer in self.buffers():
            buffer.copy_(means[name])

    def means(self, named: NamedTensors) -> dict[str, Tensor]:
        """Return the means of tensors over all ranks, by name. Collective."""
        return {name: self._mean(tensor) for name, tensor in named}

    @contextmanager
    def holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let parameters and buffers have other values inside, by name."""
        everything = (*self._model.named_parameters(), *self.buffers())
        tensors = {name: tensor.detach() for name, tensor in everything if name in values}
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])

    def mean_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with the means of its state. Collective."""
        means = {id(tensor): self._mean(tensor) for _, tensor in self.state()}
        state = self.optimizer.state_dict()
        state["state"] = {
            number: {key: means.get(id(value), value) for key, value in own.items()}
            for number, own in state["state"].items()
        }
        return state

    def _mean(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            mean = tensor.clone()
            self._comm.allreduce_(mean, scale=1.0 / self._comm.size).wait()
        return mean
