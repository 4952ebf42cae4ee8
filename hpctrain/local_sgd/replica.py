"""Replica of a rank, and its exchange with the replicas of other ranks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import on_host
from hpctrain.compress.by_name import Compressing, codec_for
from hpctrain.compress.codec import Identity
from hpctrain.gradients.parameter_names import places_of
from hpctrain.local_sgd.averaged_tensors import (
    NamedTensors,
    OptimizerState,
    Roster,
    Tensors,
    entries_with_mean,
)
from hpctrain.local_sgd.averaging import AnchoredAveraging, Averaging
from hpctrain.local_sgd.replica_weight import SampleSums, Share
from hpctrain.local_sgd.rounds import RoundOpening, Rounds
from hpctrain.local_sgd.state_fields import Fields, StateFields
from hpctrain.runtime.world import World


class Replica:
    """Tensors of this rank's model and optimizer that the ranks average."""

    def __init__(self, comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
        self._comm, self._model, self.optimizer = comm, model, optimizer
        self.roster = Roster(model, optimizer)  # the parameters that all ranks average

    def inner_roster(self) -> Roster:
        """Return a new roster for a subset of ranks that averages more often."""
        made = Roster(self._model, self.optimizer)
        made.set_changed(self.roster.changed())
        self.roster.inner.append(made)
        return made

    def all_agree(self) -> None:
        """Record that all ranks now have the same parameters."""
        self.load_own_state(())

    def own_state(self) -> list[list[str]]:
        """Return the names of parameters that may differ between ranks, one list per roster."""
        return [roster.changed() for roster in (self.roster, *self.roster.inner)]

    def load_own_state(self, changed: Sequence[Collection[str]]) -> None:
        """Restore a result of ``own_state``; empty if all parameters are equal on all ranks."""
        for number, roster in enumerate((self.roster, *self.roster.inner)):
            roster.set_changed(changed[number] if changed else ())

    def parameters(self) -> NamedTensors:
        """Return the trained parameters with their names."""
        named = self._model.named_parameters()
        return [(name, parameter.detach()) for name, parameter in named if parameter.requires_grad]

    def buffers(self) -> NamedTensors:
        """Return floating-point buffers such as running means; counters are not averaged."""
        return [(name, b) for name, b in self._model.named_buffers() if b.is_floating_point()]

    def state(self) -> NamedTensors:
        """Return the tensors of the optimizer's state by name, except numbers of steps."""
        return [
            (f"{name}, {key}", value)
            for name, parameter in places_of(self.optimizer)
            for key, value in entries_with_mean(self.optimizer.state.get(parameter, {}))
        ]

    @contextmanager
    def as_mean(self, share: Share) -> Iterator[None]:
        """Replace parameters and buffers by their means over all ranks inside the block.

        Collective.
        """
        with self.holding(self.means([*self.unequal_parameters(), *self.buffers()], share)):
            yield

    def unequal_parameters(self) -> NamedTensors:
        """Return the parameters that may differ between ranks, with their names. Collective."""
        names = self.roster.union(self._comm)
        return [(n, p.detach()) for n, p in self._model.named_parameters() if n in names]

    def average_buffers(self) -> None:
        """Replace buffers by their means over all ranks. Collective."""
        means = self.means(self.buffers(), Share(1.0, 1.0 / self._comm.size))
        for name, buffer in self.buffers():
            buffer.copy_(means[name])

    def means(self, named: NamedTensors, share: Share) -> dict[str, Tensor]:
        """Return the means of tensors over all ranks, weighted by ``share``. Collective."""
        return {name: self._mean(tensor, share) for name, tensor in named}

    @contextmanager
    def holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Replace parameters and buffers by ``values``, given by name, inside the block."""
        everything = (*self._model.named_parameters(), *self.buffers())
        tensors = {name: tensor.detach() for name, tensor in everything if name in values}
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])

    def mean_state(self, share: Share) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with the means of its tensors. Collective.

        Step counts are the maximum over all ranks, because they differ if a rank has skipped
        steps.
        """
        means = {id(tensor): self._mean(tensor, share) for _, tensor in self.state()}
        state = self.optimizer.state_dict()
        state["state"] = {
            number: {key: means.get(id(value), value) for key, value in own.items()}
            for number, own in state["state"].items()
        }
        counted = [own for _, own in sorted(state["state"].items()) if "step" in own]
        largest = torch.tensor([float(own["step"]) for own in counted], dtype=torch.float64)
        self._comm.allreduce_(largest, op=Op.MAX).wait()
        for own, step in zip(counted, largest.tolist(), strict=True):
            is_tensor = isinstance(own["step"], Tensor)
            own["step"] = torch.full_like(own["step"], step) if is_tensor else int(step)
        return state

    def _mean(self, tensor: Tensor, share: Share) -> Tensor:
        with torch.no_grad():
            # A product of weight 0 and inf would be NaN.
            mean = tensor * share.weight if share.weight else torch.zeros_like(tensor)
            with on_host(mean) as values:
                self._comm.allreduce_(values, scale=share.scale).wait()
        return mean


class Exchange(StateFields):
    """Creates and runs averages of a replica, over all ranks or a subset.

    Args:
        here: the world.
        replica: tensors of this rank.
        rounds: rounds of all ranks.
        compression: codec of parameters that are sent between all ranks.
    """

    _SHARED: ClassVar[Fields] = {
        "bytes_sent": "bytes_sent",
        "parameters": "_replica.roster",
        "anchors": "_anchored[]",
    }

    def __init__(
        self, here: World, replica: Replica, rounds: Rounds, compression: Compressing
    ) -> None:
        self.bytes_sent = 0  # bytes that this rank has sent in averages over all ranks
        self._comm, self._topology = here.comm, here.topology
        self._bucket_bytes, self._note = here.plan.bucket_bytes, here.last_call.note
        self._replica, self._rounds, self._compression = replica, rounds, compression
        self._anchored: list[AnchoredAveraging] = []
        self._made: WeakSet[Averaging] = WeakSet()

    @cached_property
    def node(self) -> Communicator:
        """Ranks of this node. The first use is collective over all ranks."""
        groups = [self._comm.group(ranks) for ranks in self._topology.nodes]
        own = groups[self._topology.node]
        assert own is not None
        return own

    @property
    def is_in_flight(self) -> bool:
        """Whether an average is in flight while training continues."""
        return any(averaging.is_in_flight for averaging in self._made)

    def averages_buffers(self, comm: Communicator | None = None) -> Averaging:
        """Return an ``Averaging`` of buffers over ``comm``, by default all ranks. Collective."""
        return self._averages(Tensors(self._replica.buffers), comm or self._comm)

    def averages_state(self) -> Averaging:
        """Return an ``Averaging`` of the optimizer's state over all ranks. Collective."""
        return self._averages(OptimizerState(self._replica.optimizer), self._comm)

    def averages_parameters(self, node: Communicator | None = None) -> Averaging:
        """Return an ``Averaging`` of parameters over ``node``; None for all ranks. Collective."""
        if node is not None:
            return self._averages(self._replica.inner_roster(), node)
        if isinstance(codec_for(self._compression), Identity):
            return self._averages(self._replica.roster, self._comm)
        return self.anchors_parameters()

    def anchors_parameters(
        self, names: Callable[[], Collection[str]] | None = None, **outer: float
    ) -> AnchoredAveraging:
        """Return an ``AnchoredAveraging`` of all or some parameters over all ranks. Collective."""
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
        """Synchronize the ranks, and start averages. Collective.

        Args:
            averagings: averages to start; the first is the average of parameters.
            samples: sample counts that determine the weight of this rank; cleared by this call.
            rounds: rounds of a subset of ranks; None for the rounds of all ranks.
        """
        outdated = not all(averaging.fits() for averaging in averagings)
        opening = (rounds or self._rounds).synchronize(samples, outdated=outdated)
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
        """Finish the averages that ``begin`` has started: replace tensors by their means.

        Collective.

        Args:
            averagings: averages to finish; averages that are not in flight are ignored.
            rounds: as for ``begin``.
            keep: weight, 0 to 1, of the current values in the new values of trained tensors.
        """
        rounds = rounds or self._rounds
        in_flight = [averaging for averaging in averagings if averaging.is_in_flight]
        distances = [averaging.finish(keep) for averaging in in_flight]
        if in_flight:
            rounds.own_drift = distances[0] if rounds.counts else 0.0
            self._note(f"averaging of replicas in round {self._rounds.number}")

    def anchor(self) -> dict[str, Any]:
        """Return copies of all anchors, by name of the parameter. Collective."""
        return {name: value for one in self._anchored for name, value in one.anchor().items()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; averages in flight are dropped. Collective."""
        for averaging in self._made:
            averaging.drop()
        super().load_shared_state(state)

    def _averages(self, tensors: Tensors, comm: Communicator) -> Averaging:
        made = Averaging(comm, Identity(), tensors, self._bucket_bytes)
        self._made.add(made)
        return made
