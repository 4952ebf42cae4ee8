"""Layers that change their rank because stages take unequally long: which ones, and the move."""

import io
import pickle
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpctrain.core.units import format_numbers

Layers = dict[int, tuple[str, nn.Module]]
"""Layers of a rank, by their numbers in the model: name and module."""
Move = tuple[int, int]
"""From which rank of the pipeline to which."""
Moves = Mapping[Move, Sequence[int]]
"""Layers by where they go."""


class Timed(NamedTuple):
    """What a rank has measured in a step."""

    layers: Mapping[int, tuple[str, float]]  # what a layer prints, and its seconds
    rank: int  # among all ranks
    host: str


def timed(layers: Layers, seconds: Mapping[int, float]) -> Timed:
    """Return what this rank has measured, for others."""
    alike = {number: (repr(layers[number][1]), each) for number, each in seconds.items()}
    return Timed(alike, dist.get_rank(), socket.gethostname())


def slowest_of(found: Sequence[Timed]) -> Timed:
    """Return the ranks of a stage as one: as slow as the slowest, for which all wait. Pure."""
    named = max(found, key=lambda one: sum(seconds for _, seconds in one.layers.values()))
    times = {
        number: (kind, max(one.layers[number][1] for one in found))
        for number, (kind, _) in named.layers.items()
    }
    return named._replace(layers=times)


def speeds(found: Sequence[Mapping[int, tuple[str, float]]]) -> tuple[list[float], list[float]]:
    """Tell slow ranks from dear layers: layers that print alike cost alike. Pure.

    Args:
        found: of each rank, by the number of a layer: what it prints, and its seconds.

    Returns:
        How many times as long as usual each rank takes, 1 if it has no layer like one of another
        rank; and what each layer would take on a usual rank.
    """
    times: dict[str, dict[int, list[float]]] = {}
    for rank, layers in enumerate(found):
        for kind, seconds in layers.values():
            times.setdefault(kind, {}).setdefault(rank, []).append(seconds)
    usual = {
        kind: statistics.median(map(statistics.mean, of_ranks.values()))
        for kind, of_ranks in times.items()
        if len(of_ranks) > 1
    }
    slowness = []
    for layers in found:
        pairs = [(seconds, usual[kind]) for kind, seconds in layers.values() if kind in usual]
        mine, others = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1, 1)
        slowness.append(mine / others)
    costs = {
        number: seconds / slowness[rank]
        for rank, layers in enumerate(found)
        for number, (_, seconds) in layers.items()
    }
    return slowness, [costs[number] for number in sorted(costs)]


def against_others(busy: Sequence[float], places: Sequence[tuple[int, str]]) -> str:
    """Name the slowest rank of a pipeline, and its time against the others'. Pure."""
    slowest = busy.index(max(busy))
    others = [seconds for rank, seconds in enumerate(busy) if rank != slowest] or [max(busy)]
    ratio, (rank, host) = max(busy) / max(statistics.median(others), 1e-9), places[slowest]
    return (
        f"rank {slowest} of the pipeline is slowest, {ratio:.2f} times the median of the others "
        f"(rank {rank}, on {host})"
    )


def moved_words(moves: Moves) -> str:
    """Say which layers go where. Pure."""
    return "; ".join(
        f"layer{'s' * (len(numbers) > 1)} {format_numbers(numbers)} from rank {source} to {target}"
        for (source, target), numbers in moves.items()
    )


def refusal_of(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Say why the layers of this rank cannot move, or None."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            return (
                f"rebalance moves whole parameters, got {name}, of which this rank has a part; "
                f"write a distributed checkpoint and cut the model anew, with a sample"
            )
    held = set(model.parameters())
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := sum(p not in held for p in given):
        return (
            f"rebalance moves the state of an optimizer of pipeline.model alone, got {strange} "
            f"parameters of others; give them an optimizer of their own"
        )
    return None


class Told(NamedTuple):
    """What belongs to a parameter."""

    gradient: torch.Tensor | None
    group: int | None  # of the optimizer, or in none
    state: Any


class Arrived(NamedTuple):
    """A layer that moves."""

    number: int
    name: str
    layer: nn.Module
    parameters: list[Told]  # in their order in the layer


