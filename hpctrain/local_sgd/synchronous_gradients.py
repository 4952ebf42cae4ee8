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

    There is one reducer per group of ranks, and at most one is active. In steps without an active
    reducer, every rank uses its own gradient.

    Args:
        here: the world, with its plan and settings.
        optimizer: optimizer of the parameters.
        compression: compression of gradients between all ranks; inside a node they are not
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
        """Add and return a reducer; None for a single rank. Collective over ``comm``."""
        if comm.size == 1:
            return None
        is_of_all = comm.size == self._size
        codec = codec_for(self._compression) if is_of_all else Identity()
        check_weights = self._here.settings.check_weights
        # Ranks of a node may skip steps alone: replicas are averaged at the end of the round.
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
        """The reducer of the current step, if it is a synchronous step."""
        return next((reducer for reducer in self._reducers if reducer.is_on), None)

    @property
    def are_of_all(self) -> bool:
        """Whether all ranks average gradients in the current step."""
        active = self._active
        return active is not None and active.reduction.num_ranks == self._size

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of the ranks that take the current step together."""
        active = self._active
        return active is None or active.reduction.leads

    @property
    def is_in_step(self) -> bool:
        """Whether this rank has begun the current step, and averages its gradients."""
        active = self._active
        return active is not None and active.is_in_step

    @property
    def raised_flags(self) -> int:
        """Bits of any rank that takes the current step together with this rank; else 0."""
        active = self._active
        return 0 if active is None else active.steps.raised_flags

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Set the number of samples over which the gradients of this rank are a mean."""
        for reducer in self._reducers:
            reducer.set_num_samples(num_samples, nominal)

    def set_passes(self, passes: int) -> None:
        """Accumulate this number of backward passes before gradients are averaged."""
        for reducer in self._reducers:
            reducer.set_passes(passes)

    def raise_flags(self, flags: int, *, may_differ: bool) -> None:
        """Send bits with the next step; steps ``may_differ`` in their learning rates."""
        for reducer in self._reducers:
            reducer.steps.flags = flags
            reducer.steps.may_differ = may_differ

    def average(self, *, is_skipped: bool = False) -> None:
        """Average the gradients of the current step, unless ``backward()`` has. Collective."""
        for reducer in self._reducers:
            reducer.finish(is_skipped=is_skipped)

    def skip(self) -> None:
        """Record that this rank skips the current step."""
        if (active := self._active) is not None:
            active.steps.skip()

    def end_step(self) -> tuple[float, int]:
        """End the current step.

        Returns:
            The seconds that this rank waited for others, and the bytes that it sent to all ranks.
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

        A rank that averages again, since its gradients were changed after ``backward()``, would
        otherwise wait for ranks of its node that wait for it in another collective.
        """
        if (active := self._active) is not None:
            active.reduction.confirm()

    def own_state(self) -> list[dict[str, Any]]:
        """Return copies of the residuals of the codecs, which are not sent yet."""
        return deepcopy([reducer.reduction.codec.state_dict() for reducer in self._reducers])

    def load_own_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the residuals that fit the gradients of this rank."""
        for reducer, state in zip(self._reducers, deepcopy(states), strict=True):
            if reducer.reduction.codec.fits(state):
                reducer.reduction.codec.load_state_dict(state)

    def clear(self) -> None:
        """Remove the reducers and their hooks."""
        self._reducers.clear()
