"""``Reproducible``, whose training steps are bitwise equal on any number of ranks."""

import functools
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.comm.agreement import maxima, raise_if_any, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.norms import exact_sum
from hpctrain.core.checks import Number, checked
from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.core.logs import logger
from hpctrain.core.units import by_rank
from hpctrain.gradients.fixed_tree import (
    ALIGNMENT,
    Node,
    aligned_part,
    arithmetic,
    num_samples_of,
    own_micro_shards,
    push,
    sample_range,
    seed_of,
    sum_over_ranks,
)
from hpctrain.gradients.optimizer import DistributedMethods
from hpctrain.gradients.step_values import StepValues


@dataclass(slots=True)
class _Report:
    """Facts that a rank sends to the other ranks before gradients are summed."""

    step: int
    num_samples: int | None
    flags: int
    refusal: str | None = None
    losses: list[float] = field(default_factory=list)  # loss times weight of each micro-shard
    has_counters: bool | None = None
    """Whether the first micro-shard has changed integer buffers; None without samples."""


class Reproducible:
    """Takes training steps whose results do not depend on the number of ranks.

    Up to ``num_micro_shards`` ranks compute bitwise equal results, on processors of one type and
    with the same libraries: all values in ``facts`` must be equal. Steps are slower: each rank
    runs forward and backward of its micro-shards one by one, in one thread, and sends gradients
    only at the end. In addition to the gradient of the current micro-shard, a rank stores a copy
    of the buffers, and at most one gradient per level of the tree, or two if the number of ranks
    does not divide the number of micro-shards.

    Random numbers of the global generators of torch, numpy and Python are reproducible, for
    example in dropout; random numbers of other generators are not. Batch-dependent preprocessing,
    such as padding to the longest sample, must be fixed.

    The constructor is collective. It checks that all ranks have the same settings, and calls
    ``torch.set_num_threads``.

    Args:
        model: module on the CPU, with the same values on every rank.
        optimizer: any optimizer that is not a ``DistributedOptimizer``.
        comm: ranks that share each step.
        num_micro_shards: number of micro-shards per batch, a power of two and at least the number
            of ranks. The result depends on this number.
        seed: seed of the random numbers.
        num_threads: number of threads of torch.

    Raises:
        ConfigError: an argument is not valid.
        MismatchError: settings or tensors differ between ranks; raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Communicator,
        *,
        num_micro_shards: int,
        seed: int,
        num_threads: int = 1,
    ) -> None:
        if isinstance(optimizer, DistributedMethods):
            raise ConfigError(
                "Reproducible must get a plain optimizer, got a DistributedOptimizer, which "
                "averages gradients itself; leave DistributedOptimizer out"
            )
        checked("num_threads", num_threads, Number)
        self._ranges = [
            own_micro_shards(num_micro_shards, rank, comm.size) for rank in range(comm.size)
        ]
        self.own = self._ranges[comm.rank]  # indices of the micro-shards of this rank
        self.next_step = 0  # index of the next step, from 0; random numbers depend on it
        self.communication_seconds = 0.0
        """Seconds of the last step for communication, including waits."""
        self.raised_flags = 0
        """Flags that any rank had raised for the last step; the same on every rank."""
        self.own_loss = 0.0
        """Contribution of this rank's samples to the loss of the last step."""
        self._model, self._optimizer, self._comm = model, optimizer, comm
        self._num_micro_shards, self._seed, self._num_threads = num_micro_shards, seed, num_threads
        self._flags = 0
        self._check_same()
        torch.set_num_threads(num_threads)

    @property
    def facts(self) -> dict[str, str]:
        """Settings, processor and libraries that must be equal for bitwise equal results."""
        return {"micro_shards": str(self._num_micro_shards), **arithmetic(self._num_threads)}

    def describe(self) -> str:
        """Return a human-readable description of the method."""
        number = self._num_micro_shards
        return f"bitwise equal on up to {number} ranks, with {number} micro-shards per batch"

    def step(
        self, batch: Any, loss_function: Callable[[Any], Tensor], *, num_samples: int | None = None
    ) -> float:
        """Run ``backward`` and the step of the optimizer; return the loss. Collective."""
        loss = self.backward(batch, loss_function, num_samples=num_samples)
        self._optimizer.step()
        return loss

    def backward(
        self, batch: Any, loss_function: Callable[[Any], Tensor], *, num_samples: int | None = None
    ) -> float:
        """Compute the loss of the global batch, and replace all gradients. Collective.

        A global batch is divided into micro-shards, and each rank computes consecutive
        micro-shards. Each micro-shard has its own forward and backward, on inputs in aligned
        memory, with random numbers that depend on seed, step and micro-shard, and with the buffers
        as at the start of the step. Gradients and changed buffers are summed over a fixed binary
        tree and divided once by the number of micro-shards; integer buffers get the values after
        the first micro-shard. BatchNorm therefore normalises by micro-shard, and its running
        statistics move towards the mean of the statistics of all micro-shards.

        Args:
            batch: samples ``sample_range(...)`` of the global batch: tensors whose first dimension
                counts samples, in tuples, lists and mappings.
            loss_function: function of a micro-shard that returns the mean loss over its samples.
            num_samples: number of samples of the global batch; micro-shards are weighted by their
                samples, and empty micro-shards are skipped. None if all micro-shards have the same
                number of samples.

        Returns:
            The mean loss of the global batch, the same on every rank.

        Raises:
            MismatchError: ranks take different steps, a batch has the wrong size, or a
                ``DataError`` occurred on a rank; raised on all ranks.
        """
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            values = StepValues(self._model, _trained(self._optimizer))
        work = _Work(values, _Report(self.next_step, num_samples, flags=self._flags))
        try:
            sizes = self._sizes(batch, num_samples)
            with kept_generators():
                self._run(work, batch, loss_function, sizes)
        except (ConfigError, DataError) as error:
            work.report.refusal = str(error)
        self.own_loss = exact_sum(work.report.losses) / self._num_micro_shards
        start = time.perf_counter()
        with torch.no_grad():
            loss = self._combine(work)
        self.communication_seconds = time.perf_counter() - start
        self.next_step += 1
        return loss

    def raise_flags(self, flags: int) -> None:
        """Send flags to all ranks, which read ``raised_flags`` after each later step."""
        self._flags = flags

    def state_dict(self) -> dict[str, Any]:
        """Return step, seed and facts, the same on every rank."""
        return {"next_step": self.next_step, "seed": self._seed, "facts": self.facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore step and seed from a result of ``state_dict``; warn if facts have changed."""
        self.next_step, self._seed = state["next_step"], state["seed"]
        changes = [
            f"{name} was {state['facts'].get(name)}, is {fact}"
            for name, fact in self.facts.items()
            if state["facts"].get(name) != fact
        ]
        if changes and self._comm.rank == 0:
            logger.warning(
                f"processor, libraries and settings must be as in the saved run for bitwise equal "
                f"results, but {'; '.join(changes)}; resume with the same nodes and versions"
            )

    def _run(
        self,
        work: "_Work",
        batch: Any,
        loss_function: Callable[[Any], Tensor],
        sizes: Sequence[tuple[int, float]],
    ) -> None:
        """Run forward and backward of this rank's micro-shards, and sum complete subtrees."""
        values, report, first = work.values, work.report, 0
        for micro_shard, (size, weight) in zip(self.own, sizes, strict=True):
            taken: list[Tensor | None] = [None] * len(values)
            if size:
                part = aligned_part(batch, slice(first, first + size))
                begin_generators(seed_of(self._seed, self.next_step, micro_shard))
                loss = loss_function(part)
                loss.backward(torch.full_like(loss, weight))
                report.losses.append(loss.item() * weight)
                del part, loss
                with torch.no_grad():
                    taken, counters = values.take()
                if report.has_counters is None:
                    report.has_counters, work.counters = bool(counters), counters
            first += size
            with torch.no_grad():
                push(work.pending, Node(0, micro_shard, taken), values.absent)

    def _combine(self, work: "_Work") -> float:
        """Sum over the ranks, and set gradients and buffers; return the loss. Collective."""
        reports = self._comm.allgather_object(work.report)
        raise_if_any([report.refusal for report in reports])
        steps = [f"step {report.step} of {report.num_samples} samples" for report in reports]
        if len(set(steps)) > 1:
            raise MismatchError(
                f"ranks must take the same steps, got {by_rank(steps)}; load the same state and "
                f"pass the same num_samples on every rank"
            )
        self.raised_flags = functools.reduce(operator.or_, (r.flags for r in reports))
        # Facts about entries, and counters, are not in the reports: each rank would receive N
        # copies.
        present = [
            any(node.values[entry] is not None for node in work.pending)
            for entry in range(len(work.values))
        ]
        present = [largest > 0 for largest in maxima(self._comm, [*map(int, present)])]
        with_samples = [rank for rank, each in enumerate(reports) if each.has_counters is not None]
        counters: dict[int, Tensor] = {}
        if with_samples and reports[with_samples[0]].has_counters:
            counters = self._comm.broadcast_object(work.counters, root=with_samples[0])
        scale = 1.0 / self._num_micro_shards
        sums = sum_over_ranks(self._comm, self._ranges, work.pending, present, work.values.absent)
        work.values.settle(sums, scale, counters)
        return exact_sum(loss for report in reports for loss in report.losses) * scale

    def _sizes(self, batch: Any, num_samples: int | None) -> list[tuple[int, float]]:
        """Return the number of samples and the weight of each micro-shard of this rank."""
        here, shards = num_samples_of(batch), self._num_micro_shards
        if num_samples is None:
            if here == 0 or here % len(self.own):
                raise ConfigError(
                    f"without num_samples the number of samples of a rank must be a multiple of "
                    f"its {len(self.own)} micro-shards, got {here} samples; pass num_samples of "
                    f"the global batch"
                )
            return [(here // len(self.own), 1.0)] * len(self.own)
        expected = sample_range(num_samples, shards, self.own)
        if here != len(expected) or num_samples < 1:
            raise ConfigError(
                f"the batch of a rank must contain its {len(expected)} of {num_samples} samples, "
                f"for micro-shards {self.own.start} to {self.own.stop - 1} of {shards}, got "
                f"{here}; divide the batch by sample_range"
            )
        sizes = [len(sample_range(num_samples, shards, range(i, i + 1))) for i in self.own]
        return [(size, size * shards / num_samples) for size in sizes]

    def _check_same(self) -> None:
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        lines = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors]
        require_equal(self._comm, lines, "parameters and buffers")
        misplaced = [name for name, t in tensors if not t.is_cpu or t.data_ptr() % ALIGNMENT]
        self._comm.agree(
            not misplaced,
            f"parameters and buffers must be on the CPU, in memory that begins at a multiple of "
            f"{ALIGNMENT} bytes, but {', '.join(misplaced[:3])} are not; replace them by clones",
        )
        mine = {**self.facts, "seed": str(self._seed)}
        every = self._comm.allgather_object(mine)
        for name in mine:
            if len({facts[name] for facts in every}) > 1:
                raise MismatchError(
                    f"{name} must be the same on all ranks of a reproducible run, got "
                    f"{by_rank([facts[name] for facts in every])}; use equal settings, or request "
                    f"nodes of one type"
                )


@dataclass(slots=True)
class _Work:
    """State of one step on this rank."""

    values: StepValues
    report: _Report
    pending: list[Node] = field(default_factory=list)
    counters: dict[int, Tensor] = field(default_factory=dict)
    """Integer buffers, by entry, after the first micro-shard of this rank that has samples."""


def _trained(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python after the block."""
    of_numpy, of_python = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002 - a model may draw from it
        random.setstate(of_python)


def begin_generators(seed: int) -> None:
    """Seed the random generators of torch, numpy and Python; ``seed`` is below 2^64."""
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002 - a model may draw from it
    random.seed(seed)
