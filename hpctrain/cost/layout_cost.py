"""Cost of a layout of a transformer over ranks: memory, bytes on links, time of a step.

Ranks are placed as in ``hpctrain.parallel``: ranks of a tensor parallel group are neighbours;
context, pipeline and data parallel groups have increasing distances. A tensor parallel group also
splits the sequence, so the group uses all-gather and reduce-scatter instead of all-reduce.
Pipeline stages alternate between forward and backward of micro-batches. If the number of layers is
not a multiple of the number of stages, the first stages have one more layer. The real step can
then be faster than predicted, because the slowest stage may wait less than the model assumes. If
ranks share cores, waiting ranks yield the core, and messages use cores that could compute, so no
messages overlap with computation.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter
models"; Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
using Megatron-LM"; Korthikanti et al. 2022, "Reducing activation recomputation in large
transformer models"; Liu et al. 2023, "Ring attention with blockwise transformers"; Qi et al. 2024,
"Zero bubble pipeline parallelism", for the first handcrafted schedule; Zheng et al. 2022, "Alpa",
for stages with unequal times.
Differs: gradients of ZeRO stages 2 and 3 are scattered after each micro-batch.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from hpctrain.core.checks import Bounds, Number
from hpctrain.cost.collectives import Load
from hpctrain.cost.machine import Machine
from hpctrain.cost.transformer import RECOMPUTE, Transformer

SCHEDULES = ("1f1b", "zero_bubble")
"""Pipeline schedules; ``zero_bubble`` computes weight gradients while a stage would wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes of a transformer, and options of a training step."""

    tp: Number = 1
    """Ranks that share the matrices of a layer."""
    pp: Number = 1
    """Pipeline stages; each stage has a part of the layers."""
    dp: Number = 1
    """Ranks that share the batch."""
    cp: Number = 1
    """Ranks that share the sequence of a sample."""
    zero: Annotated[int, Bounds(least=0, below=4)] = 0
    """ZeRO stage. The data parallel ranks divide the optimizer state (1), also the gradients (2),
    or also the parameters (3)."""
    micro_batch: Number = 1
    """Samples of a micro-batch."""
    recompute: Annotated[str, Bounds(names=RECOMPUTE)] = "none"
    """Activations that backward recomputes."""
    virtual: Number = 1
    """Number of interleaved pipeline stages on each rank."""
    schedule: Annotated[str, Bounds(names=SCHEDULES)] = "1f1b"
    """Order in which a stage processes micro-batches."""

    def __str__(self) -> str:
        axes = f"tp={self.tp} pp={self.pp} dp={self.dp} cp={self.cp} zero={self.zero}"
        order = f" virtual={self.virtual} schedule={self.schedule}" * (self.pp > 1)
        return f"{axes} micro_batch={self.micro_batch} recompute={self.recompute}{order}"


class Memory(NamedTuple):
    """Bytes of memory of the rank that needs most memory, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float = 0.0  # layers that ZeRO has gathered, gradients that it has not scattered