class _Pickler(pickle.Pickler):
    """Writes a mesh by its axes: a layer that knows one has that of its new rank there."""

    def persistent_id(self, told: object) -> tuple[str, ...] | None:
        return told.mesh_dim_names if isinstance(told, DeviceMesh) else None


class _Unpickler(pickle.Unpickler):
    """Reads what the pickler has written, on a rank of another place in the mesh."""

    def __init__(self, given: bytes, mesh: DeviceMesh) -> None:
        super().__init__(io.BytesIO(given))
        self._root = mesh._get_root_mesh()  # noqa: SLF001 - torch has no other name for it

    def persistent_load(self, axes: Any) -> DeviceMesh:
        return self._root[axes]


def packed_layers(
    layers: Layers, moves: Moves, optimizer: Optimizer
) -> tuple[dict[Move, bytes], str | None]:
    """Return what goes to other ranks, and why something cannot go, or None.

    A layer goes with its gradients, the optimizer's state and the number of the group of each
    parameter.
    """
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    group_of = {parameter: number for number, group in groups for parameter in group}
    packed = {}
    for move, numbers in moves.items():
        going = [
            Arrived(number, *layers[number], [
                Told(
                    p.grad if p.grad is None else p.grad.clone(),  # without the bucket it lies in
                    group_of.get(p),
                    optimizer.state.get(p),
                )
                for p in layers[number][1].parameters()
            ])
            for number in numbers
        ]  # fmt: skip
        buffer = io.BytesIO()
        try:
            _Pickler(buffer).dump(going)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            names = ", ".join(one.name for one in going)
            return {}, f"rebalance pickles the layers that move, got {names}: {error}"
        packed[move] = buffer.getvalue()
    return packed, None


def exchanged(
    packed: Mapping[Move, bytes], moves: Moves, group: dist.ProcessGroup | None
) -> list[bytes]:
    """Send what goes to other ranks; return what comes. Collective over the pipeline."""
    rank, taken = dist.get_rank(group), []
    for move in sorted(moves):  # all in one order, so that nobody waits in a circle
        source, target = move
        if rank == source:
            dist.send_object_list([packed[move]], group=group, group_dst=target)
        elif rank == target:
            told: list[Any] = [None]
            dist.recv_object_list(told, group=group, group_src=source)
            taken.append(told[0])
    return taken


def unpacked(taken: Sequence[bytes], mesh: DeviceMesh, device: torch.device) -> list[Arrived]:
    """Read the layers that have come, onto the device of this rank."""
    found = [one for given in taken for one in _Unpickler(given, mesh).load()]
    for arrived in found:
        arrived.layer.to(device)  # which has another number where it comes from
        for parameter, told in zip(arrived.layer.parameters(), arrived.parameters, strict=True):
            parameter.grad = None if told.gradient is None else told.gradient.to(device)
            for key, value in (told.state or {}).items():
                if isinstance(value, torch.Tensor) and value.device.type == device.type:
                    told.state[key] = value.to(device)
    return found


def take_in(
    layers: Layers,
    arrived: Sequence[Arrived],
    optimizer: Optimizer,
    shared: Sequence[Sequence[tuple[int, str]]],
) -> None:
    """Add what has come to ``layers``, where what has gone lacks already, and to the optimizer."""
    before, came = set(layers), dict[nn.Parameter, Told]()
    for number, name, layer, parameters in arrived:
        layers[number] = (name, layer)
        came |= dict(zip(layer.parameters(), parameters, strict=True))
    for places in shared:
        # What was here before, the optimizer knows.
        here = sorted((number not in before, number, name) for number, name in places)
        retied = [(*layers[number], name) for _, number, name in here if number in layers]
        for prefix, layer, name in retied[1:]:
            first = retied[0][1].get_parameter(retied[0][2].removeprefix(f"{retied[0][0]}."))
            path, _, last = name.removeprefix(f"{prefix}.").rpartition(".")
            layer.get_submodule(path).register_parameter(last, first)
    held = {p: None for number in sorted(layers) for p in layers[number][1].parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in {*group["params"]} - {*held}:
            optimizer.state.pop(parameter, None)
        mine = {*group["params"], *(p for p, told in came.items() if told.group == number)}
        group["params"] = [parameter for parameter in held if parameter in mine]
    for parameter in came.keys() & held.keys():
        if came[parameter].state is not None:
            optimizer.state[parameter] = came[parameter].state
