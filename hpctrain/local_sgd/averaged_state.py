"""The state of an optimizer that replicas average, also where only some ranks have any."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import MismatchError
from hpctrain.gradients.parameter_names import places_of
from hpctrain.local_sgd.averaged_tensors import Tensors

Layout = dict[str, dict[str, Any]]
"""Shape and dtype of each tensor of a parameter's state, None for other entries."""

_NUMBERS = "who has state, and numbers of steps"


class OptimizerState(Tensors):
    """The optimizer's state of each parameter: means over the ranks that have some.

    A rank that has none, having skipped all steps or never used a layer, counts with zeros of
    weight zero and takes over the mean. Numbers of steps become their rounded mean.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(lambda: [*self.find().items()])
        self._optimizer = optimizer
        self._layout: Layout = {}
        self._missing: set[str] = set()
        """Parameters of which some rank has no state."""
        self._own_missing: set[str] = set()
        self._numbers = torch.zeros(0, dtype=torch.float64)

    def is_outdated(self) -> bool:
        """Say whether this rank's state has other entries than the ranks have agreed on."""
        return self._layout != self._own_layout()

    def agree(self, comm: Communicator) -> None:
        """Give every rank all entries that some rank has. Collective.

        Raises:
            MismatchError: entries of one name differ in shape or dtype; on every rank.
        """
        own = self._own_layout()
        if len(set(comm.allgather_object(str(own)))) == 1:
            self._layout = own
        else:
            self._unite(own, comm.allgather_object((own, self._plain_entries())))
        self._numbers = torch.zeros(2, len(self._layout), dtype=torch.float64)

    def find(self) -> Mapping[str, Tensor]:
        """Return the state by name, and which of it counts on this rank."""
        tensors: dict[str, Tensor] = {}
        for number, (place, state) in enumerate(self._states()):
            self._numbers[0, number] = float(place not in self._own_missing)
            self._numbers[1, number] = float(state.get("step", 0.0))
            tensors |= {f"{place}, {key}": value for key, value in _averaged(state)}
        return tensors | {_NUMBERS: self._numbers}

    def became_equal(self, names: Collection[str]) -> None:  # noqa: ARG002 - always all of it
        """Divide by the weight of those that have state; see ``Averaging.finish``."""
        shares, steps = self._numbers.tolist()
        for (place, state), share, mean in zip(self._states(), shares, steps, strict=True):
            if place in self._missing and share > 0:
                for _, tensor in _averaged(state):
                    tensor.div_(share)
            if "step" in state:
                step = float(round(mean / share)) if share > 0 else 0.0
                before = state["step"]
                is_tensor = isinstance(before, Tensor)
                state["step"] = before.fill_(step) if is_tensor else type(before)(step)
        self._missing, self._own_missing = set(), set()

    def _unite(self, own: Layout, of_ranks: list[tuple[Layout, dict[str, Any]]]) -> None:
        """Take what any rank has, and make here what this one lacks."""
        self._layout = {place: {} for layout, _ in of_ranks for place in layout}
        plain: dict[str, dict[str, Any]] = {}
        for layout, entries in of_ranks:
            for place, keys in layout.items():
                for key, spec in keys.items():
                    if self._layout[place].setdefault(key, spec) != spec:
                        raise MismatchError(
                            f"the optimizer's state must have the same shapes on every rank, "
                            f"{place}, {key} has {self._layout[place][key]} and {spec}; build the "
                            f"same optimizer on every rank"
                        )
                plain.setdefault(place, {}).update(entries.get(place, {}))
        united = self._layout
        self._layout = {p: united[p] for p, _ in places_of(self._optimizer) if p in united}
        for place, keys in self._layout.items():
            if any({*keys} - {*layout.get(place, {})} for layout, _ in of_ranks):
                self._missing.add(place)
            if {*keys} - {*own.get(place, {})}:
                self._own_missing.add(place)
        for place, parameter in places_of(self._optimizer):
            if place in self._own_missing:
                self._fill(self._optimizer.state[parameter], self._layout[place], plain[place])

    def _fill(self, state: dict[str, Any], keys: dict[str, Any], plain: dict[str, Any]) -> None:
        for key, spec in keys.items():
            state[key] = plain.get(key) if spec is None else torch.zeros(spec[0], dtype=spec[1])

    def _own_layout(self) -> Layout:
        return {
            place: {
                key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
                for key, value in sorted(state.items())
            }
            for place, parameter in places_of(self._optimizer)
            if (state := self._optimizer.state.get(parameter))
        }

    def _plain_entries(self) -> dict[str, dict[str, Any]]:
        """Return numbers and the like, by parameter."""
        return {
            place: {
                key: value
                for key, value in self._optimizer.state.get(parameter, {}).items()
                if isinstance(value, bool | int | float | str)
            }
            for place, parameter in places_of(self._optimizer)
        }

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the state of each parameter that the ranks have agreed on."""
        of_places = dict(places_of(self._optimizer))
        return [(place, self._optimizer.state[of_places[place]]) for place in self._layout]


def _averaged(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter's state that have a mean; numbers of steps are apart."""
    return [
        (key, value)
        for key, value in sorted(state.items())
        if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
    ]
