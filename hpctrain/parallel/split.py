"""Selection of modules by name, and division of a chain of layers into pipeline stages."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint


class Chain(nn.Module):
    """Module that applies layers in order; each layer keeps its name from the whole model.

    Args:
        layers: names and modules, in the order in which forward calls the modules.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.fill(layers)

    def fill(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        """Replace all layers of the chain."""
        self._modules.clear()
        self.layers = [layer for _, layer in layers]  # modules in a plain list are not registered
        self._names = [name for name, _ in layers]
        for name, layer in layers:
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(last, layer)

    def forward(self, given: Tensor) -> Tensor:
        """Return the output of the last layer for the input of the first layer."""
        for name, layer in zip(self._names, self.layers, strict=True):
            given = layer(given)
            if not isinstance(given, Tensor):
                raise ConfigError(
                    f"a layer of a pipeline must return one tensor, but {name} returned "
                    f"{type(given).__name__}; return the input of the next layer only, or join "
                    "both layers into one"
                )
        return given


def names_like(pattern: str, names: Iterable[str], *, same_depth: bool = False) -> list[str]:
    """Return the module names that match ``pattern``, in which ``*`` matches any text.

    With ``same_depth``, ``*`` matches within one part of a dotted name only.

    Raises:
        ConfigError: no name matches.
    """
    found = [
        name
        for name in names
        if fnmatchcase(name, pattern)
        and not (same_depth and name.count(".") != pattern.count("."))
    ]
    if not found:
        raise ConfigError(
            f"a name of modules must match a module of the model, but the model has no module "
            f"{pattern}{hint(pattern, names)}"
        )
    return found


def places_of(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that own it, each with its name in the module."""
    places = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, name))
    return places


def matching(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that match ``names``, by name and in this order.

    ``*`` matches within one part of a dotted name only.

    Raises:
        ConfigError: a name matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    chosen = [name for one in names for name in names_like(one, modules, same_depth=True)]
    return {name: modules[name] for name in chosen}


def layers_of(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the layers of a pipeline with their names, selected by ``names`` as in ``matching``.

    Raises:
        ConfigError: a name matches no module, or a parameter of the model is in no layer.
    """
    found = matching(model, names)
    held = {parameter for layer in found.values() for parameter in layer.parameters()}
    lost = [name for name, parameter in model.named_parameters() if parameter not in held]
    if lost:
        raise ConfigError(
            f"every parameter of a pipeline must belong to one of its layers, but no "
            f"layer has {', '.join(lost[:3])}; add the module that contains the parameter to "
            f"layers, in the order of forward"
        )
    return list(found.items())


def seconds_of(layers: Sequence[nn.Module], sample: Tensor, repeats: int = 3) -> list[float]:
    """Return the seconds of forward and backward of each layer on a micro-batch ``sample``.

    Each time is the minimum of ``repeats`` measurements. The gradients of the layers are cleared;
    buffers and random states do not change.
    """
    best = [float("inf")] * len(layers)
    with left_as_they_are(layers, sample.device):
        for _ in range(repeats):
            given = sample
            for number, layer in enumerate(layers):
                given = given.detach().requires_grad_(given.is_floating_point())
                start = time.perf_counter()
                out = layer(given)
                if out.requires_grad:
                    out.sum().backward()
                best[number] = min(best[number], time.perf_counter() - start)
                given = out
    for layer in layers:
        layer.zero_grad()
    return best


@contextmanager
def left_as_they_are(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore the buffers of modules and the random states after the block."""
    held = {id(each): vars(each)["_buffers"] for one in modules for each in one.modules()}
    kept = [(buffers, dict(buffers)) for buffers in held.values()]
    copies = {id(b): b.clone() for _, own in kept for b in own.values() if b is not None}
    for buffers, own in kept:  # copies, since autograd detects in-place changes of the originals
        buffers.update({name: b if b is None else copies[id(b)] for name, b in own.items()})
    kind = device.type
    try:
        with torch.random.fork_rng(
            [] if kind == "cpu" else [device], device_type="cuda" if kind == "cpu" else kind
        ):
            yield
    finally:
        for buffers, own in kept:
            buffers.update(own)


def cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide a chain of layers into stages so that the most expensive stage is cheapest.

    Not collective.

    Args:
        costs: cost of each layer.
        num_stages: number of stages, each with at least one layer.

    Returns:
        For each stage, the range of the indices of its layers.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise ConfigError(
            f"every stage of a pipeline must have a layer, got {len(costs)} layers for "
            f"{num_stages} stages; use fewer stages"
        )
    ends = [0.0, *accumulate(costs)]
    # Dynamic programming. By n: for the first n layers, the smallest cost of the most expensive
    # stage, and the bounds of the stages.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {n: (ends[n], (0, n)) for n in range(1, len(ends))}
    for stage in range(2, num_stages + 1):
        best = {
            number: min(
                (max(best[before][0], ends[number] - ends[before]), (*best[before][1], number))
                for before in range(stage - 1, number)
            )
            for number in range(stage, len(ends))
        }
    return [range(begin, end) for begin, end in pairwise(best[len(costs)][1])]


def shared_between(layers: Sequence[tuple[str, nn.Module]]) -> list[list[tuple[int, str]]]:
    """Return, for each parameter of several layers, the index of each layer and the name there."""
    places: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for number, (prefix, layer) in enumerate(layers):
        for name, parameter in layer.named_parameters(prefix, remove_duplicate=False):
            places.setdefault(parameter, []).append((number, name))
    return [found for found in places.values() if len({number for number, _ in found}) > 1]
