"""Gradients that are averaged over some ranks while that is on: synchronous phases."""

from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan
from hpctrain.compress.codec import Identity
from hpctrain.compress.compressor import Compressor
from hpctrain.compress.half import codec_for
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.parameter_names import Grouping, names_of, trained
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.step_check import CheckedSteps, StepCheck


class SwitchedGradients:
    """The reducers of a plain optimizer; at most one is on, the same on all ranks in a step."""

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        compression: Compressor,
        num_ranks: int,
    ) -> None:
        """Begin without any; ``over`` makes them.

        Between all ``num_ranks`` gradients travel compressed, inside a node they are whole.
        """
        self._optimizer, self._names = optimizer, names_of(optimizer, None)
        self._plan, self._compression = plan, compression
        self._num_ranks = num_ranks
        self._reducers: list[Reducer] = []

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks of the world take the present step together."""
        size = self._num_ranks
        return size == 1 or any(r.is_on and r.num_ranks == size for r in self._reducers)

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step, while a reducer is on."""
        return next((r.steps.raised_flags for r in self._reducers if r.is_on), 0)

    def over(self, comm: Communicator) -> Reducer | None:
        """Make what averages over the ranks of ``comm``, which is on; None for a single rank.

        Collective over them.
        """
        if comm.size == 1:
            return None
        codec = codec_for(self._compression) if comm.size == self._num_ranks else Identity()
        steps = CheckedSteps(StepCheck(comm))
        made = Reducer(
            Reduction(comm, self._plan, codec, Grouping(), SampleCount(), steps),
            lambda: trained(self._optimizer, self._names),
            is_exclusive=False,
        )
        self._reducers.append(made)
        return made

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Weight this rank's next gradient."""
        for reducer in self._reducers:
            reducer.set_num_samples(num_samples, nominal)

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits when a step is over."""
        for reducer in self._reducers:
            reducer.steps.flags = flags

    def finish(self, *, is_skipped: bool = False) -> None:
        """Average now, if it is on and ``backward()`` has not done so. Collective."""
        for reducer in self._reducers:
            reducer.finish(is_skipped=is_skipped)

    def end_step(self) -> tuple[float, int]:
        """Expect the gradients of another step.

        Return for how many seconds this one waited, and the bytes given to all ranks of the world.
        """
        seconds, num_bytes = 0.0, 0
        for reducer in self._reducers:
            if reducer.is_on:
                seconds += reducer.exposed_seconds
                num_bytes += reducer.num_bytes if reducer.num_ranks == self._num_ranks else 0
                reducer.new_step()
        return seconds, num_bytes

    def close(self) -> None:
        """Average no more. Not collective."""
        self._reducers.clear()
