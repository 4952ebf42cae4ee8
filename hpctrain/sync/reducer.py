"""From ``.grad`` to the average over all ranks: by the time ``backward()`` returns, it is there.

autograd finishes a gradient     on_ready      copies it into its place in the bucket
the bucket's last one is there   launch        starts its all-reduce (or waits for the end)
backward ends                    complete      waits; ``.grad`` is the average from here on
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan
from hpctrain.comm.work import FINISHED, ThreadWork, Work
from hpctrain.compress.codec import Codec
from hpctrain.errors import CommError
from hpctrain.sync.gradient_buckets import GradientBucket, NamedParameters, Slot, build_buckets
from hpctrain.sync.sample_count import SampleCount

if TYPE_CHECKING:
    from types import FrameType

ParameterSource = Callable[[], NamedParameters]


class Reducer:
    """Averages (or sums) the gradients of a set of parameters over all ranks, once per step.

    Collective: every rank goes through the same number of steps. A rank may skip ``backward`` in
    a step, and parameters may lack a gradient on some ranks (they add zeros) or on all of them
    (``.grad`` stays None).
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        codec: Codec,
        parameters: ParameterSource,
        *,
        average: bool,
        passes: int,
    ) -> None:
        """Lay out the buckets and hook the parameters.

        Args:
            comm: the ranks.
            plan: when buckets travel, and how large they are.
            codec: what a bucket travels as.
            parameters: returns the named parameters of today; asked again in every step.
            average: divide the sum by the number of ranks, weighted by samples.
            passes: backward passes that are accumulated locally before one reduction.
        """
        self.count = SampleCount(comm)
        self.exposed_seconds = 0.0
        self._comm, self._plan, self._codec = comm, plan, codec
        self._parameters, self._average, self._num_passes = parameters, average, passes
        self._thread = ThreadPoolExecutor(1, "hpctrain-comm") if plan.overlap == "thread" else None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._passes_done = 0
        self._is_reduced = False
        self._waited_s = 0.0
        self._reset_backward()
        self._build(parameters())

    def finish(self) -> None:
        """Reduce now unless ``backward()`` has done so in this step. Collective."""
        if not self._is_reduced:
            self._complete()

    def new_step(self) -> None:
        """Expect the gradients of another step."""
        self._is_reduced = False

    def _build(self, parameters: NamedParameters) -> None:
        for hook in self._hooks:
            hook.remove()
        bucket_bytes = None if self._plan.overlap == "end" else self._plan.bucket_bytes
        self._buckets: list[GradientBucket] = build_buckets(self._comm, parameters, bucket_bytes)
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._slot_of: dict[torch.Tensor, Slot] = {slot.parameter: slot for slot in slots}
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_ready) for _, p in parameters]
        # The first step keeps everything to its end and learns how often each hook fires.
        self._expected_fires = -1
        self._fires_once = False

    def _is_outdated(self) -> bool:
        """Say whether parameters came, went, or changed their dtype or shape since ``_build``."""
        today = self._parameters()
        slot_of = self._slot_of
        return len(today) != len(slot_of) or any(
            (slot := slot_of.get(p)) is None
            or slot.view.dtype != p.dtype
            or slot.view.shape != p.shape
            for _, p in today
        )

    # -- while backward runs ----------------------------------------------------------------

    def _on_ready(self, parameter: torch.Tensor) -> None:
        """Take one gradient; autograd calls this as soon as it is accumulated."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task not in self._graph_tasks:
            self._enter_graph_task(task)
        slot = self._slot_of[parameter]
        slot.fires += 1
        self._num_fires += 1
        if not self._takes_early:
            return
        if slot.is_filled:
            self._take_again(slot)
        self._fill(slot)
        if self._plan.overlap != "end":
            while self._next_bucket < len(self._buckets) and self._is_full(self._next_bucket):
                self._launch_next()

    def _take_again(self, slot: Slot) -> None:
        """Accept another contribution to a gradient that lies in its place, or say why not."""
        if self._next_bucket > slot.bucket or self.count.weight != 1.0:
            raise CommError(
                f"the gradient of {slot.name} came twice in one backward, and only once in the "
                f"first step; keep the graph as it is, or checkpoint with use_reentrant=False"
            )

    def _enter_graph_task(self, task: int) -> None:
        if not self._graph_tasks:
            self._is_reduced = False
            last_pass = self._passes_done + 1 >= self._num_passes
            self._takes_early = self._fires_once and last_pass and not self._is_outdated()
        self._graph_tasks.add(task)
        if _is_outermost_backward():
            self._has_outer_end = True
            Variable._execution_engine.queue_callback(self._on_backward_end)  # noqa: SLF001
        else:
            Variable._execution_engine.queue_callback(self._on_nested_end)  # noqa: SLF001

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
            self._reset_backward()

    def _reset_backward(self) -> None:
        self._graph_tasks: set[int] = set()
        self._has_outer_end = False
        self._takes_early = False
        self._num_fires = 0
        self._next_bucket = 0
        self._works: list[Work] = []

    def _is_full(self, index: int) -> bool:
        return self._buckets[index].num_empty == 0

    # -- the reduction ----------------------------------------------------------------------

    def _fill(self, slot: Slot) -> None:
        if not slot.is_filled:
            self._buckets[slot.bucket].num_empty -= 1
            with torch.no_grad():
                slot.fill(self.count.weight if self._average else 1.0)

    def _launch_next(self) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        start = time.perf_counter()
        if self._thread is not None:
            self._works.append(ThreadWork(self._thread.submit(self._reduce, index)))
        else:
            self._reduce(index)
            self._works.append(FINISHED)
        self._waited_s += time.perf_counter() - start

    def _reduce(self, index: int) -> None:
        with torch.no_grad():
            if index == 0 and self._average:
                self._scale = 1.0 / self.count.sum_over_ranks()
            bucket = self._buckets[index]
            bucket.write_marks()
            scale = self._scale if self._average else None
            self._codec.allreduce_(bucket.bucket, self._comm, scale=scale).wait()

    def _complete(self) -> None:
        """Fill what is missing, send what is not sent, wait for all of it."""
        if not self._takes_early and self._is_outdated():
            self._build(self._parameters())
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._fill(slot)
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self.exposed_seconds = self._waited_s + time.perf_counter() - start
        self._learn()
        self._settle()

    def _learn(self) -> None:
        if not self._num_fires:
            return
        is_first = self._expected_fires < 0
        once = all(slot.fires <= self._num_passes for slot in self._slot_of.values())
        self._fires_once = once and (is_first or self._fires_once)
        self._expected_fires = self._num_fires

    def _settle(self) -> None:
        for bucket in self._buckets:
            bucket.num_empty = len(bucket.slots)
            for slot in bucket.slots:
                slot.settle()
        self._waited_s = 0.0
        self._passes_done = 0
        self._is_reduced = True
        self._reset_backward()


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
