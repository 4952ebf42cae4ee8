"""``AdasumStep``, which combines the optimizer steps of all ranks for ``op=Adasum``."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.adasum import adasum_
from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Compressor
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.loss_scale import unscale_own
from hpctrain.gradients.optimizer_exchange import Closure, OptimizerExchange
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.sparse_gradients import writes_of
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_header import GradientFacts, StepAgreement, StepMessage

_STEPPED = "_hpctrain_stepped"
"""Attribute of a gradient: its ``writes_of`` when a step last used the gradient."""


class AdasumStep(OptimizerExchange):
    """Combines the optimizer steps of all ranks into one step.

    The change of each parameter is combined over all ranks by Adasum: orthogonal changes are
    added, equal changes are averaged. The learning rate therefore need not grow with the number of
    ranks. The constructor compares the parameters of all ranks; it is collective.

    Args:
        comm: ranks whose steps are combined.
        compressor: compression of the changes.
        parameters: function that returns the current parameters with their names.
        steps: counts steps, and compares the ranks before each step.

    Source: Maleki et al. 2020, arXiv:2006.02924.
    Differs: combines steps of the optimizer instead of gradients, like Horovod.
    """

    unscales = True

    def __init__(
        self,
        comm: Communicator,
        compressor: Compressor,
        parameters: Callable[[], NamedParameters],
        steps: StepCounter,
    ) -> None:
        self._steps, self._exposed_seconds = steps, 0.0
        self._comm, self._compressor, self._parameters = comm, compressor, parameters
        self._before: list[tuple[Tensor, Tensor]] = []
        self._num_forgotten = 0  # times that unused gradients were cleared since the last step
        steps.enter(self)
        current = _stepped(parameters())
        self._lines = _lines_of(current)
        require_equal(comm, self._lines, "parameters")
        steps.watch(parameters())
        self._mark_gradients()

    @property
    def steps(self) -> StepCounter:
        """Step counter, which compares the ranks before a step and exchanges their flags."""
        return self._steps

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the last step spent on combining the steps of all ranks."""
        return self._exposed_seconds

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Raise ``ConfigError``, since Adasum does not weight ranks by samples."""
        raise ConfigError(
            f"sample counts can only be set with op=Average, but op is Adasum, got "
            f"num_samples={num_samples}, nominal={nominal}; leave set_num_samples out"
        )

    def require_skippable(self) -> None:
        """Raise ``ConfigError``, since ``step()`` must combine the steps of all ranks."""
        raise ConfigError(
            "skip_synchronize() must not be used with op=Adasum, which combines the ranks inside "
            "step(); leave skip_synchronize() out"
        )

    def new_step(self) -> None:
        """Record whether gradients are cleared that no step has used. Not collective."""
        if self._before:  # inside a step, a closure may clear gradients any number of times
            return
        self._num_forgotten += _has_new(_gradients(self._parameters()))

    def start_again(self) -> None:
        """Discard the state of the current step; called before a state is loaded. Local."""
        self._steps.number = None
        self._before, self._num_forgotten = [], 0

    @torch.no_grad()
    def begin_step(self, stepping: Optimizer, closure: Closure) -> Closure:
        """Compare the ranks, and save the parameters before the step of this rank. Collective.

        A rank whose ``GradScaler`` has found an overflow contributes no change. With ``closure``,
        the optimizer computes the gradients inside ``step()``.

        Raises:
            MismatchError: ranks take different steps, step different parameters or hold different
                weights; only some ranks use the gradients of the previous step; or only some ranks
                have cleared gradients without a step. Raised on all ranks.
        """
        unscale_own(stepping)
        current = _stepped(self._parameters())
        lines, grads = _lines_of(current), _gradients(current)
        is_new = closure is not None or _has_new(grads)
        repeats = not is_new and any(bool(grad.any()) for grad in grads)
        if self._num_forgotten and not is_new:
            self._steps.number = None  # the cleared gradients may belong to this step
        for _ in range(self._num_forgotten):
            self._steps.end()
        self._num_forgotten = 0
        self._steps.unreached.count(n for n, p in current if p.grad is None or not p.grad.any())
        own_facts = GradientFacts(repeats=repeats, outdated=lines != self._lines)
        mine = self._steps.message(StepMessage(gradients=own_facts), needs_all=True)
        start_on(self._comm, self._open, mine).wait()
        if self._is_outdated:
            require_equal(self._comm, lines, "parameters")
            self._lines = lines
            self._steps.watch(self._parameters())
        self._before = [(p, p.detach().clone()) for _, p in current]
        return closure

    def _open(self, mine: StepMessage) -> None:
        agreement = self._steps.open(self._comm, mine)
        self._is_outdated = agreement.outdated
        self._steps.take(agreement)

    def contribute_zeros(self, agreement: StepAgreement) -> None:
        """Raise ``AssertionError``; not called, since Adasum steps fail if a rank has joined."""
        raise AssertionError(agreement)

    @torch.no_grad()
    def end_step(self) -> None:
        """Replace this rank's changes of parameters by the combined changes. Collective."""
        start = time.perf_counter()
        changes = [self._compressor.compress(p - before) for p, before in self._before]
        combined = [change.cpu() for change, _ in changes]
        adasum_(self._comm, combined)
        for (p, before), values, (_, ctx) in zip(self._before, combined, changes, strict=True):
            change = self._compressor.decompress(values.to(p.device), ctx)
            p.copy_(before.add_(change))
        self._before = []
        self._mark_gradients()
        self._steps.end()
        self._exposed_seconds = time.perf_counter() - start

    def _mark_gradients(self) -> None:
        """Mark the current gradients as used by a step; a later write invalidates the mark."""
        for grad in _gradients(self._parameters()):
            setattr(grad, _STEPPED, writes_of(grad))


def _gradients(parameters: NamedParameters) -> list[Tensor]:
    return [p.grad for _, p in parameters if p.grad is not None]


def _has_new(grads: Iterable[Tensor]) -> bool:
    """Return whether any nonzero gradient has not been used by a step."""
    return any(getattr(g, _STEPPED, None) != writes_of(g) and bool(g.any()) for g in grads)


def _stepped(parameters: NamedParameters) -> NamedParameters:
    """Return the parameters that a step may change: not frozen, or with a gradient."""
    return [(name, p) for name, p in parameters if p.requires_grad or p.grad is not None]


def _lines_of(parameters: NamedParameters) -> list[str]:
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]
