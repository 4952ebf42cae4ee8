"""A distributed optimizer that combines the ranks' steps instead of their gradients."""

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from hpctrain.comm.adasum import adasum_
from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.eager import eager
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Compressor
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.distributed_methods import DistributedMethods
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.step_header import Announcement, Opening, StepHeader


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
        header: StepHeader,
    ) -> None:
        """Compare the parameters of all ranks, of today and with their names. Collective."""
        self.flags = 0
        """Bits of this rank."""
        self.raised_flags = 0
        """Bits that any rank had in the last step; the same on every rank."""
        self.exposed_seconds = 0.0
        """Time that the last step needed beside that of the optimizer."""
        self._comm, self._compressor, self._parameters = comm, compressor, parameters
        self._before: list[tuple[Tensor, Tensor]] = []
        self._header, self._member = header, header.enter(self)
        self._num_steps = 0
        self._lines = _lines_of(_stepped(parameters()))
        require_equal(comm, self._lines, "parameters")

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the parameters as they are before this rank's own step. Collective.

        Raises:
            MismatchError: the ranks take different steps, or step different parameters; on every
                rank.
        """
        today = _stepped(self._parameters())
        lines = _lines_of(today)
        mine = Announcement(
            member=self._member,
            step=self._num_steps,
            outdated=lines != self._lines,
            needs_all=True,
            flags=self.flags,
        )
        heard: list[Opening] = []
        start_on(self._comm, lambda: heard.append(self._header.exchange(self._comm, mine))).wait()
        if heard[0].outdated:
            require_equal(self._comm, lines, "parameters")
            self._lines = lines
        self.raised_flags = heard[0].flags
        self._before = [(p, p.detach().clone()) for _, p in today]

    def stand_in(self, opening: Opening) -> None:
        """Not reached: ranks that have joined are refused by the header."""
        raise AssertionError(opening)

    @torch.no_grad()
    def combine(self) -> None:
        """Replace this rank's changes by those of all ranks. Collective."""
        start = time.perf_counter()
        changes = [self._compressor.compress(p - before) for p, before in self._before]
        adasum_(self._comm, [change for change, _ in changes])
        for (p, before), (change, ctx) in zip(self._before, changes, strict=True):
            p.copy_(before.add_(self._compressor.decompress(change, ctx)))
        self._before = []
        self._num_steps += 1
        self.exposed_seconds = time.perf_counter() - start


def _stepped(parameters: NamedParameters) -> NamedParameters:
    """Return those that a step may change: trained, or frozen with a gradient."""
    return [(name, p) for name, p in parameters if p.requires_grad or p.grad is not None]


def _lines_of(parameters: NamedParameters) -> list[str]:
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]


class AdasumMethods(DistributedMethods):
    """What ``DistributedOptimizer`` adds to an optimizer whose steps are combined by Adasum.

    Every rank takes every step: a ``GradScaler`` that skips it on one rank only is an error on
    all.
    """

    _adasum: AdasumStep

    @property
    def communication_seconds(self) -> float:
        """Time that the last step needed to combine the ranks' changes, in seconds."""
        return self._adasum.exposed_seconds

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Refuse: Adasum has no weights."""
        raise ConfigError(
            f"sample counts weight an average; this optimizer has op=Adasum, got "
            f"num_samples={num_samples}, nominal={nominal}"
        )

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._adasum.raised_flags

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits in ``raised_flags`` when a step is over."""
        super().raise_flags(flags)
        self._adasum.flags = flags

    def skip_synchronize(self) -> NoReturn:
        """Refuse: a step that is not combined would let the ranks part."""
        raise ConfigError(
            "op=Adasum combines the ranks' steps inside step(); it cannot be skipped"
        )


@eager
def begin_step(stepping: Any, *_: object) -> None:
    """Keep the parameters: torch calls this at the start of ``step()``."""
    stepping._adasum.begin()  # noqa: SLF001


@eager
def combine_steps(stepped: Any, *_: object) -> None:
    """Combine the steps of all ranks: torch calls this at the end of ``step()``."""
    stepped._adasum.combine()  # noqa: SLF001
