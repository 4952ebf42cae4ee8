"""Tensors that replicas average, by name: which ones, the same on every rank."""

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator

NamedTensors = Sequence[tuple[str, Tensor]]

Mark = tuple[int, int]
"""Where a tensor lies, and how often it was changed."""


class Tensors:
    """Tensors that are averaged as they are, such as buffers."""

    def __init__(self, today: Callable[[], NamedTensors]) -> None:
        """Take a function that returns the tensors of today, floating point or complex."""
        self._today = today

    def today(self) -> NamedTensors:
        """Return what the next averaging is of; the same names on every rank after ``agree``."""
        return self._today()

    def find(self) -> Mapping[str, Tensor]:
        """Return the tensors of today by name, also those that are no longer averaged."""
        return dict(self._today())

    def is_outdated(self) -> bool:
        """Say whether this rank's have changed since ``agree``."""
        return False

    def agree(self, comm: Communicator) -> None:
        """Let the ranks of ``comm`` find out what they average from here on. Collective."""

    def held(self) -> Collection[str]:
        """Return what takes over a mean as it is, whatever else a rank keeps of its own."""
        return ()

    def became_equal(self, names: Collection[str]) -> None:
        """Note that all ranks have the same in these now."""


class Roster:
    """The parameters that some ranks average: trained ones, and what has changed before.

    A parameter that is frozen in the middle of a round differs by rank until it has been averaged
    once more; so does one that is changed by somebody else than the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._told: dict[str, bool] = {}
        self._names: set[str] = set()
        self._held: set[str] = set()
        self._equal: dict[str, Mark] = {}
        self._stepped: set[Tensor] = set()
        self.inner: list[Roster] = []
        """Those of fewer ranks, which have the same wherever these ranks do."""

    def note_step(self) -> None:
        """Remember what the optimizer has stepped: it does so with all that has a gradient."""
        self._stepped.update(p for p in self._optimized() if p.grad is not None)
        for roster in self.inner:
            roster.note_step()

    def changed(self) -> list[str]:
        """Return the names of those in which ranks may differ."""
        return [name for name, p in self._model.named_parameters() if self._has_changed(name, p)]

    def set_changed(self, names: Collection[str]) -> None:
        """Let ranks differ in these parameters, and in no others."""
        self._stepped.clear()
        self._equal = {n: _mark(p) for n, p in self._model.named_parameters() if n not in names}

    def became_equal(self, names: Collection[str]) -> None:
        """Note that all ranks have the same in these parameters."""
        for name, parameter in self._model.named_parameters():
            if name in names:
                self._equal[name] = _mark(parameter)
                self._stepped.discard(parameter)
        for roster in self.inner:
            roster.became_equal(names)

    def names(self) -> list[str]:
        """Return the names of those that the ranks have agreed on."""
        return sorted(self._names)

    def load_names(self, names: Collection[str]) -> None:
        """Go on from what ``names`` returned; the ranks agree anew when they meet."""
        self._names, self._told = {*names}, {}

    def tensors(self) -> NamedTensors:
        """Return those that the ranks have agreed on."""
        return [(name, p) for name, p in self.find().items() if name in self._names]

    def find(self) -> dict[str, Tensor]:
        """Return all parameters of the model by name."""
        return dict(self._model.named_parameters())

    def held(self) -> Collection[str]:
        """Return the agreed ones that are not trained."""
        return self._held

    def is_outdated(self) -> bool:
        """Say whether this rank's parameters have changed since ``agree``."""
        return self._told != self._today() or bool(self._strangers())

    def agree(self, comm: Communicator) -> None:
        """Take the parameters of today. Collective.

        Raises:
            MismatchError: only some ranks train a parameter, or the optimizer steps one that the
                model does not have; on every rank.
        """
        self._stepped &= {*self._optimized()}
        self._told = self._today()
        self._names = self.union(comm)
        self._held = self._names - {name for name, is_trained in self._told.items() if is_trained}

    def union(self, comm: Communicator) -> set[str]:
        """Return what ``agree`` would take. Collective; raises as ``agree`` does."""
        strangers = self._strangers()
        comm.agree(
            not strangers,
            f"a local method averages the parameters of its model, the optimizer has stepped "
            f"{len(strangers)} that are not in it, such as one of shape "
            f"{tuple(strangers[0].shape) if strangers else ()}; give a module that has all of "
            f"them, and the optimizer the parameters that the model has now",
        )
        today = self._today()
        trained = [name for name, is_trained in today.items() if is_trained]
        require_equal(
            comm,
            trained,
            "trained parameters",
            "freeze, unfreeze and add parameters on every rank after the same step",
        )
        others = comm.allgather_object(
            [name for name, is_trained in today.items() if not is_trained]
        )
        return {*trained, *(name for of_rank in others for name in of_rank)}

    def _today(self) -> dict[str, bool]:
        """Return whether it is trained, by name, for each that is to be averaged on this rank."""
        return {
            name: p.requires_grad
            for name, p in self._model.named_parameters()
            if p.requires_grad or self._has_changed(name, p)
        }

    def _has_changed(self, name: str, parameter: Tensor) -> bool:
        has_mean = parameter.is_floating_point() or parameter.is_complex()
        is_equal = parameter not in self._stepped and self._equal.get(name) == _mark(parameter)
        return has_mean and not is_equal

    def _strangers(self) -> list[Tensor]:
        """Return what the optimizer has stepped and the model does not have."""
        known = set(self._model.parameters())
        return [p for p in self._optimized() if p in self._stepped and p not in known]

    def _optimized(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


class Parameters(Tensors):
    """Parameters of a roster, or some of them."""

    def __init__(self, roster: Roster, names: Callable[[], Collection[str]] | None = None) -> None:
        """Take what is needed.

        Args:
            roster: says which parameters are averaged.
            names: returns those of them that are averaged here; None for all.
        """
        super().__init__(roster.tensors)
        self._roster, self._names = roster, names

    def today(self) -> NamedTensors:
        """Return what the next averaging is of."""
        names = None if self._names is None else self._names()
        return [(n, p) for n, p in self._roster.tensors() if names is None or n in names]

    def find(self) -> Mapping[str, Tensor]:
        """Return all parameters of the model by name."""
        return self._roster.find()

    def is_outdated(self) -> bool:
        """Say whether this rank's parameters have changed since ``agree``."""
        return self._roster.is_outdated()

    def agree(self, comm: Communicator) -> None:
        """Take the parameters of today. Collective; see ``Roster``."""
        self._roster.agree(comm)

    def held(self) -> Collection[str]:
        """Return those that are not trained."""
        return self._roster.held()

    def became_equal(self, names: Collection[str]) -> None:
        """Note that all ranks have the same in these now."""
        self._roster.became_equal(names)


def _mark(tensor: Tensor) -> Mark:
    """Return what changes with a tensor; kernels of fused optimizers keep it as it is."""
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - autograd's own
    return tensor.data_ptr(), version
