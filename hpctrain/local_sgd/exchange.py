"""The exchange of replicas: the averagings of a method, begun and completed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakSet

from hpctrain.comm.communicator import Communicator
from hpctrain.compress.codec import Identity
from hpctrain.compress.compressor import Compressor
from hpctrain.compress.half import codec_for
from hpctrain.local_sgd.anchored import AnchoredAveraging
from hpctrain.local_sgd.averaged_tensors import OptimizerState, Tensors
from hpctrain.local_sgd.averaging import Averaging
from hpctrain.local_sgd.replica import Replica
from hpctrain.local_sgd.rounds import RoundOpening, Rounds, SampleSums
from hpctrain.local_sgd.state_fields import Fields, StateFields
from hpctrain.runtime.world import World


class Exchange(StateFields):
    """Makes averagings over all ranks or some, and carries them out."""

    _SHARED: ClassVar[Fields] = {
        "bytes_sent": "bytes_sent",
        "parameters": "_replica.roster",
        "anchors": "_anchored",
    }

    def __init__(
        self, here: World, replica: Replica, rounds: Rounds, compression: Compressor
    ) -> None:
        """Begin without averagings; parameters travel compressed between all ranks."""
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

    def averages_buffers(self, comm: Communicator | None = None) -> Averaging:
        """Make what averages buffers, over all ranks or some. Collective."""
        return self._averages(Tensors(self._replica.buffers), comm or self._comm)

    def averages_state(self) -> Averaging:
        """Make what averages the optimizer's state over all ranks. Collective."""
        return self._averages(OptimizerState(self._replica.optimizer), self._comm)

    def averages_parameters(self, node: Communicator | None = None) -> Averaging:
        """Make what averages parameters, over all ranks or those of this node. Collective."""
        if node is not None:
            return self._averages(self._replica.inner_roster(), node)
        if isinstance(codec_for(self._compression), Identity):
            return self._averages(self._replica.roster, self._comm)
        return self.anchors_parameters()

    def anchors_parameters(
        self, names: Callable[[], Collection[str]] | None = None, **outer: float
    ) -> AnchoredAveraging:
        """Make what averages changes of all or some parameters over all ranks. Collective.

        ``outer`` says how the anchor moves: its ``lr`` and ``momentum``.
        """
        made = AnchoredAveraging(
            self._comm,
            codec_for(self._compression),
            self._replica.roster,
            self._bucket_bytes,
            names,
            node=self.node,
            **outer,
        )
        self._anchored.append(made)
        self._made.add(made)
        return made

    def begin(
        self, averagings: Sequence[Averaging], samples: SampleSums, rounds: Rounds | None = None
    ) -> RoundOpening:
        """Let ranks meet by ``rounds``, all of them if None, and then replicas travel. Collective.

        Of the averagings that of parameters comes first. Samples are counted anew from here on.

        Raises:
            MismatchError: only some ranks train a parameter, say, or have other tensors than the
                others; on every rank.
        """
        outdated = not all(averaging.fits() for averaging in averagings)
        opening = (rounds or self._rounds).meet(samples, outdated=outdated)
        samples.clear()
        if not opening.total_weight:
            return opening
        weight, scale = opening.weight, 1.0 / opening.total_weight
        for averaging in averagings:
            if opening.outdated:
                averaging.build(weight, scale)
            averaging.start(weight, scale)
            self.bytes_sent += averaging.num_bytes if rounds is None else 0
        return opening

    def complete(
        self, averagings: Sequence[Averaging], rounds: Rounds | None = None, keep: float = 0.0
    ) -> None:
        """Take over the means of what ``begin`` has let travel, if anything is under way.

        Each tensor keeps the part ``keep`` of its own.
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

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with nothing under way. Collective."""
        for averaging in self._made:
            averaging.drop()
        super().load_shared_state(state)

    def _averages(self, tensors: Tensors, comm: Communicator) -> Averaging:
        made = Averaging(comm, Identity(), tensors, self._bucket_bytes)
        self._made.add(made)
        return made
