"""Search for the fastest layouts that fit into memory; rejected layouts are counted by reason."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Annotated, Any

from hpctrain.core.checks import Bounds, CheckedFields, Number, checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import keys_of
from hpctrain.cost.collectives import Load
from hpctrain.cost.layout_cost import SCHEDULES, Memory, ParallelLayout, Placed, Terms
from hpctrain.cost.machine import Machine
from hpctrain.cost.transformer import RECOMPUTE, Transformer

# With zero_bubble, backward has two passes, but torch keeps recomputed activations for only one.
NOT_TOGETHER = ("selective", "zero_bubble")
MOST_VIRTUAL = 4  # most stages of a rank to try, unless the rules fix the number
MOST_NODES = 1 << 14  # most nodes to try when a message suggests a number of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules(CheckedFields):
    """Constraints on the layouts of a search.

    Raises:
        ConfigError: a value is invalid.
    """

    batch: Number  # samples of a step, over all ranks
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fixed values of a ``ParallelLayout``, by name."""
    tp_across_nodes: bool = False  # whether tensor parallel groups may span nodes
    memory_part: Annotated[float, Bounds(above=0)] = 0.9
    """Fraction of a rank's memory that the modelled tensors may use.

    The remaining memory is for libraries and fragmentation.
    """

    def check(self) -> None:
        """Raise ``ConfigError`` if a fixed value has an unknown name or is invalid."""
        keys = keys_of(ParallelLayout)
        for name, value in self.fixed.items():
            if name not in keys:
                raise ConfigError(f"a fixed value must be one of {', '.join(keys)}, got {name!r}")
            checked(name, value, keys[name].hint)

    def limit(self, machine: Machine) -> float:
        """Return the bytes of a rank's memory that the modelled tensors may use."""
        return self.memory_part * machine.memory_bytes


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout that fits into memory, with its predicted memory and time."""

    layout: ParallelLayout
    memory: Memory
    terms: Terms
    placed: Placed

    @property
    def load(self) -> Load:
        """Load of the busiest rank's links in a step, including overlapped messages."""
        return self.placed.load(self.layout)

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a pipeline stage waits, if stages are equal."""
        return self.placed.bubble(self.layout)


@dataclass(frozen=True, slots=True)
class LayoutAdvice:
    """Result of a search: the fastest layouts, and counts of the rejected meshes and layouts."""

    best: tuple[LayoutChoice, ...]  # the fastest first
    num_meshes: int  # number of divisions of the ranks into axes tp, pp, dp and cp
    num_layouts: int  # number of layouts of the meshes that obey the rules
    broken: dict[str, int]  # for each rule, the number of meshes that it rejected
    lost: dict[str, int]  # for each reason, the number of layouts rejected for this reason


def best_layouts(
    machine: Machine, model: Transformer, rules: LayoutRules, *, keep: int = 5
) -> LayoutAdvice:
    """Return the ``keep`` fastest layouts that fit into memory.

    The result also counts the rejected layouts by reason. Among equally fast layouts, the search
    prefers larger pieces per rank, because processors compute larger pieces faster; then less
    memory; then fewer divisions.

    Raises:
        ConfigError: no layout obeys the rules, or no layout fits into memory.
    """
    space = _Space(machine, model, rules)
    if not space.placed:
        counts = ", ".join(f"{name}: {number}" for name, number in space.broken.most_common())
        raise ConfigError(
            f"a layout must obey all rules, but all {space.broken.total()} divisions of "
            f"{machine.num_ranks} ranks break one: {counts}; change batch, nodes or fixed values"
        )
    found: list[LayoutChoice] = []
    num_layouts = 0
    for placed, layout_of, sizes in space.variants():
        num_layouts += len(sizes)
        for size in sizes:
            one = layout_of(micro_batch=size)
            memory = placed.memory(one)
            if sum(memory) > rules.limit(machine):  # larger micro-batches need at least as much
                break
            found.append(LayoutChoice(one, memory, placed.terms(one), placed))
    if not found:
        raise ConfigError(_too_large(space))
    best = heapq.nsmallest(keep, found, key=_order)
    lost = Counter({"does not fit": num_layouts - len(found)})
    chosen = {one.layout for one in best}
    lost.update(_reason(one.terms, best[0].terms) for one in found if one.layout not in chosen)
    return LayoutAdvice(
        tuple(best),
        len(space.placed) + space.broken.total(),
        num_layouts,
        dict(space.broken),
        {name: number for name, number in lost.most_common() if number},
    )


def _order(one: LayoutChoice) -> tuple[float, ...]:
    layout = one.layout
    piece = layout.micro_batch / (layout.tp * layout.cp)
    cuts = layout.cp, layout.pp, layout.tp, layout.zero, RECOMPUTE.index(layout.recompute)
    order = layout.virtual, SCHEDULES.index(layout.schedule)
    return (_rounded(sum(one.terms)), -piece, _rounded(sum(one.memory)), *cuts, *order)


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")  # sums in different orders become equal


def _reason(terms: Terms, best: Terms) -> str:
    """Return why a layout is slower than the best one: the term with the largest difference."""
    if _rounded(sum(terms)) == _rounded(sum(best)):
        return "equally fast, with smaller pieces or more memory"
    more = {name: value - getattr(best, name) for name, value in terms._asdict().items()}
    return f"slower by {max(more, key=lambda name: more[name]).removesuffix('_s')}"


class _Space:
    """All divisions of a machine's ranks into tensor, pipeline, data and context axes (meshes).

    ``placed`` contains the meshes that obey the rules. ``broken`` counts the other meshes by the
    first violated rule.
    """

    def __init__(self, machine: Machine, model: Transformer, rules: LayoutRules) -> None:
        self.machine, self.model, self.rules = machine, model, rules
        self.placed: list[Placed] = []
        self.broken: Counter[str] = Counter()
        for layout in _products(machine.num_ranks):
            if fault := self._fault(layout):
                self.broken[fault] += 1
            else:
                self.placed.append(Placed(machine, model, layout, rules.batch))

    def _fault(self, one: ParallelLayout) -> str:
        """Return the first rule that a mesh violates, or an empty text."""
        model, rules, fixed = self.model, self.rules, self.rules.fixed
        micro_batch, virtual = fixed.get("micro_batch", 1), fixed.get("virtual", 1)
        settled = {"tp", "pp", "dp", "cp"} & {*fixed}
        crosses = self.machine.ranks_per_node % one.tp
        one_piece = "selective recomputation with zero_bubble"
        broken = {
            "not as fixed": any(getattr(one, name) != fixed[name] for name in settled),
            "tp spans nodes": crosses and not rules.tp_across_nodes,
            "tp does not divide the heads": model.heads % one.tp,
            "more stages than layers": one.pp > model.layers,
            "tp x cp does not divide the sequence": model.sequence % (one.tp * one.cp),
            "dp x micro-batches does not divide the batch": rules.batch % (one.dp * micro_batch),
            "stages do not divide the layers": virtual > 1 and model.layers % (one.pp * virtual),
            "schedule not possible": not self._orders(one, micro_batch),
            one_piece: (fixed.get("recompute"), fixed.get("schedule")) == NOT_TOGETHER,
        }
        return next((rule for rule, is_broken in broken.items() if is_broken), "")

    def _orders(self, one: ParallelLayout, micro_batch: int) -> list[tuple[int, str]]:
        """Return the pairs (stages per rank, schedule) that torch supports and the rules allow."""
        found, fixed, pp = [(1, "1f1b")], self.rules.fixed, one.pp
        # torch interleaves in rounds of pp micro-batches.
        if pp > 1 and self.rules.batch // (one.dp * micro_batch) % pp == 0:
            most = fixed.get("virtual", MOST_VIRTUAL)
            per_rank = [
                v for v in range(1, most + 1) if v == 1 or self.model.layers % (v * pp) == 0
            ]
            found = [*product(per_rank, SCHEDULES)]
        return [
            (virtual, schedule)
            for virtual, schedule in found
            if fixed.get("virtual", virtual) == virtual
            and fixed.get("schedule", schedule) == schedule
        ]

    def variants(self) -> Iterator[tuple[Placed, Callable[..., ParallelLayout], list[int]]]:
        """Yield all layouts, grouped by everything except the size of the micro-batch.

        Each item contains the mesh; a function that returns the layout for the keyword argument
        ``micro_batch``; and the possible values of ``micro_batch``, smallest first. Equivalent
        layouts are omitted.
        """
        fixed = {name: [value] for name, value in self.rules.fixed.items()}
        modes = [
            each for each in RECOMPUTE if each != "selective" or not self.model.fused_attention
        ]
        for placed in self.placed:
            zeros = [0, 1, 2, 3] if placed.data.size > 1 else [0]
            sizes = fixed.get("micro_batch", _divisors(self.rules.batch // placed.axes.dp))
            by_order: dict[tuple[int, str], list[int]] = {}
            for size in sizes:
                for each in self._orders(placed.axes, size):
                    by_order.setdefault(each, []).append(size)
            for zero, mode in product(fixed.get("zero", zeros), fixed.get("recompute", modes)):
                for (virtual, schedule), some in by_order.items():
                    if (mode, schedule) == NOT_TOGETHER:
                        continue
                    order = {"virtual": virtual, "schedule": schedule}
                    layout_of = partial(replace, placed.axes, zero=zero, recompute=mode, **order)
                    yield placed, layout_of, some

    def smallest(self) -> tuple[Memory, ParallelLayout] | None:
        """Return the layout with the least memory, or None if no layout obeys the rules."""
        all_first = (
            (placed, layout_of(micro_batch=size))
            for placed, layout_of, (size, *_) in self.variants()
        )
        found = ((placed.memory(first), first) for placed, first in all_first)
        return min(found, key=lambda each: sum(each[0]), default=None)


def _products(size: int) -> Iterator[ParallelLayout]:
    """Yield a layout for each tuple (tp, pp, dp, cp) with product ``size``."""
    for tp in _divisors(size):
        for pp in _divisors(size // tp):
            for dp in _divisors(size // (tp * pp)):
                yield ParallelLayout(tp=tp, pp=pp, dp=dp, cp=size // (tp * pp * dp))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _too_large(space: _Space) -> str:
    machine, rules, least = space.machine, space.rules, space.smallest()
    assert least is not None
    (memory, layout), limit = least, rules.limit(machine)
    total = sum(memory)
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory._asdict().items())
    remedies = [f"use GPUs of {math.ceil(total / rules.memory_part / 1e9)} GB"]
    nodes = 2 * machine.nodes
    while nodes <= MOST_NODES:
        more = _Space(replace(machine, nodes=nodes), space.model, rules).smallest()
        if more is not None and sum(more[0]) <= limit:
            remedies = [f"use {nodes} nodes", *remedies]
            break
        nodes *= 2
    remedies += ["shorten the sequence"] * (memory.activations > limit / 2)
    return (
        f"a layout must need at most {limit / 1e9:.4g} GB per rank ({rules.memory_part:.0%} of "
        f"{machine.memory_bytes / 1e9:.4g} GB), but the smallest layout, {layout}, needs "
        f"{total / 1e9:.4g} GB, {(total - limit) / 1e9:.3g} GB too much ({parts}); "
        f"{', or '.join(remedies + ['fix fewer values'] * bool(rules.fixed))}"
    )
