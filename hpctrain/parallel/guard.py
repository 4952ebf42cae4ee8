"""Check that the ranks of a divided model perform the same operations."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from hpctrain.core import logs
from hpctrain.core.config import Settings
from hpctrain.core.errors import MismatchError, ReplicaError
from hpctrain.core.torch_compat import call_after_backward, graph_task_id, move_to_front
from hpctrain.gradients.weight_sample import WeightSample
from hpctrain.parallel.guard_facts import (
    NOTHING,
    bounds_of,
    crc,
    differ,
    is_clamp,
    mark,
    pairs,
    part,
    settings_of,
    shared_texts,
    states_of,
    texts,
    writes_of,
)
from hpctrain.parallel.guard_layout import (
    Axis,
    GuardLayout,
    LayoutFinder,
    difference,
    gathered,
    maxima,
)
from hpctrain.parallel.last_step import LastStep

FORWARD, EVALUATION, STEP = 0, 1, 2
"""Kinds of calls; ranks compare before each call. ``STEP + n`` is a step of optimizer ``n``."""

_RULES = {
    "contents": "ranks must hold the same values of replicated parameters, but differ in {}; "
    "write to replicated parameters on all ranks, or load the model again",
    "tied": "ranks whose stages share a weight must treat it identically, but differ in {}; "
    "change the weight, its gradient and requires_grad on all these stages",
    "pattern": "ranks of a pipeline must clear and clip gradients together, but differ in {}; "
    "call zero_grad() and clip on all ranks, and set learning rates to scale single layers",
    "taken": "ranks of a pipeline must step equally often, but differ in {}; call step() once "
    "for each Pipeline.step() on all ranks",
    "stages": "ranks of a pipeline must change the optimizer's settings together, but differ in "
    "{}; set the same values on all ranks",
    "writes": (
        "ranks must write to parameters together, but differ in {}; write on all ranks, or write "
        "changes of one part of a parameter to its to_local()"
    ),
    "gradients": "ranks must treat gradients identically, but differ in {}; call zero_grad(), "
    "clip and change .grad on all ranks",
    "settings": "ranks must step with the same settings of the optimizer, but differ in {}; set "
    "the same values on all ranks",
    "trained": "ranks must train and freeze the same parameters, but differ in {}; set "
    "requires_grad on all ranks",
    "what": "ranks must take the same steps, but differ in {}; call forward, backward and step() "
    "equally often on all ranks",
}
"""Error message of each rule. If several rules are violated, the guard reports the last one."""
_FAULTS = ("", *_RULES)
_HEAD = 4  # numbers before the facts: fault, ``is_new``, and a pair that only one axis compares
_SAME = ("trained", "settings", "gradients", "writes")
"""Facts that pipeline stages do not compare, because stages have different parameters.

