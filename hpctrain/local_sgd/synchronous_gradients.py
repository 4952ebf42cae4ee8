"""Averaging of gradients in the synchronous steps of a local method."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.compress.by_name import Compressing, codec_for
from hpctrain.compress.codec import Identity
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.parameter_names import Grouping, named, names_of
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_sync import StepSync
from hpctrain.runtime.world import World


class SynchronousGradients:
    """Averages the gradients of synchronous steps over all ranks, or over the ranks of a node.

    Each group of ranks has a reducer, and at most one reducer is active. In steps without an
    active reducer, every rank uses its own gradient.

    Args:
        here: the world, with its plan and settings.
        optimizer: optimizer of the parameters.
        compression: codec of gradients between all ranks; inside a node gradients are not
            compressed.
    """

    def __init__(self, here: World, optimizer: Optimizer, compression: Compressing) -> None:
        self._here, self._compression = here, compression
        self._size = here.comm.size
        self._parameters: Callable[[], Any] = partial(
            named, lambda: optimizer, names_of(optimizer, None)
        )
        self._reducers: list[Reducer] = []

    def over(self, comm: Communicator) -> Reducer | None:
        """Add and return a reducer over ``comm``; None for a single rank. Collective."""
        if comm.size == 1:
            return None
        is_of_all = comm.size == self._size
        codec = codec_for(self._compression) if is_of_all else Identity()
        check_weights = self._here.settings.check_weights
        # Ranks of a node may skip different steps, since replicas are averaged later.
        steps = StepCounter(StepSync(comm), check_weights, may_skip_alone=not is_of_all)
        made = Reducer(
            Reduction(comm, self._here.plan, codec, Grouping(), SampleCount(), steps),
            self._parameters,
            self._here.last_call.note,
            is_exclusive=False,
        )
        self._reducers.append(made)
        return made

    @property
    def _active(self) -> Reducer | None:
        """Reducer of the current step; None if the step is local."""
        return next((reducer for reducer in self._reducers if reducer.is_on), None)

    @property
    def are_of_all(self) -> bool:
        """Whether all ranks average gradients in the current step."""
        active = self._active
        return active is not None and active.reduction.num_ranks == self._size

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of the ranks that average gradients in this step."""
        active = self._active
        return active is None or active.reduction.leads

    @property
    def is_in_step(self) -> bool:
        """Whether this rank has begun a synchronous step."""
        active = self._active
        return active is not None and active.is_in_step

    @property
    def raised_flags(self) -> int:
        """Bits that were raised by any of the ranks that average gradients; 0 in a local step."""
        active = self._active
        return 0 if active is None else active.steps.raised_flags

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Set the number of samples in the mean gradients of this rank."""
        for reducer in self._reducers:
            reducer.set_num_samples(num_samples, nominal)

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes before gradients are averaged."""
        for reducer in self._reducers:
            reducer.set_passes(passes)

    def raise_flags(self, flags: int, *, may_differ: bool) -> None:
        """Send flags with the next steps, and whether weights may differ between ranks."""
        for reducer in self._reducers:
            reducer.steps.flags = flags
            reducer.steps.may_differ = may_differ

    def average(self, *, is_skipped: bool = False) -> None:
        """Average the gradients that ``backward()`` has not averaged. Collective."""
        for reducer in self._reducers:
            reducer.finish(is_skipped=is_skipped)

    def skip(self) -> None:
        """Record that this rank skips the current step."""
        if (active := self._active) is not None:
            active.steps.skip()

    def end_step(self) -> tuple[float, int]:
        """End the current step.

        Returns:
            Seconds for which this rank waited, and bytes that this rank sent to all ranks.
        """
        active = self._active
        if active is None:
            return 0.0, 0
        num_bytes = active.reduction.num_bytes if self.are_of_all else 0
        seconds = active.exposed_seconds
        active.end_step()
        return seconds, num_bytes

    def confirm(self) -> None:
        """Raise ``MismatchError`` on all ranks unless all have taken the same steps. Collective.

        If the program has changed gradients of a rank after ``backward()``, that rank averages
        gradients again while the other ranks continue; without this check, the ranks would wait in
        different collectives.
        """
        if (active := self._active) is not None:
            active.reduction.confirm()

    def own_state(self) -> list[dict[str, Any]]:
        """Return copies of the states of the codecs, such as residuals that were not sent."""
        return deepcopy([reducer.reduction.codec.state_dict() for reducer in self._reducers])

    def load_own_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of the codecs that fit the gradients of this rank."""
        for reducer, state in zip(self._reducers, deepcopy(states), strict=True):
            if reducer.reduction.codec.fits(state):
                reducer.reduction.codec.load_state_dict(state)

    def clear(self) -> None:
        """Remove the reducers and their hooks."""
        self._reducers.clear()
