"""Adasum: the ranks' own steps, combined into one."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.comm.adasum import adasum_
from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Compressor
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.step_check import Announcement, CheckedSteps, Opening


class AdasumStep:
    """Turns the step that each rank takes by itself into one that all ranks take.

    The change of each parameter is combined over all ranks by Adasum: changes at right angles are
    added, equal ones averaged. So the learning rate need not grow with the number of ranks.

    Source: Maleki et al. 2020, arXiv:2006.02924, with an optimizer's step in the place of the
    gradient, as in Horovod.
    """

    def __init__(
        self,
        comm: Communicator,
        compressor: Compressor,
        parameters: Callable[[], NamedParameters],
        steps: CheckedSteps,
    ) -> None:
        """Compare the parameters of all ranks, of today and with their names. Collective."""
        self.steps = steps
        """What is compared before a step, and the number of steps that were taken."""
        self.exposed_seconds = 0.0  # time that the last step needed beside that of the optimizer
        self._comm, self._compressor, self._parameters = comm, compressor, parameters
        self._before: list[tuple[Tensor, Tensor]] = []
        steps.enter(self)
        self._lines = _lines_of(_stepped(parameters()))
        require_equal(comm, self._lines, "parameters")

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the parameters as they are before this rank's own step. Collective.

        Ranks that take different steps, or step different parameters, all raise ``MismatchError``.
        """
        today = _stepped(self._parameters())
        lines = _lines_of(today)
        self.steps.count_reached(name for name, p in today if p.grad is None or not p.grad.any())
        told = Announcement(needs_all=True)
        mine = self.steps.announced(told, (), outdated=lines != self._lines)
        start_on(self._comm, self._open, mine).wait()
        if self._is_outdated:
            require_equal(self._comm, lines, "parameters")
            self._lines = lines
        self._before = [(p, p.detach().clone()) for _, p in today]

    def _open(self, mine: Announcement) -> None:
        opening = self.steps.open(self._comm, mine)
        self._is_outdated = opening.outdated
        self.steps.take(opening)

    def stand_in(self, opening: Opening) -> None:
        """Not reached: ranks that have joined are refused by the header."""
        raise AssertionError(opening)

    @torch.no_grad()
    def end_step(self) -> None:
        """Replace this rank's changes by those of all ranks. Collective."""
        start = time.perf_counter()
        changes = [self._compressor.compress(p - before) for p, before in self._before]
        adasum_(self._comm, [change for change, _ in changes])
        for (p, before), (change, ctx) in zip(self._before, changes, strict=True):
            p.copy_(before.add_(self._compressor.decompress(change, ctx)))
        self._before = []
        self.steps.end()
        self.exposed_seconds = time.perf_counter() - start


def _stepped(parameters: NamedParameters) -> NamedParameters:
    """Return those that a step may change: trained, or frozen with a gradient."""
    return [(name, p) for name, p in parameters if p.requires_grad or p.grad is not None]


def _lines_of(parameters: NamedParameters) -> list[str]:
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]