These facts are at the end of a message, so that messages between stages can omit them.
"""

Shared = Sequence[tuple[str, nn.Parameter | None]]
"""Name and parameter of each weight that stages share; None on ranks without the weight."""


class Guard:
    """Checks before each training forward and step that all ranks perform the same operation.

    The ranks compare facts: numbers that must be equal on all ranks, such as checksums of the
    optimizer's settings and of the states of gradients. A comparison is an all-reduce of about 20
    numbers along each axis of ranks: the axes of the meshes of DTensors, the replicas, and the
    pipeline stages.

    Args:
        model: model whose forward and steps are checked; hooks are added to its forward and to the
            steps of every optimizer.
        stages: axis of the pipeline stages; None without a pipeline.
        shared: returns the weights that stages share.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stages: DeviceMesh | None = None,
        shared: Callable[[], Shared] = lambda: (),
    ) -> None:
        self.num_flags = 0  # number of flags in each message; ``compare`` pads with zeros
        self.do_all_step = True
        """Whether every rank of a pipeline trains a parameter and compares before steps."""
        self._model, self._shared = weakref.ref(model), shared
        self._layouts = LayoutFinder(model, stages)
        self._check_weights = Settings.from_env().check_weights
        self._numbers = weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]()
        # By index of the optimizer: whether all stages had equal settings in its first step.
        self._are_uniform = dict[int, bool]()
        self._num_steps, self._is_queued = 0, False
        self._taken = Counter[int]()  # steps of each optimizer since the last forward
        self._last = last = LastStep(shared, self._taken, self._are_uniform)
        self.refresh()
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(lambda stepped, *_: last.end(stepped)),
            model.register_forward_pre_hook(self._before_forward, prepend=True),
            model.register_forward_hook(self._after_forward),
        ]
        for handle in self._handles[:2]:
            weakref.finalize(model, handle.remove)

    def __reduce__(self) -> Any:
        """Return a closed guard, so that the guard of a copied model does nothing."""
        return _closed, ()

    def close(self) -> None:
        """Remove the hooks of this guard."""
        for handle in self._handles:
            handle.remove()

    def refresh(self) -> None:
        """Discard cached parameters; called after modules of the model have changed."""
        self._layouts.refresh()
        self._samples: dict[Any, tuple[list[Tensor], WeightSample]] = {}

    def add_replicas(self, groups: Iterable[Any], device: str, *, is_averaged: bool) -> None:
        """Add groups of ranks that hold replicas of the same plain parameters.

        Args:
            groups: process groups.
            device: device type of the groups' messages.
            is_averaged: whether the gradients of replicas differ until the ranks average them
                before a step.
        """
        self._layouts.replicas += [(group, device, is_averaged) for group in groups]
        self.refresh()

    def mark(self) -> None:
        """Record the current gradients as the result of backward or of an average."""
        self._is_queued = False
        mark([p for _, p in self._layouts.now().named])

    def compare(
        self,
        what: int,
        optimizer: Optimizer | None = None,
        *,
        flags: Sequence[int] = (),
        batch: int | None = None,
        is_new: bool = False,
    ) -> list[int]:
        """Raise on all ranks unless all ranks perform the same operation. Collective.

        Args:
            what: ``FORWARD``, ``EVALUATION``, or ``STEP`` plus the index of the optimizer.
            optimizer: optimizer that takes the step.
            flags: numbers whose maxima over all ranks of this stage are returned.
            batch: checksum of the batch, which the ranks of a pipeline compare.
            is_new: whether the pipeline of this rank must exchange the shapes of messages.

        Returns:
            The maxima of ``flags``; then 1 if ``is_new`` is true on any rank, else 0; then 1 if
            ``batch`` differs between ranks, else 0.

        Raises:
            ReplicaError: replicated parameters have different values.
            MismatchError: the ranks differ in something else.
        """
        layout = self._layouts.now()
        self._count(what)
        facts = self._facts(what, optimizer, layout)
        tail = [*flags, *[0] * (self.num_flags - len(flags))]
        compares = what < STEP or (self.do_all_step and self._taken.total() == 1)
        words, batch_differs = self._compared(
            facts, what, [is_new, *tail], batch, compares=compares
        )
        if _FAULTS[words[0]] == "gradients" and self._is_clamp():
            facts["gradients"] = None
            words, batch_differs = self._compared(
                facts, what, [is_new, *tail], batch, compares=compares
            )
        if words[0]:
            self._raise(_FAULTS[words[0]], what, optimizer)
        if what < STEP:
            self._taken.clear()
        elif self._layouts.has_stages and compares:
            self._are_uniform.setdefault(what - STEP, True)
        if optimizer is not None and self._check_weights != "off":
            self._last.begin(layout, optimizer, what - STEP)
        found = words[_HEAD + 2 * len(facts) :]
        return [*found[: len(flags)], words[1], int(batch_differs)]

    def _compared(
        self,
        facts: Mapping[str, int | None],
        what: int,
        flags: Sequence[int],
        batch: int | None,
        *,
        compares: bool,
    ) -> tuple[list[int], bool]:
        """Compare along all axes; return the maxima of all numbers, and whether ``batch`` differs.

        Collective.
        """
        layout = self._layouts.layout
        words = [0, flags[0], *pairs([None, *facts.values()]), *flags[1:]]
        for axis in layout.in_order():
            own = self._checksum(axis, what)
            words = self._exchanged(words, axis, [*facts], what, own)
        batch_differs = False
        for axis in layout.stages if compares or words[0] else ():
            words = self._exchanged(words, axis, [*facts], what, batch)
            batch_differs = differ(words[2:4])
            if "tied 0" in facts and what >= STEP and _FAULTS[words[0]] != "what":
                # The other axes do not compare shared weights, but all ranks must raise an error.
                for other in layout.in_order():
                    words = self._exchanged(words, other, [*facts], what, None)
        return words, batch_differs

    def _is_clamp(self) -> bool:
        """Return whether ``clip_grad_value_`` explains the differences of gradients. Collective.

        ``clip_grad_value_`` may change the part of a gradient on one rank and not on another.
        """
        layout = self._layouts.layout
        bounds = bounds_of([p for _, p in layout.watched])
        for axis in layout.in_order():
            bounds = bounds.to(axis.device)
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=axis.group)
        words = [int(not is_clamp(bounds))]
        for axis in (*layout.in_order(), *layout.stages):
            words = maxima(words, axis)
        return not words[0]

    def _count(self, what: int) -> None:
        if what >= STEP:
            self._num_steps += 1
            self._taken[what - STEP] += 1

    def _exchanged(
        self, words: list[int], axis: Axis, names: Sequence[str], what: int, own: int | None
    ) -> list[int]:
        """Return the maxima of ``words`` over an axis. Collective.

        Word 0 of the result is the index of a violated rule, or 0. Along the stages, the flags and
        the facts in ``_SAME`` are not sent. Along other axes, the facts about shared weights are
        not compared.
        """
        hidden = [] if axis.is_stages else [name for name in names if name.startswith("tied")]
        hidden += ["gradients"] * (axis.is_averaged and what < STEP)
        kept = {_HEAD + 2 * names.index(name) + i for name in hidden for i in (0, 1)}
        end = _HEAD + 2 * (len(names) - len(_SAME)) if axis.is_stages else len(words)
        words[2:4] = pairs([own])
        most = maxima([NOTHING if i in kept else word for i, word in enumerate(words[:end])], axis)
        words = [words[i] if i in kept else word for i, word in enumerate(most)] + words[end:]
        found = [name for i, name in enumerate(names) if differ(words[_HEAD + 2 * i :][:2])]
        if "stages" in found and not self._are_uniform.get(what - STEP):
            found.remove("stages")
            if axis.is_stages:
                self._are_uniform[what - STEP] = False
        if differ(words[2:4]) and not axis.is_stages and self._is_error(axis):
            found.append("contents")
        words[0] = max([words[0], *(_FAULTS.index(name.split()[0]) for name in found)])
        return words

    def _facts(
        self, what: int, optimizer: Optimizer | None, layout: GuardLayout
    ) -> dict[str, int | None]:
        """Return the numbers that must be equal on all ranks, by rule; None matches any number."""
        settings = crc(settings_of(optimizer)) if optimizer else None
        return {
            "what": what,
            "stages": settings if self._are_uniform.get(what - STEP, True) else None,
            "pattern": self._pattern(layout, what),
            "taken": max(self._taken.values(), default=None) if what < STEP else None,
            **{f"tied {i}": self._of_shared(p, what) for i, (_, p) in enumerate(self._shared())},
            "trained": crc([p.requires_grad for _, p in layout.named]),
            "settings": settings,
            "gradients": crc(states_of([p for _, p in layout.watched])),
            "writes": crc(writes_of(layout.watched)),
        }

    def _pattern(self, layout: GuardLayout, what: int) -> int | None:
        """Return the state of all gradients of this stage, or None if their states differ."""
        is_too_early = what < STEP and any(axis.is_averaged for axis in layout.axes)
        if not self._layouts.has_stages or is_too_early:
            return None
        states = {*states_of([p for _, p in layout.named if p.requires_grad])}
        return states.pop() if len(states) == 1 else None

    def _of_shared(self, parameter: nn.Parameter | None, what: int) -> int | None:
        if parameter is None or what < STEP:
            return None
        return crc(shared_texts(parameter, self._num_steps))

    def _checksum(self, axis: Axis, what: int) -> int | None:
        """Return a checksum of sampled values of parameters that are replicated over ``axis``."""
        if what < STEP or not axis.replicated or self._check_weights == "off":
            return None
        return self._sample(axis).checksum(self._num_steps)

    def _sample(self, axis: Axis) -> WeightSample:
        held = [part(p) for _, p in axis.replicated]
        before, sample = self._samples.get(axis.group, ([], WeightSample(())))
        if [*map(id, held)] != [*map(id, before)]:
            names = [name for name, _ in axis.replicated]
            sample = WeightSample(list(zip(names, held, strict=True)))  # type: ignore[arg-type]
            self._samples[axis.group] = held, sample
        return sample

    def _is_error(self, axis: Axis) -> bool:
        """Return True if unequal replicas are an error; otherwise log a warning.

        Collective over ``axis``.
        """
        if self._check_weights == "error":
            return True
        found = difference(self._sample(axis).by_name(self._num_steps), axis)
        if dist.get_rank(axis.group) == 0:
            logs.warn_merged([[_RULES["contents"].format(found)]])
        return False

    def _raise(self, fault: str, what: int, optimizer: Optimizer | None) -> None:
        """Raise the error of rule ``fault``, with the values that differ. Collective."""
        self._last.forget()
        text, axes = "", self._layouts.layout.axes
        for axis in axes:
            if axis.is_stages != (fault in (*_SAME, "contents")) or fault == "what":
                mine = self._texts(fault, what, optimizer, axis)
                text = difference(mine, axis) or text
        for axis in axes:
            text = next(filter(None, gathered(text, axis)), "")
        kind = ReplicaError if fault == "contents" else MismatchError
        raise kind(_RULES[fault].format(text))

    def _texts(
        self, fault: str, what: int, optimizer: Optimizer | None, axis: Axis
    ) -> Mapping[str, str]:
        """Return, as text by name, this rank's values that the rule ``fault`` compares."""
        if fault == "what":
            step = f"step() of optimizer {what - STEP}"
            return {"the call": ("forward", "evaluation", step)[min(what, STEP)]}
        if fault == "taken":
            return {"steps": str(max(self._taken.values()))} if self._taken else {}
        if fault == "contents":
            return self._sample(axis).by_name(self._num_steps)
        if fault == "tied":
            return {
                f"{key} of {name}": value
                for name, p in self._shared()
                if p is not None
                for key, value in shared_texts(p, self._num_steps).items()
            }
        is_all = fault in ("trained", "pattern")
        return texts(
            fault,
            self._layouts.layout.named if is_all else self._layouts.layout.watched,
            optimizer,
        )

    def _number_of(self, optimizer: Optimizer) -> int | None:
        """Return the index of an optimizer, or None for an optimizer of another model.

        Optimizers are numbered in the order of their first steps.
        """
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        number, before = self._numbers.get(optimizer, (-1, -1))
        if number < 0 and count != before:
            mine = {id(p) for _, p in self._layouts.named()}
            is_mine = any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            )
            number = len({n for n, _ in self._numbers.values()} - {-1}) if is_mine else -1
            self._numbers[optimizer] = number, count
        return number if number >= 0 else None

    def before_step(self, optimizer: Optimizer, flags: Sequence[int] = ()) -> list[int]:
        """Compare before a step of ``optimizer``; return the maxima of ``flags``. Collective."""
        number = self._number_of(optimizer)
        assert number is not None
        return self.compare(STEP + number, optimizer, flags=flags)[:-2]

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not hasattr(optimizer, "_gradients") and self._number_of(optimizer) is not None:
            self.before_step(optimizer)

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if self._model() is not module:  # the module is a copy of the model
            return
        # The comparison must precede FSDP's gathering, also if fully_shard() was called later.
        move_to_front(module, self._handles[2])
        # A forward during backward repeats a forward before which the ranks have compared.
        is_backward = graph_task_id() != -1
        if torch.is_grad_enabled() and not is_backward:
            self.compare(FORWARD)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        """Add a hook to an output, so that ``mark`` is called at the end of backward."""
        for leaf in tree_leaves(output):
            if self._model() is module and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._queue)
                return

    def _queue(self, _: Tensor) -> None:
        if not self._is_queued:  # queued twice, to run after the callbacks that FSDP queues
            self._is_queued = True
            call_after_backward(lambda: call_after_backward(self.mark))


def _closed() -> Guard:
    guard = Guard(nn.Module())
    guard.close()
    return guard


def guarded(model: nn.Module, **options: Any) -> Guard:
    """Create and attach a guard of ``model``; close the earlier guards of its modules."""
    release(model)
    guard = Guard(model, **options)
    attach(model, guard)
    return guard


def attach(model: nn.Module, guard: Guard) -> None:
    """Attach ``guard`` to ``model``, so that ``guard_of`` returns it."""
    vars(model)["_guard"] = guard


def guard_of(model: nn.Module) -> Guard:
    """Return the guard that is attached to ``model``."""
    found: Guard = vars(model)["_guard"]
    return found


def release(model: nn.Module) -> int:
    """Close the guards of a model and its modules; return the largest ``num_flags`` of these."""
    guards = [m.__dict__.pop("_guard") for m in model.modules() if "_guard" in m.__dict__]
    for guard in guards:
        guard.close()
    return max((guard.num_flags for guard in guards), default=0)
