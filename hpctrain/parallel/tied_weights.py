"""Weights that pipeline stages on several ranks share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.core.errors import ConfigError
from hpctrain.parallel.dtensor import local
from hpctrain.parallel.mesh_agreement import gathered
from hpctrain.parallel.split import Chain, shared_between


class TiedWeights:
    """Sums the gradients of weights that several stages share.

    The constructor is collective.

    Args:
        chain: names and layers of the whole model.
        rank_of: pipeline rank of each layer, by index of the layer.
        mesh: axis of the pipeline.
        model: chain that will contain the layers of this rank.
    """

    def __init__(
        self,
        chain: Sequence[tuple[str, nn.Module]],
        rank_of: Mapping[int, int],
        mesh: DeviceMesh,
        model: Chain,
    ) -> None:
        self._mesh, self._model = mesh, model
        self._shared = shared_between(chain)
        self._groups: dict[str, Any] = {}  # by name of a shared weight: group of its ranks
        self._counted_elsewhere: set[str] = set()
        self._kept: list[Tensor | None] = []  # gradients of earlier steps
        ranks, mine = dist.get_process_group_ranks(mesh.get_group()), mesh.get_local_rank()
        made: dict[tuple[int, ...], Any] = {}
        for places in self._shared:
            name_on = {rank_of[layer]: name for layer, name in reversed(places)}
            if mine not in name_on or len(name_on) == 1:
                continue
            members = tuple(sorted(ranks[rank] for rank in name_on))
            if members not in made:
                made[members] = dist.new_group([*members], use_local_synchronization=True)
            self._groups[name_on[mine]] = made[members]
            if mine != min(name_on):
                self._counted_elsewhere.add(name_on[mine])

    def shared(self) -> list[tuple[str, nn.Parameter | None]]:
        """Return name and parameter of each shared weight; None if this rank does not have it."""
        here = dict(self._model.named_parameters(remove_duplicate=False))
        return [
            (places[0][1], next((here[name] for _, name in places if name in self._groups), None))
            for places in self._shared
        ]

    def counted(self) -> list[nn.Parameter]:
        """Return this rank's parameters, except shared weights that a lower rank also has."""
        named = self._model.named_parameters()
        return [p for name, p in named if name not in self._counted_elsewhere]

    def check_trained(self) -> bool:
        """Return whether each rank of the axis trains a parameter. Collective over the axis.

        Raises:
            ConfigError: some stages train a weight and others do not; on every rank.
        """
        named = self._model.named_parameters(remove_duplicate=False)
        found = gathered({name: p.requires_grad for name, p in named}, self._mesh)
        trained = {name: trains for of_rank in found for name, trains in of_rank.items()}
        for places in self._shared:
            if len({trained[name] for _, name in places}) > 1:
                words = (f"{name} {('frozen', 'trained')[trained[name]]}" for _, name in places)
                raise ConfigError(
                    f"a shared weight must be trained in all of its stages or in none, got "
                    f"{', '.join(words)}; set requires_grad to the same value in all stages"
                )
        return all(any(of_rank.values()) for of_rank in found)

    def begin_step(self) -> None:
        """Store and clear accumulated gradients of shared weights, already summed. Local."""
        self._kept = []
        for parameter in self._parameters():
            self._kept.append(parameter.grad)
            parameter.grad = None

    def end_step(self) -> None:
        """Sum this step's gradients over the ranks, and add the stored gradients. Collective."""
        tied = zip(self._parameters(), self._groups.values(), self._kept, strict=True)
        for parameter, group, before in tied:
            if not parameter.requires_grad:  # frozen on the other ranks, too
                parameter.grad = before
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
            if before is not None:
                parameter.grad += before

    def _parameters(self) -> list[nn.Parameter]:
        return [self._model.get_parameter(name) for name in self._groups]
