"""Selection, by name, of the tensors that ranks average; identical on all ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import MismatchError
from hpctrain.core.torch_compat import version_of
from hpctrain.gradients.parameter_names import places_of

NamedTensors = Sequence[tuple[str, Tensor]]

Mark = tuple[int, int]  # address and version of a tensor


class Tensors:
    """Named tensors to average, such as buffers. Base class of other selections.

    Args:
        found: function that returns the current floating-point or complex tensors with their
            names.
    """

    def __init__(self, found: Callable[[], NamedTensors]) -> None:
        self._found = found

    def find(self) -> dict[str, Tensor]:
        """Return the current tensors by name, including tensors that are no longer averaged."""
        return dict(self._found())

    def current(self) -> NamedTensors:
        """Return the tensors of the next average; the same on every rank after ``agree``."""
        return [*self.find().items()]

    def is_outdated(self) -> bool:
        """Return whether the tensors of this rank have changed since the last ``agree``."""
        return False

    def agree(self, comm: Communicator) -> None:
        """Agree on the tensors that the ranks of ``comm`` average from now on. Collective."""

    def held(self) -> Collection[str]:
        """Return the names of tensors for which ``Averaging.finish`` ignores its ``keep``."""
        return ()

    def became_equal(self, names: Collection[str]) -> None:
        """Record that all ranks now have the same values of the tensors ``names``."""


class Roster(Tensors):
    """Parameters to average: trained ones, and frozen ones that may differ between ranks.

    A parameter that is frozen in the middle of a round, or changed outside of the optimizer,
    differs between ranks until the next average.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(lambda: [*model.named_parameters()])
        self._model, self._optimizer = model, optimizer
        self._agreed: dict[str, bool] = {}
        self._names: set[str] = set()
        self._held: set[str] = set()
        self._equal: dict[str, Mark] = {}
        self._stepped: set[Tensor] = set()
        self.inner: list[Roster] = []
        """Rosters of subsets of the ranks; ``became_equal`` also applies to these rosters."""

    def note_step(self) -> None:
        """Record the parameters that the optimizer has updated: all parameters with a gradient."""
        self._stepped.update(p for p in self._optimized() if p.grad is not None)
        for roster in self.inner:
            roster.note_step()

    def changed(self) -> list[str]:
        """Return the names of all parameters that may differ between ranks."""
        return [name for name, p in self._model.named_parameters() if self._has_changed(name, p)]

    def set_changed(self, names: Collection[str]) -> None:
        """Record that only the parameters ``names`` may differ between ranks."""
        self._stepped.clear()
        self._equal = {n: _mark(p) for n, p in self._model.named_parameters() if n not in names}

    def became_equal(self, names: Collection[str]) -> None:
        """Record that all ranks now have the same values of the parameters ``names``."""
        for name, parameter in self._model.named_parameters():
            if name in names:
                self._equal[name] = _mark(parameter)
                self._stepped.discard(parameter)
        for roster in self.inner:
            roster.became_equal(names)

    def shared_state(self) -> list[str]:
        """Return the names of the parameters on which the ranks have agreed."""
        return sorted(self._names)

    def load_shared_state(self, names: Collection[str]) -> None:
        """Restore the names; the ranks agree again in the next synchronization."""
        self._names, self._agreed = {*names}, {}

    def current(self) -> NamedTensors:
        """Return the parameters on which the ranks have agreed."""
        return [(name, p) for name, p in self.find().items() if name in self._names]

    def held(self) -> Collection[str]:
        """Return the names of averaged parameters that are not trained."""
        return self._held

    def is_outdated(self) -> bool:
        """Return whether the parameters to average have changed since the last ``agree``."""
        return self._agreed != self._due() or bool(self._unknown_parameters())

    def agree(self, comm: Communicator) -> None:
        """Agree on the parameters to average: the union over the ranks. Collective.

        Raises:
            MismatchError: only some ranks train a parameter, or an optimizer has updated a
                parameter that is not in the model; on every rank.
        """
        self._stepped &= {*self._optimized()}
        self._agreed = self._due()
        self._names = self.union(comm)
        self._held = self._names - {
            name for name, is_trained in self._agreed.items() if is_trained
        }

    def union(self, comm: Communicator) -> set[str]:
        """Return the union over ranks of the names of parameters to average. Collective.

        Raises:
            MismatchError: as for ``agree``.
        """
        unknown = self._unknown_parameters()
        comm.agree(
            not unknown,
            f"the parameters of an optimizer must be in the model of its local method, but the "
            f"optimizer has updated {len(unknown)} that are not in it, such as a parameter of "
            f"shape {tuple(unknown[0].shape) if unknown else ()}; pass the module that "
            f"contains all parameters, and the optimizer of the model's current parameters",
        )
        current = self._due()
        trained = [name for name, is_trained in current.items() if is_trained]
        require_equal(
            comm,
            trained,
            "trained parameters",
            "freeze, unfreeze and add parameters on every rank after the same step",
        )
        others = comm.allgather_object(
            [name for name, is_trained in current.items() if not is_trained]
        )
        return {*trained, *(name for of_rank in others for name in of_rank)}

    def _due(self) -> dict[str, bool]:
        """Return the names of the parameters that this rank averages, with True if trained."""
        return {
            name: p.requires_grad
            for name, p in self._model.named_parameters()
            if p.requires_grad or self._has_changed(name, p)
        }

    def _has_changed(self, name: str, parameter: Tensor) -> bool:
        has_mean = parameter.is_floating_point() or parameter.is_complex()
        is_equal = parameter not in self._stepped and self._equal.get(name) == _mark(parameter)
        return has_mean and not is_equal

    def _unknown_parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizer has updated although the model lacks them."""
        known = set(self._model.parameters())
        return [p for p in self._optimized() if p in self._stepped and p not in known]

    def _optimized(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _mark(tensor: Tensor) -> Mark:
    """Return address and version of ``tensor``; fused optimizers do not change the version."""
    return tensor.data_ptr(), version_of(tensor)


Layout = dict[str, dict[str, Any]]
"""For each parameter and state entry, its shape and dtype; None if the entry is no tensor."""

_NUMBERS = "ranks with state, and numbers of steps"


class OptimizerState(Tensors):
    """Optimizer state, averaged per parameter over the ranks that have a state.

    A rank without a state, because it skipped all steps or never used a layer, contributes zeros
    with weight zero and receives the mean. Step counts become their rounded mean.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(self._entries)
        self._optimizer = optimizer
        self._layout: Layout = {}
        self._missing: set[str] = set()  # parameters without a complete state on some rank
        self._own_missing: set[str] = set()
        self._numbers = torch.zeros(0, dtype=torch.float64)

    def is_outdated(self) -> bool:
        """Return whether the entries of this rank's state have changed since ``agree``."""
        return self._layout != self._own_layout()

    def agree(self, comm: Communicator) -> None:
        """Create the entries of the state that exist only on other ranks. Collective."""
        own = self._own_layout()
        of_ranks = comm.allgather_object((own, self._plain_entries()))
        layouts = [layout for layout, _ in of_ranks]
        united = _united(layouts)
        self._layout = {p: united[p] for p, _ in places_of(self._optimizer) if p in united}
        for place, keys in self._layout.items():
            if any({*keys} - {*layout.get(place, {})} for layout in layouts):
                self._missing.add(place)
            if {*keys} - {*own.get(place, {})}:
                self._own_missing.add(place)
        devices = {place: parameter.device for place, parameter in places_of(self._optimizer)}
        for place, state in self._states():
            if place in self._own_missing:
                plain = {k: v for _, of in of_ranks for k, v in of.get(place, {}).items()}
                for key, spec in self._layout[place].items():
                    # Optimizers store numbers of steps on the host.
                    device = "cpu" if key == "step" else devices[place]
                    made = torch.zeros(spec[0], dtype=spec[1], device=device) if spec else None
                    state[key] = plain.get(key) if made is None else made
        self._numbers = torch.zeros(2, len(self._layout), dtype=torch.float64)

    def became_equal(self, names: Collection[str]) -> None:
        """Divide means by the weight of the ranks that have a state; called after the average."""
        del names  # the state is averaged as a whole
        shares, steps = self._numbers.tolist()
        for (place, state), share, mean in zip(self._states(), shares, steps, strict=True):
            if place in self._missing and share > 0:
                for _, tensor in entries_with_mean(state):
                    tensor.div_(share)
            if "step" in state:
                step = float(round(mean / share)) if share > 0 else 0.0
                before = state["step"]
                is_tensor = isinstance(before, Tensor)
                state["step"] = before.fill_(step) if is_tensor else type(before)(step)
        self._missing, self._own_missing = set(), set()

    def _entries(self) -> NamedTensors:
        """Return the tensors of the state by name, and a tensor of weights and step counts."""
        tensors: list[tuple[str, Tensor]] = []
        for number, (place, state) in enumerate(self._states()):
            self._numbers[0, number] = float(place not in self._own_missing)
            self._numbers[1, number] = float(state.get("step", 0.0))
            tensors += [(f"{place}, {key}", value) for key, value in entries_with_mean(state)]
        return [*tensors, (_NUMBERS, self._numbers)]

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
        """Return the entries of the state that are not tensors, by parameter."""
        return {
            place: {
                key: value
                for key, value in self._optimizer.state.get(parameter, {}).items()
                if isinstance(value, bool | int | float | str)
            }
            for place, parameter in places_of(self._optimizer)
        }

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the state of each parameter on which the ranks have agreed."""
        of_places = dict(places_of(self._optimizer))
        return [(place, self._optimizer.state[of_places[place]]) for place in self._layout]


def _united(layouts: Sequence[Layout]) -> Layout:
    """Return the union of all ranks' entries; ``MismatchError`` if specs differ."""
    united: Layout = {}
    for layout in layouts:
        for place, keys in layout.items():
            known = united.setdefault(place, {})
            for key, spec in keys.items():
                if known.setdefault(key, spec) != spec:
                    raise MismatchError(
                        "the optimizer's state must have the same shapes and dtypes on every "
                        f"rank, but {key} of {place} has {known[key]} and {spec}; build the same "
                        "optimizer on every rank"
                    )
    return united


def entries_with_mean(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the floating-point tensors of a parameter's state, without its number of steps."""
    return [
        (key, value)
        for key, value in sorted(state.items())
        if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
    ]
