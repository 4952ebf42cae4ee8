"""From ``.grad`` to the average over all ranks: by the time ``backward()`` returns, it is there.

autograd finishes a gradient     on_ready      copies it into its place in the bucket
the bucket's last one is there   take          starts its all-reduce (or waits for the end)
backward ends                    complete      waits; ``.grad`` is the average from here on
"""

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from hpctrain.errors import CommError, ConfigError
from hpctrain.sync.parameter_names import NamedParameters
from hpctrain.sync.reduction import Reduction

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

ParameterSource = Callable[[], NamedParameters]


class Reducer:
    """Averages (or sums) the gradients of a set of parameters over all ranks, once per step.

    Collective: every rank goes through the same number of steps. A rank may skip ``backward`` in
    a step, and parameters may lack a gradient on some ranks (they add zeros) or on all of them
    (``.grad`` stays None). The hooks go when the reducer goes.
    """

    def __init__(
        self,
        reduction: Reduction,
        parameters: ParameterSource,
        *,
        passes: int,
        note: Callable[[str], object],
    ) -> None:
        """Lay out the buckets and hook the parameters. Collective.

        Args:
            reduction: moves the gradients.
            parameters: returns the named parameters of today; asked again in every step.
            passes: backward passes that are accumulated locally before one reduction.
            note: is told what this rank has done with others, once per step.
        """
        self._reduction = reduction
        self.is_on = True
        """Whether gradients are reduced; while it is off they stay as this rank made them. It
        changes between two steps, on all ranks in the same one."""
        self._note = note
        self._parameters = parameters
        self._num_passes = passes
        self._is_reduced = False
        self._passes_done = 0
        self._forget_backward()
        self._hooks: list[RemovableHandle] = []
        reduction.build(parameters())
        self._hook()
        weakref.finalize(self, _remove, self._hooks)

    @property
    def passes(self) -> int:
        """Backward passes that are accumulated locally before one reduction."""
        return self._num_passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._num_passes = passes
        self._passes_done = 0

    @property
    def num_ranks(self) -> int:
        """Ranks that gradients are reduced over."""
        return self._reduction.num_ranks

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank that travel in a step, sparse gradients left out."""
        return self._reduction.num_bytes

    @property
    def exposed_seconds(self) -> float:
        """Time in which the last step waited for other ranks."""
        return self._reduction.exposed_seconds

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``."""
        if not self._reduction.average:
            raise ConfigError("sample counts weight an average; this optimizer has op=Sum")
        before = self._reduction.count.weight
        self._reduction.count.set(num_samples, nominal)
        if self._passes_done and self._reduction.count.weight != before:
            raise ConfigError(
                f"all {self._num_passes} backward passes of a step count alike, got "
                f"num_samples={num_samples} after pass {self._passes_done}; set it before them"
            )

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._reduction.count.raised_flags

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits when a step is over, from the next one on."""
        self._reduction.count.flags = flags

    def finish(self) -> bool:
        """Reduce now unless ``backward()`` has done so in this step. Collective.

        Returns:
            Whether there was anything to do.
        """
        is_due = self.is_on and (not self._is_reduced or self._was_dropped())
        if is_due:
            self._complete()
        return is_due

    def new_step(self) -> None:
        """Expect the gradients of another step."""
        self._is_reduced = False
        self._passes_done = 0
        if self._graph_tasks:  # a backward has raised
            self._break_off()

    def start_again(self) -> None:
        """Forget what a backward that raised has left: parameters and state were replaced.

        Collective if one has raised after some of its gradients had travelled: then every rank
        calls this, and the rest travels too, so that the ranks meet again.
        """
        if self._graph_tasks and self._reduction.has_sent:
            self._reduction.complete()
        self._reduction.forget()
        self._passes_done = 0
        self._is_reduced = False
        self._forget_backward()

    def _hook(self) -> None:
        me = weakref.ref(self)

        def on_ready(parameter: torch.Tensor) -> None:
            if (reducer := me()) is not None:
                reducer._on_ready(parameter)  # noqa: SLF001

        _remove(self._hooks)
        slots = self._reduction.slot_of
        self._hooks += [p.register_post_accumulate_grad_hook(on_ready) for p in slots]
        # The first step keeps everything to its end and learns how often each hook fires.
        self._expected_fires = -1
        self._fires_once = False

    def _was_dropped(self) -> bool:
        """Say whether somebody else than the optimizer has dropped reduced gradients."""
        slots = self._reduction.slot_of.values()
        return any(slot.is_present and slot.parameter.grad is None for slot in slots)

    # -- while backward runs ----------------------------------------------------------------

    def _on_ready(self, parameter: torch.Tensor) -> None:
        """Take one gradient; autograd calls this as soon as it is accumulated."""
        if not self.is_on:
            return
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task not in self._graph_tasks:
            self._enter_graph_task(task)
        slot = self._reduction.slot_of[parameter]
        slot.fires += 1
        self._num_fires += 1
        if self._was_reduced and not self._reduction.average and slot.holds_gradient:
            raise CommError(
                "backward ran again before step(), and with op=Sum its gradients would be added "
                "to a sum; use backward_passes_per_step, or optimizer.zero_grad() in between"
            )
        if self._takes_early:
            self._reduction.take(slot)

    def _enter_graph_task(self, task: int) -> None:
        outermost = _is_outermost_backward()
        if outermost and self._has_outer_end:
            self._break_off()
        if not self._graph_tasks:
            self._was_reduced, self._is_reduced = self._is_reduced, False
            last_pass = self._passes_done + 1 >= self._num_passes
            self._takes_early = self._fires_once and last_pass and self._changed() is None
        self._graph_tasks.add(task)
        self._has_outer_end |= outermost
        end = self._on_backward_end if outermost else self._on_nested_end
        Variable._execution_engine.queue_callback(end)  # noqa: SLF001

    def _on_nested_end(self) -> None:
        """A backward inside backward (reentrant checkpointing) is over.

        If no hook has fired in the outer one, the end is known only by counting.
        """
        if not self._has_outer_end and self._num_fires == self._expected_fires:
            self._on_backward_end()

    def _on_backward_end(self) -> None:
        self._passes_done += 1
        if self._passes_done >= self._num_passes:
            self._complete()
        else:
            self._forget_backward()

    def _break_off(self) -> None:
        """Forget a backward that raised: its gradients are not those of this step."""
        if self._reduction.has_sent:
            raise CommError(
                "the last backward raised after some of its gradients had travelled, so the ranks "
                "may differ; start again from a checkpoint, or set HPCTRAIN_OVERLAP=end"
            )
        self._reduction.forget()
        self._passes_done = 0
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._graph_tasks: set[int] = set()
        self._has_outer_end = False
        self._takes_early = False
        self._was_reduced = False
        self._num_fires = 0

    # -- the reduction ----------------------------------------------------------------------

    def _changed(self) -> NamedParameters | None:
        """Return the parameters of today if the buckets no longer fit them."""
        today = self._parameters()
        return None if self._reduction.fits(today) else today

    def _complete(self) -> None:
        self._learn()
        changed = None if self._takes_early else self._changed()
        self._reduction.complete(changed)
        self._note("gradients")
        if changed is not None:
            self._hook()
        self._passes_done = 0
        self._is_reduced = True
        self._forget_backward()

    def _learn(self) -> None:
        if not self._num_fires:
            return
        is_first = self._expected_fires < 0
        slots = self._reduction.slot_of.values()
        once = all(slot.fires <= self._num_passes for slot in slots)
        self._fires_once = once and (is_first or self._fires_once)
        self._expected_fires = self._num_fires


def _remove(hooks: "list[RemovableHandle]") -> None:
    while hooks:
        hooks.pop().remove()


def _is_outermost_backward() -> bool:
    """Say whether the running ``backward()`` was not called by another one.

    Autograd does not tell: a callback queued in a nested backward runs at the nested one's end.
    All of them enter the engine through one Python function, so its frames are counted.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    depth = 0
    while frame is not None:
        depth += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return depth <= 1
