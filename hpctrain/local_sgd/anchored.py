"""Means of what has changed since an anchor, which is held once per node."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.local_sgd.averaged_tensors import NamedTensors
from hpctrain.local_sgd.averaging import Averaging, Load


class NodeVector:
    """A vector of zeros in node memory. What one rank writes, others read after a barrier."""

    def __init__(self, node: Communicator, numel: int, dtype: torch.dtype) -> None:
        """Make it. Collective over ``node``: where its ranks share no memory each holds all."""
        slices = [slice_bounds(numel, node.size, rank) for rank in range(node.size)]
        largest = max(bounds.stop - bounds.start for bounds in slices)
        peers = node.new_bucket(largest, dtype).peers
        if peers:
            self.parts = tuple(
                (bounds, peer[: bounds.stop - bounds.start])
                for bounds, peer in zip(slices, peers, strict=True)
            )
            """All slices, and where they lie in the whole."""
            self.bounds, self.own = self.parts[node.rank]
        else:
            self.bounds, self.own = slice(0, numel), torch.zeros(numel, dtype=dtype)
            self.parts = ((self.bounds, self.own),)

    def read(self, out: Tensor) -> None:
        """Copy all of it into a flat tensor; a barrier of the node comes before."""
        for bounds, part in self.parts:
            out[bounds].copy_(part)


class AnchoredAveraging(Averaging):
    """Averages θ_anchor - θ_k over the ranks k and lets the anchor, and all ranks, step by it.

    What travels is the difference, which a codec may round: the error stays in proportion to what
    has changed, and all ranks go on from the same bits. Anchor and momentum lie in node memory,
    each local rank holding and moving a slice of both; where ranks share no memory each holds all.
    """

    def __init__(
        self, *averaging: Any, node: Communicator, lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        """Put the anchor where rank 0's tensors are. Collective.

        It takes a step of Nesterov's SGD by ``lr`` and ``momentum``, by default to the mean.
        ``node`` has the ranks of this node, the rest is as for ``Averaging``.
        """
        self._node, self._lr, self._momentum = node, lr, momentum
        super().__init__(*averaging)

    @torch.no_grad()
    def build(self, weight: float, scale: float) -> None:
        """Lay the buckets out for the tensors of today. Collective.

        Anchors and momenta stay. What has none yet gets one where its weighted mean is.
        """
        before = self.shared_state() if self._loads else {"momentum": {}, "anchor": {}}
        super().build(weight, scale)
        found, known = self._tensors.find(), before["anchor"]
        new = {n for n, shape, _ in self._specs if n not in known or known[n].shape != shape}
        anchors, momenta = {**known}, {**before["momentum"]}
        for number, load in enumerate(self._loads):
            places = [pair for pair in self._pairs(number, found) if pair[0] in new]
            load.bucket.flat.zero_()
            for _, tensor, place in places if weight else ():
                torch.mul(tensor, weight, out=place)
            if places:
                self._comm.allreduce_(load.bucket, scale=scale).wait()
            for name, _, place in places:
                anchors[name], momenta[name] = place.clone(), torch.zeros_like(place)
        self._put(anchors, momenta)

    def anchor(self) -> dict[str, Tensor]:
        """Return copies of the anchor's tensors, by name. Collective."""
        found = self._by_name(self._anchors)
        self._node.barrier()  # nobody moves it while others read
        return found

    def shared_state(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of anchor and momentum, by name, the same on every rank. Collective."""
        momentum = self._by_name(self._momenta) if self._momenta else {}
        return {"momentum": momentum, "anchor": self.anchor()}

    @torch.no_grad()
    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``shared_state`` returned, on any number of ranks. Collective."""
        self._lay_out_for(state["anchor"])
        self._put(state["anchor"], state["momentum"])

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Let this rank's tensors be the anchor. Not collective, but all ranks do it."""
        found = self._tensors.find()
        for number in range(len(self._loads)):
            self._read_result(number)
            for _, tensor, place in self._pairs(number, found):
                tensor.copy_(place)
        self._tensors.became_equal({*self.names})

    def _lay_out(self, today: NamedTensors) -> None:
        super()._lay_out(today)
        self._anchors = [self._vector_for(load) for load in self._loads]
        self._momenta = [self._vector_for(load) for load in self._loads if self._momentum]
        self._moves: list[Tensor] = []

    def _vector_for(self, load: Load) -> NodeVector:
        flat = load.bucket.flat
        return NodeVector(self._node, flat.numel(), flat.dtype)

    def _fill(self, number: int, found: Mapping[str, Tensor]) -> None:
        super()._fill(number, found)
        self._subtract_from_anchor(number)

    def _restore_mean(self, number: int) -> None:
        own = self._loads[number].bucket.flat[self._anchors[number].bounds]
        self._moves.append(own.clone())
        self._subtract_from_anchor(number)

    def _advance(self) -> None:
        """Let this rank's slices take the outer step.

        With momentum m and the mean difference d: m <- mu m + d, anchor <- anchor - lr (d + mu m),
        as torch.optim.SGD(nesterov=True) takes it.
        """
        self._node.barrier()  # others may still be reading the slice that moves now
        lr, mu = self._lr, self._momentum
        for momentum, move in zip(self._momenta, self._moves, strict=bool(self._momenta)):
            momentum.own.mul_(mu).add_(move)
            move.add_(momentum.own, alpha=mu)
        for anchor, move in zip(self._anchors, self._moves, strict=True):
            anchor.own.sub_(move, alpha=lr)
        self._moves.clear()
        self._node.barrier()

    def _read_result(self, number: int) -> None:
        self._anchors[number].read(self._loads[number].bucket.flat)

    def _subtract_from_anchor(self, number: int) -> None:
        flat = self._loads[number].bucket.flat
        for bounds, part in self._anchors[number].parts:
            torch.sub(part, flat[bounds], out=flat[bounds])

    def _by_name(self, vectors: Sequence[NodeVector]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for load, vector in zip(self._loads, vectors, strict=True):
            flat = torch.empty_like(load.bucket.flat)
            vector.read(flat)
            found |= {self._specs[member][0]: place for member, place in load.places_in(flat)}
        return found

    def _put(self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]) -> None:
        """Let each rank write its slices. Collective over the node."""
        for vectors, tensors in ((self._anchors, anchors), (self._momenta, momenta)):
            for load, vector in zip(self._loads, vectors, strict=bool(vectors)):
                flat = torch.zeros_like(load.bucket.flat)
                for member, place in load.places_in(flat):
                    place.copy_(tensors[self._specs[member][0]])
                vector.own.copy_(flat[vector.bounds])
        self._node.barrier()
