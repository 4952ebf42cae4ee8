"""State of a divided model after its last step, compared between ranks at the end of a run."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.state_hash import is_dense, value_hashes
from hpctrain.gradients.weight_sample import WeightSample
from hpctrain.parallel.guard_facts import part, settings_of
from hpctrain.parallel.guard_layout import Axis, GuardLayout
from hpctrain.runtime import world

if TYPE_CHECKING:
    from hpctrain.runtime.last_check import LastStates

Ranks = tuple[int, ...]


class LastStep:
    """Records the state of a divided model after each step; ranks compare the last one at the end.

    The ranks of an axis compare the numbers of steps and the settings of optimizers; ranks with
    replicas also compare values and optimizer state. The stages of a pipeline compare shared
    weights and the number of steps since the last batch. They also compare settings, if the
    settings of all stages were equal in the first step.

    Args:
        shared: returns the weights that stages share.
        taken: number of steps since the last batch, by index of the optimizer.
        are_uniform: whether all stages began with equal settings, by index of the optimizer.
    """

    def __init__(
        self,
        shared: Callable[[], Sequence[tuple[str, nn.Parameter | None]]],
        taken: Counter[int],
        are_uniform: Mapping[int, bool],
    ) -> None:
        self._shared, self._taken, self._are_uniform = shared, taken, are_uniform
        self._axes: dict[Ranks, list[Axis]] = {}
        self._samples: dict[Ranks, WeightSample] = {}
        """Samples of replicas after the last step; changes after that step are not compared."""
        self._optimizers = weakref.WeakKeyDictionary[Optimizer, int]()
        self._num_steps = Counter[int]()
        self._layout: GuardLayout | None = None
        self._states: LastStates | None = None
        self._names: dict[Ranks, str] = {}

    def begin(self, layout: GuardLayout, optimizer: Optimizer, number: int) -> None:
        """Record that a step begins; ``number`` is the index of the optimizer.

        Local, but all ranks of an axis must call this method.
        """
        self._optimizers[optimizer] = number
        if layout is self._layout:
            return
        self._layout, self._axes, self._samples = layout, {}, {}
        for axis in layout.axes:
            ranks = tuple(dist.get_process_group_ranks(axis.group))
            self._axes.setdefault(ranks, []).append(axis)
            if axis.is_replica:
                named: Any = [(name, part(p)) for name, p in axis.replicated]
                self._samples[ranks] = WeightSample(named)
        if world.is_initialized() and world.rank() == dist.get_rank():
            states = world.current().attachments.last_states
            if states is not self._states:
                self._states, self._names = states, {}
            new = [ranks for ranks in self._axes if ranks not in self._names]
            self._names |= {ranks: states.enter(ranks, self.left) for ranks in new}

    def forget(self) -> None:
        """Disable the comparison until the next step, for example after an error on all ranks."""
        self._layout, self._axes = None, {}

    def end(self, optimizer: Optimizer) -> None:
        """Record the current parameters as the result of a step."""
        if optimizer in self._optimizers:
            self._num_steps[self._optimizers[optimizer]] += 1
            for sample in self._samples.values():
                sample.mark(None)

    def left(self, ranks: Ranks, /, *, has_weights: bool = True) -> Mapping[str, str]:
        """Return, as text by name, the state that the group of ``ranks`` compares. Local."""
        found: dict[str, str] = {}
        for axis in self._axes.get(ranks, ()):
            if axis.is_stages and self._taken:
                found["steps since the last batch"] = str(max(self._taken.values()))
            elif not axis.is_stages:
                for number, count in self._num_steps.items():
                    found[f"the number of steps of optimizer {number}"] = str(count)
            if has_weights:
                found |= self._settings(axis)
                found |= value_hashes(self._values(axis, ranks))
        return found

    def _settings(self, axis: Axis) -> dict[str, str]:
        return {
            f"{name} of optimizer {number}": text
            for optimizer, number in self._optimizers.items()
            if not axis.is_stages or self._are_uniform.get(number)
            for name, text in settings_of(optimizer).items()
        }

    def _values(self, axis: Axis, ranks: Ranks) -> dict[str, Any]:
        """Return the values that the ranks of ``axis`` compare.

        Stages compare shared weights; other ranks compare replicas with their optimizer state, and
        the step counts of all parameters.
        """
        if axis.is_stages:
            return {name: part(p.detach()) for name, p in self._shared() if p is not None}
        replicated = dict(axis.replicated)
        held: dict[str, Any] = dict(replicated)
        if axis.is_replica:
            held = self._samples[ranks].as_left()
        whole = {name for name in replicated if name in held}
        for name, p in self._layout.named if self._layout else ():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if key == "step" or name in whole:
                        held[f"{key} of {name}"] = value
        held = {name: part(v) if isinstance(v, Tensor) else v for name, v in held.items()}
        return {
            name: value
            for name, value in held.items()
            if (is_dense(value) if isinstance(value, Tensor) else isinstance(value, int | float))
        }

    def __del__(self) -> None:
        """Store the values for the final comparison, because the program has deleted its model."""
        for name in self._names.values() if self._states else ():
            self._states.keep(name, self.left)  # type: ignore[union-attr]