class Terms(NamedTuple):
    """Seconds of a step by cause; communication that overlaps with computation is not counted."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float  # messages between stages
    bubble_s: float  # waits of stages for the first and the last micro-batch
    imbalance_s: float  # waits for the slowest stage
    data_s: float


class Group(NamedTuple):
    """A group of communicating ranks; all groups of a node communicate concurrently."""

    size: int
    inside: int  # ranks of the group on the same node; 1 if all messages leave the node
    per_card: int  # ranks of a node that share a NIC

    def moved(self, num_bytes: float, times: float = 1) -> Load:
        """Return the load of ``times`` all-gathers or reduce-scatters of a message."""
        nodes = self.size // self.inside
        rounds = [times * (many - 1).bit_length() for many in (self.inside, nodes)]
        within = (self.inside - 1) / self.inside * times * num_bytes
        across = (nodes - 1) / self.size * times * num_bytes
        return Load(rounds[0], within, rounds[1], self.per_card * across, across)

    def passed(self, num_bytes: float, rounds: float) -> Load:
        """Return the load of rounds in which each rank sends a message to its neighbour.

        Only the slowest message of a round is counted; ``num_bytes`` is the sum over all rounds.
        """
        if self.inside == self.size:
            return Load(rounds, num_bytes)
        return Load(0.0, 0.0, rounds, self.per_card * num_bytes, num_bytes)


def inside(ranks_per_node: int, inner: int, size: int) -> int:
    """Return how many consecutive blocks of a group are guaranteed to be on the same node.

    The group consists of ``size`` blocks of ``inner`` ranks each.
    """
    return math.gcd(ranks_per_node // inner, size) if ranks_per_node % inner == 0 else 1


class Placed:
    """Cost model of a transformer on a machine, for layouts with the same parallel axes.

    Layouts that are passed to the methods must have the same parallel axes as ``axes``. The
    product of the axes must be the number of ranks, and dp times the micro-batch must divide the
    batch.

    Args:
        machine: machine; all its ranks are used.
        model: the transformer.
        axes: layout with the parallel axes; its other fields are not used.
        batch: samples of a step, over all ranks.
    """

    def __init__(
        self, machine: Machine, model: Transformer, axes: ParallelLayout, batch: int
    ) -> None:
        self.machine, self.model, self.axes, self.batch = machine, model, axes, batch
        tp, pp, dp, cp = axes.tp, axes.pp, axes.dp, axes.cp
        local, inner = machine.ranks_per_node, (1, tp, tp * cp, tp * cp * pp)
        sizes = zip(inner, (tp, cp, pp, dp), strict=True)
        *within, replicas = (inside(local, each, size) for each, size in sizes)
        per_card = -(-local // machine.nics)
        self.tensor = Group(tp, within[0], per_card)
        self.context = Group(cp, within[1], per_card)
        self.stages = Group(pp, within[2], per_card)
        self.data = Group(cp * dp, within[1] * replicas, per_card)
        self._shared = tp * cp  # ranks among which activations are divided
        self._turns = machine.turns(local)
        self._most = -(-model.layers // pp)
        # For the first and the last stage: number of layers, number of embedding parameters, and
        # whether the stage has the output layer.
        self._ends = [(self._most, model.embeddings, True)]
        if pp > 1:
            first, last = (self._most, model.embedding), (model.layers // pp, model.embedding)
            self._ends = [(*first, False), (*last, True)]
        per_layer = model.layer_parameters
        self._of_layer: dict[tuple[int, str], dict[str, float]] = {}
        self._parameters = [(layers * per_layer + more) / tp for layers, more, _ in self._ends]

    def micro_batches(self, one: ParallelLayout) -> int:
        """Return the number of micro-batches of a step."""
        return self.batch // (one.dp * one.micro_batch)

    def bubble(self, one: ParallelLayout) -> float:
        """Return the fraction of a step in which a pipeline stage waits, if stages are equal.

        With ``zero_bubble``, backward has two halves; forward and each half are assumed to take
        equally long.
        """
        thirds = 3 if one.schedule == "zero_bubble" else 1
        return (one.pp - 1) / (self.micro_batches(one) * one.virtual * thirds + one.pp - 1)

    def _in_flight(self, one: ParallelLayout) -> tuple[float, float]:
        """Return how many micro-batches have stored activations, on the first and last stage."""
        num_micro, pp, virtual = self.micro_batches(one), one.pp, one.virtual
        if one.schedule == "zero_bubble":
            return (min(num_micro, pp),) * 2
        if virtual == 1:
            return min(num_micro, pp), 1
        last = (virtual - 1) * pp + 1  # layer groups in flight on the last stage
        return min(num_micro, (last + 2 * (pp - 1)) / virtual), min(num_micro, last / virtual)

    def memory(self, one: ParallelLayout) -> Memory:
        """Return the memory of the stage that needs more memory: the first or the last."""
        model, ranks = self.model, self.data.size
        zero = one.zero if ranks > 1 else 0  # ZeRO has no effect in a group of one rank
        in_flight = self._in_flight(one)
        kept, again = model.activations(one.recompute)
        per_layer, share = model.layer_parameters / one.tp, one.micro_batch / self._shared
        buffers = (zero >= 2) * model.gradient_bytes * per_layer
        buffers += (zero == 3) * 2 * model.parameter_bytes * per_layer  # present and next layer
        found = []
        for number, (layers, _, has_output) in enumerate(self._ends):
            of_rank = self._parameters[number]
            held = in_flight[number] * layers * kept + again
            held += has_output * model.output_activations
            shares = (
                model.parameter_bytes * of_rank / (ranks if zero == 3 else 1),
                model.gradient_bytes * of_rank / (ranks if zero >= 2 else 1),
                model.optimizer_bytes * of_rank / (ranks if zero >= 1 else 1),
            )
            found.append(Memory(*shares, share * held, buffers))
        return max(found, key=sum)

    def _share_s(self, one: ParallelLayout) -> float:
        """Return the seconds of a micro-batch if each sample needs one floating-point operation.

        All ranks of a node are assumed to compute at the same time.
        """
        return self._turns * one.micro_batch / (self._shared * self.machine.flops_per_s)

    def _exposed(self, seconds: float, concurrent_s: float, least_s: float = 0.0) -> float:
        """Return the seconds of messages that a concurrent computation does not hide.

        Args:
            seconds: time of the messages.
            concurrent_s: time of the computation.
            least_s: lower bound of the result.
        """
        return max(seconds - concurrent_s, least_s) if self._turns == 1 else seconds

    def _layer(self, one: ParallelLayout) -> dict[str, float]:
        """Return the seconds of a layer per micro-batch, forward and backward, by term."""
        key = one.micro_batch, one.recompute  # many layouts have the same key
        if key not in self._of_layer:
            self._of_layer[key] = self._new_layer(one)
        return self._of_layer[key]

    def _new_layer(self, one: ParallelLayout) -> dict[str, float]:
        share_s = self._share_s(one)
        pass_s = self.machine.pass_s + (one.tp > 1) * self.machine.tensor_pass_s
        forward_s = self.model.layer_flops * share_s + self._turns * pass_s
        attention_s = self.model.attention_flops * share_s
        again_s = {"none": 0.0, "selective": attention_s, "full": forward_s}[one.recompute]
        tensor, context = (load.seconds(self.machine) for load in self._loads(one, 1))
        concurrent_s = attention_s * (3 if one.recompute == "none" else 4)
        return {
            "compute_s": 3 * forward_s,
            "recompute_s": again_s,
            "tensor_s": tensor,
            "context_s": self._exposed(context, concurrent_s),
        }

    def _loads(self, one: ParallelLayout, layers: float) -> tuple[Load, Load]:
        """Return the loads of tensor parallel and context parallel messages per micro-batch.

        Each pass through a layer gathers activations twice and scatters activations twice; keys
        and values are sent around a ring. In the backward pass, the gradients of keys and values
        are sent around the ring too.
        """
        whole, steps = one.micro_batch * self.model.input_bytes, one.cp - 1
        tensor = layers * (3 if one.recompute == "full" else 2)
        context = layers * (3 if one.recompute == "none" else 4)
        ring = self.context.passed(2 * whole * steps / self._shared * context, steps * context)
        return self.tensor.moved(whole / one.cp, 4 * tensor), ring

    def _stage_messages(self, one: ParallelLayout, times: float) -> Load:
        """Return the load of ``times`` messages between stages, each with one micro-batch."""
        num_bytes = one.micro_batch * self.model.input_bytes / self._shared
        return self.stages.passed(times * num_bytes, times)

    def terms(self, one: ParallelLayout) -> Terms:
        """Return the predicted seconds of a step."""
        pp, num_micro, layer = one.pp, self.micro_batches(one), self._layer(one)
        output_s = 3 * self.model.output_flops * self._share_s(one)
        stage_s = (
            self._stage_messages(one, 2 * one.virtual).seconds(self.machine) if pp > 1 else 0.0
        )
        layer_s = sum(layer.values())
        mean = {name: self.model.layers * each / pp for name, each in layer.items()}
        mean["compute_s"] += output_s / pp
        mean_s = sum(mean.values()) + stage_s
        ends = (layers * layer_s + has_output * output_s for layers, _, has_output in self._ends)
        later_s = 0.0  # computation of weight gradients, which fills the bubble
        if one.schedule == "zero_bubble":
            flops = self.model.layer_flops - self.model.attention_flops
            flops = self.model.layers * flops + self.model.output_flops
            later_s = 2 * self._share_s(one) * flops / pp
        bubble_s = (pp - 1) * (mean_s - later_s) / one.virtual
        imbalance_s = (num_micro - 1) * (max(ends) + stage_s - mean_s)
        if self._turns > 1 and pp > 1:  # waiting ranks yield the core to other ranks
            waits_s = bubble_s + imbalance_s
            left_s = max(0.0, (num_micro * mean_s + waits_s) / self._turns - num_micro * mean_s)
            bubble_s, imbalance_s = (each * left_s / waits_s for each in (bubble_s, imbalance_s))
        return Terms(
            **{name: num_micro * each for name, each in mean.items()},
            pipeline_s=num_micro * stage_s,
            bubble_s=bubble_s,
            imbalance_s=imbalance_s,
            data_s=self._data_s(one.zero, num_micro, layer) if self.data.size > 1 else 0.0,
        )

    def _data_s(self, zero: int, num_micro: int, layer: dict[str, float]) -> float:
        """Return the exposed seconds of messages with gradients and sharded parameters.

        Gradients are sent layer by layer during the backward pass, and parameters during the pass
        that needs the parameters. At least the messages of one layer are exposed.
        """
        most, model = self._most, self.model
        forward_s = most * layer["compute_s"] / 3
        backward_s = 2 * forward_s + most * layer["recompute_s"]
        gather_s, scatter_s = (
            self.data.moved(size * max(self._parameters) / most, most).seconds(self.machine)
            for size in (model.parameter_bytes, model.gradient_bytes)
        )

        def exposed(seconds: float, concurrent_s: float) -> float:
            return self._exposed(seconds, concurrent_s, seconds / most)

        if zero == 0:
            return exposed(2 * scatter_s, backward_s)
        if zero == 3:
            both_s = exposed(gather_s, forward_s) + exposed(gather_s + scatter_s, backward_s)
            return num_micro * both_s
        times = num_micro if zero == 2 else 1
        return times * exposed(scatter_s, backward_s) + exposed(gather_s, forward_s)

    def load(self, one: ParallelLayout) -> Load:
        """Return the load of the busiest rank's links in a step, including overlapped messages."""
        num_micro, model, most = self.micro_batches(one), self.model, self._most
        tensor, context = self._loads(one, most * num_micro)
        times = 2 * one.virtual - (one.pp == 2) if one.pp > 1 else 0
        found = tensor + context + self._stage_messages(one, num_micro * times)
        gathers = {0: 0, 3: 2 * num_micro}.get(one.zero, 1)
        scatters = {0: 2, 1: 1}.get(one.zero, num_micro)
        size = gathers * model.parameter_bytes + scatters * model.gradient_bytes
        return found + self.data.moved(size * max(self._parameters) / most, most)
