"""An asynchronous method in ``hpctrain train``: when ranks meet, what they tell each other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.comm.ops import Op
from hpctrain.core.errors import MismatchError
from hpctrain.core.python_compat import Self

MEETING_STEPS = 16
"""A stop, or a checkpoint by the clock, is known to all ranks after at most so many steps."""


class AsyncExchange:
    """What the training loop asks of a method, as it asks local methods.

    Every ``MEETING_STEPS`` steps, and wherever the loop says so, ranks come to the same step and
    compare their wishes.
    """

    is_synchronous = False
    leads_step = True  # each rank counts its own steps
    takes_part = True

    def __init__(self, method: AsyncMethod) -> None:
        """Take a method without dedicated servers. Not collective."""
        self.method, self._comm = method, method.comm
        method.is_compared = False  # a run settles at its end, and says by itself how it ends
        self.set_num_samples, self.finish = method.set_num_samples, method.finish
        self.rounds = self  # which steps are met in; this object knows
        self.must_meet = self.agrees = False
        self.step = self.step_in_round = 0
        self.raised_flags = 0  # bits that any rank had at the last meeting
        self.gradient_flags = 0  # bits of this rank, whose gradient is its own
        self.facts: dict[str, Any] = {"staleness": 0.0, "staleness_most": 0}
        """Figures for people and records, the same on every rank: of the last meeting."""
        self._counted = (0, 0)
        self._hook = method.optimizer.register_step_post_hook(lambda *_: self._end_step())

    # -- for the training loop ------------------------------------------------------------------

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for servers, in seconds."""
        return self.method.waited_s

    def synchronize(self, *_: object) -> None:
        """Do nothing: there is no common gradient, passes add up in it, no meeting has a time."""

    set_backward_passes_per_step = resume_clock = synchronize

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits at the next meeting."""
        self.gradient_flags = flags

    def skip_step(self) -> None:
        """Count a step that this rank does not take."""
        self.method.skip_step()
        self._end_step()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Do what ``finish`` does; ranks go on from there. Collective."""
        self.finish()
        yield

    @contextmanager
    def settled(self) -> Iterator[Self]:
        """Let model and optimizer be those of the servers inside. Collective."""
        with self.method.settled(shows_all=False):
            self.agrees = True
            try:
                yield self
            finally:
                self.agrees = False

    def close(self) -> None:
        """Remove the hooks. Not collective."""
        self._hook.remove()
        self.method.close()

    # -- states ---------------------------------------------------------------------------------

    @property
    def has_own_optimizer(self) -> bool:
        """Whether each rank's optimizer has a state of its own, apart from that of the servers."""
        return self.method.server_optimizer is not self.method.optimizer

    def shared_state(self) -> dict[str, Any]:
        """Return what is the same on every rank; inside of ``settled``."""
        server = self.method.server_optimizer.state_dict() if self.has_own_optimizer else None
        return {"step": self.step, "server": server}

    def own_state(self) -> dict[str, Any]:
        """Return what each rank has for itself: the state of a replica's optimizer."""
        has_own = self.has_own_optimizer
        return {"optimizer": self.method.optimizer.state_dict() if has_own else None}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Let servers take over what model and optimizer were loaded with. Collective."""
        self.step = state["step"]
        if state.get("server"):
            self.method.server_optimizer.load_state_dict(state["server"])
        self.method.reload()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the state of this rank's replica."""
        if state.get("optimizer"):
            self.method.optimizer.load_state_dict(state["optimizer"])

    def _end_step(self) -> None:
        self.step += 1
        self.step_in_round += 1
        self.raised_flags = 0
        if self.must_meet or self.step % MEETING_STEPS == 0:
            self._meet()

    def _meet(self) -> None:
        """Let all ranks come to this step, and compare. Collective."""
        histogram = self.method.staleness_histogram
        told = sum(histogram.values()), sum(s * n for s, n in histogram.items())
        since = [now - before for now, before in zip(told, self._counted, strict=True)]
        bits = [self.gradient_flags >> bit & 1 for bit in range(4)]
        flat = torch.tensor([*since, *bits, max(histogram, default=0), self.step, -self.step])
        sums = flat.double()
        self._comm.allreduce_(sums).wait()
        self._comm.allreduce_(flat, op=Op.MAX).wait()
        most, least = int(flat[-2]), -int(flat[-1])
        if most != least:
            raise MismatchError(
                f"ranks compare their wishes after the same step, this one has taken {self.step} "
                f"and others from {least} to {most}; take equally many steps on every rank"
            )
        self._counted = told
        self.raised_flags = sum(1 << bit for bit in range(4) if sums[2 + bit])
        mean = float(sums[1] / sums[0]) if sums[0] else 0.0
        self.facts = {"staleness": mean, "staleness_most": int(flat[6])}
        self.must_meet, self.step_in_round = False, 0
