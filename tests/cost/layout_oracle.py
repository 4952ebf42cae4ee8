"""Search layouts by brute force: place every rank, and list every stage.

The module shares nothing with ``hpctrain.cost`` except the formulas of the cited papers.
"""

from collections import namedtuple
from itertools import product

Found = namedtuple("Found", "seconds memory layout")


def fewest_on_a_node(group_of, ranks_per_node, world, inner):
    """Return the least number of members that a group has on one of its nodes.

    A block of ``inner`` consecutive ranks counts as one member. The result is 1 if a block is on
    two nodes.
    """
    for first in range(0, world, inner):
        if first // ranks_per_node != (first + inner - 1) // ranks_per_node:
            return 1
    members = {}
    for rank in range(world):
        members.setdefault((group_of(rank), rank // ranks_per_node), []).append(rank)
    return min(map(len, members.values()))


def groups(tp, pp, dp, cp, local):
    """Return, for each axis, the members of a group on one node; order: tp, cp, pp, dp."""
    world, strides = tp * pp * dp * cp, {"tp": 1, "cp": tp, "pp": tp * cp, "dp": tp * cp * pp}
    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    return {
        axis: fewest_on_a_node(
            lambda rank, s=stride, n=sizes[axis]: (rank % s, rank // (s * n)), local, world, stride
        )
        for axis, stride in strides.items()
    }


def halvings(many):
    """Return the rounds until all ranks have the data of all, if each round doubles the data."""
    rounds = 0
    while 2**rounds < many:
        rounds += 1
    return rounds


class Case:
    """A model on a machine, described by plain numbers."""

    def __init__(self, **numbers):
        self.__dict__.update(numbers)
        self.world = self.nodes * self.local
        words = self.vocabulary * self.hidden
        self.words = words
        self.layer = (self.parameters - (words if self.tied else 2 * words)) / self.layers

    def collective(self, num_bytes, size, inside):
        """Return the seconds of an all-gather or reduce-scatter, inside and between nodes."""
        nodes = size // inside
        share = self.network_rate / -(-self.local // self.nics)
        seconds = halvings(inside) * self.node_latency + halvings(nodes) * self.network_latency
        seconds += num_bytes * (inside - 1) / inside / self.node_rate
        return seconds + num_bytes / inside * (nodes - 1) / nodes / share

    def neighbour(self, num_bytes, messages, size, inside):
        """Return the seconds of messages to a neighbour, on the same node or not."""
        if inside == size:
            return messages * self.node_latency + num_bytes / self.node_rate
        share = self.network_rate / -(-self.local // self.nics)
        return messages * self.network_latency + num_bytes / share

    def stages(self, pp):
        """Yield for each stage: its layers, other parameters, and True if it has the output."""
        for stage in range(pp):
            layers = sum(1 for layer in range(self.layers) if layer % pp == stage)
            first, last = stage == 0, stage == pp - 1
            copies = first + last - (pp == 1 and self.tied)
            yield layers, copies * self.words, last

    def in_flight(self, stage, micro, pp, virtual, schedule):
        """Return the number of micro-batches whose activations a rank stores at the same time.

        A rank stores the micro-batches that it processes before its first backward, and one more;
        each of them is for a part of the layers of the rank (Narayanan 2021, Qi 2024).
        """
        if schedule == "zero_bubble":
            return min(micro, pp)
        ahead = pp - 1 - stage if virtual == 1 else 2 * (pp - 1 - stage) + (virtual - 1) * pp
        return min(micro * virtual, ahead + 1) / virtual

    def memory(self, tp, pp, dp, cp, zero, size, recompute, virtual, schedule):
        """Return the bytes of the rank with most memory (Rajbhandari 2020, Korthikanti 2022)."""
        ranks, micro = dp * cp, self.batch // (dp * size)
        s, b, h, a = self.sequence, size, self.hidden, self.heads
        scores = 0 if self.fused else 5 * a * s * s * b
        kept = {
            "none": 34 * s * b * h + scores,
            "selective": 34 * s * b * h,
            "full": 2 * s * b * h,
        }
        again = {"none": 0, "selective": scores, "full": 34 * s * b * h + scores}
        totals = []
        for stage, (layers, more, last) in enumerate(self.stages(pp)):
            psi = (layers * self.layer + more) / tp
            state = {
                0: 16 * psi,
                1: 4 * psi + 12 * psi / ranks,
                2: 2 * psi + 14 * psi / ranks,
                3: 16 * psi / ranks,
            }[zero]
            buffers = {0: 0, 1: 0, 2: 2, 3: 6}[zero] * self.layer / tp
            held = layers * self.in_flight(stage, micro, pp, virtual, schedule) * kept[recompute]
            held += again[recompute]
            held += last * 4 * s * b * (h + self.vocabulary)
            totals.append(state + buffers + held / (tp * cp))
        return max(totals)

    def seconds(self, tp, pp, dp, cp, zero, size, recompute, virtual, schedule):
        """Return the seconds of a step (Narayanan 2021; pipeline latency of Alpa)."""
        near, micro = groups(tp, pp, dp, cp, self.local), self.batch // (dp * size)
        tokens, h = size * self.sequence, self.hidden
        rate = self.flops / max(1, self.per_core)
        attention = 4 * tokens * self.sequence * h / (tp * cp) / rate
        forward = 2 * tokens * self.layer / (tp * cp) / rate + attention
        start = self.pass_s if tp == 1 else self.pass_s + self.tensor_pass_s
        forward += start * max(1, self.per_core)
        hides = self.per_core <= 1  # else the cores that carry messages are those that compute
        again = {"none": 0, "selective": attention, "full": forward}[recompute]
        tensor = 4 * self.collective(2 * tokens * h / cp, tp, near["tp"])
        ring = self.neighbour(4 * tokens * h / (tp * cp) * (cp - 1), cp - 1, cp, near["cp"])
        layer = 3 * forward + again + tensor * (3 if recompute == "full" else 2)
        layer += max(0, ring - hides * attention) * (3 if recompute == "none" else 4)
        output = 6 * tokens * self.words / (tp * cp) / rate
        sent = 4 * tokens * h / (tp * cp) * virtual
        hand = self.neighbour(sent, 2 * virtual, pp, near["pp"]) if pp > 1 else 0
        times = [layers * layer + last * output + hand for layers, _, last in self.stages(pp)]
        mean = sum(times) / pp
        matrices = 2 * tokens * self.layer / (tp * cp) / rate
        weights = (self.layers * matrices + output / 3) / pp
        # What the ends of a step leave idle is one stage of a rank on each other rank: forward
        # and backward, or without a zero bubble's weights, which others then fill once more.
        idle = mean - 2 * weights if schedule == "zero_bubble" else mean
        step = micro * mean + (pp - 1) * idle / virtual + (micro - 1) * (max(times) - mean)
        if self.per_core > 1:  # the path that all wait for, on cores that others have left
            step = max(micro * mean, step / self.per_core)
        if dp * cp == 1:
            return step
        psi = max(layers * self.layer + more for layers, more, _ in self.stages(pp)) / tp
        most = max(layers for layers, _, _ in self.stages(pp))
        one = most * self.collective(2 * psi / most, dp * cp, near["cp"] * near["dp"])
        ahead, back = hides * most * forward, hides * most * (2 * forward + again)
        per_layer = one / most
        gather, scatter = max(one - ahead, per_layer), max(one - back, per_layer)
        both = max(2 * one - back, 2 * per_layer)
        return (
            step
            + {
                0: both,
                1: gather + scatter,
                2: gather + micro * scatter,
                3: micro * (gather + both),
            }[zero]
        )

    def everything(self):
        """Return the layouts that obey the rules and fit into memory, and their total number."""
        axes, num, fitting, least = range(1, self.world + 1), 0, [], float("inf")
        for tp, pp, dp, cp in product(axes, repeat=4):
            if tp * pp * dp * cp != self.world or self.batch % dp or self.heads % tp:
                continue
            spans_nodes = groups(tp, pp, dp, cp, self.local)["tp"] < tp
            if (spans_nodes and not self.across) or pp > self.layers or self.sequence % (tp * cp):
                continue
            zeros = range(4) if dp * cp > 1 else [0]
            modes = ["none", "full"] if self.fused else ["none", "selective", "full"]
            sizes, orders = range(1, self.batch // dp + 1), ("1f1b", "zero_bubble")
            every = product(sizes, (1, 2, 3, 4)[: 4 if pp > 1 else 1], orders, zeros, modes)
            for size, virtual, order, zero, mode in every:
                if self.batch % (dp * size):
                    continue
                rounds = pp > 1 and self.batch // (dp * size) % pp == 0
                if not rounds and (virtual > 1 or order != "1f1b"):
                    continue
                if mode == "selective" and order != "1f1b":
                    continue
                if virtual > 1 and self.layers % (pp * virtual):
                    continue
                num += 1
                layout = (tp, pp, dp, cp, zero, size, mode, virtual, order)
                memory = self.memory(*layout)
                least = min(least, memory)
                if memory <= 0.9 * self.capacity:
                    fitting.append(Found(self.seconds(*layout), memory, layout))
        return sorted(fitting), num, least
