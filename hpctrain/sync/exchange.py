"""How replicas travel: the averagings of a method, begun and completed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

from hpctrain.comm.communicator import Communicator
from hpctrain.compress.compressor import Compressor
from hpctrain.compress.half import codec_for
from hpctrain.compress.identity import Identity
from hpctrain.runtime.world import World
from hpctrain.sync.anchored import AnchoredAveraging, Outer
from hpctrain.sync.averaging import Averaging, NamedTensors
from hpctrain.sync.replica import Replica
from hpctrain.sync.rounds import Opening, Rounds, Samples


class Exchange:
    """Makes averagings over all ranks or some, and carries them out."""

    def __init__(
        self, here: World, replica: Replica, rounds: Rounds, compression: Compressor
    ) -> None:
        """Begin without averagings.

        Args:
            here: the ranks.
            replica: what this rank has of its own.
            rounds: lets all ranks meet.
            compression: what parameters travel as between all ranks.
        """
        self.bytes_sent = 0
        """Bytes that this rank has given to averagings over all ranks."""
        self._comm, self._topology = here.comm, here.topology
        self._bucket_bytes, self._note = here.plan.bucket_bytes, here.last_call.note
        self._replica, self._rounds, self._compression = replica, rounds, compression
        self._anchored: list[AnchoredAveraging] = []
        self._made: WeakSet[Averaging] = WeakSet()

    @cached_property
    def node(self) -> Communicator:
        """The ranks of this node. Collective over all ranks when it is used first."""
        groups = [self._comm.group(ranks) for ranks in self._topology.nodes]
        own = groups[self._topology.node]
        assert own is not None
        return own

    @property
    def is_under_way(self) -> bool:
        """Whether replicas travel while training goes on."""
        return any(averaging.is_under_way for averaging in self._made)

    def averages(
        self, tensors: Callable[[], NamedTensors], comm: Communicator | None = None
    ) -> Averaging:
        """Make what averages tensors as they are, over all ranks or some. Collective."""
        return self._noted(Averaging(comm or self._comm, Identity(), tensors, self._bucket_bytes))

    def averages_buffers(self, comm: Communicator | None = None) -> list[Averaging]:
        """Make what averages buffers, over all ranks or some; none without buffers. Collective."""
        return [self.averages(self._replica.buffers, comm)] if self._replica.buffers() else []

    def averages_parameters(
        self, names: Collection[str] | None = None, outer: Outer | None = None
    ) -> Averaging:
        """Make what averages parameters over all ranks. Collective.

        Args:
            names: of those; None for all.
            outer: how an anchor moves; None where only a lossy codec needs one.
        """
        codec, size = codec_for(self._compression), self._bucket_bytes
        parameters = partial(self._replica.parameters, names)
        if outer is None and isinstance(codec, Identity):
            return self._noted(Averaging(self._comm, codec, parameters, size))
        made = AnchoredAveraging(self._comm, codec, parameters, size, self.node, outer or Outer())
        self._anchored.append(made)
        return self._noted(made)

    def begin(
        self, averagings: Sequence[Averaging], samples: Samples, rounds: Rounds | None = None
    ) -> Opening:
        """Let the ranks meet, and then replicas travel. Collective.

        Args:
            averagings: of the same ranks; that of parameters comes first.
            samples: what this rank's replica counts by; counted anew from here on.
            rounds: lets those ranks meet; None for all.
        """
        outdated = not all(averaging.fits() for averaging in averagings)
        opening = (rounds or self._rounds).meet(samples, outdated=outdated)
        samples.clear()
        for averaging in averagings:
            if opening.outdated:
                averaging.build()
            if opening.total_weight:
                averaging.start(opening.weight, 1.0 / opening.total_weight)
                self.bytes_sent += averaging.num_bytes if rounds is None else 0
        return opening

    def complete(
        self, averagings: Sequence[Averaging], rounds: Rounds | None = None, keep: float = 0.0
    ) -> None:
        """Take over the means of what ``begin`` has let travel, if anything is under way.

        Args:
            averagings: those of ``begin``.
            rounds: as for ``begin``.
            keep: part of its own that each tensor keeps.
        """
        rounds = rounds or self._rounds
        under_way = [averaging for averaging in averagings if averaging.is_under_way]
        distances = [averaging.finish(keep) for averaging in under_way]
        if under_way:
            rounds.own_drift = distances[0]
            self._note(f"averaging of replicas in round {self._rounds.number}")

    def anchor(self) -> dict[str, Any]:
        """Return the anchors of all parameters that have one, by name. Collective."""
        return {name: value for one in self._anchored for name, value in one.anchor().items()}

    def state(self) -> dict[str, Any]:
        """Return what is the same on every rank. Collective."""
        return {
            "bytes_sent": self.bytes_sent,
            "anchors": [averaging.state() for averaging in self._anchored],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with nothing under way. Collective."""
        self.bytes_sent = state["bytes_sent"]
        for averaging, anchor in zip(self._anchored, state["anchors"], strict=True):
            averaging.drop()
            averaging.load_state(anchor)

    def _noted(self, averaging: Averaging) -> Averaging:
        self._made.add(averaging)
        return averaging
