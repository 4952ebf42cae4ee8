"""State of a divided model: pieces of tensors, with the names of an undivided model."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpctrain.checkpoint.format.manifest import Record
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_tree import component
from hpctrain.checkpoint.format.tensor_file import DTYPES
from hpctrain.core.errors import CheckpointError
from hpctrain.parallel.dtensor import local
from hpctrain.parallel.mesh_agreement import gathered
from hpctrain.train.model import misfits

_Place = tuple[str | int, ...]
"""Keys from the root of a state to a leaf."""


class DividedState:
    """Weights and optimizer state of this rank, named as in the whole model.

    Checkpoints do not depend on the layout: a run with any other layout, or without
    ``[parallel]``, can continue from them. A rank never has more than its own part in memory.

    Args:
        model: whole model, before it is divided.
        optimizer: optimizer of the whole model.
        stages: mesh axis of the pipeline stages.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, stages: DeviceMesh) -> None:
        self._stages = stages
        first = {id(p): name for name, p in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        self._owner = {name: first[id(p)] for name, p in named}  # tied weights have one owner
        self._groups = [[first[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        self._numbers = {name: i for i, name in enumerate(chain(*self._groups))}
        self._whole = {name: v.to("meta") for name, v in model.state_dict().items()}
        self._parameters: dict[int, nn.Parameter] = {}

    def part_of(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return an optimizer for ``model``, this rank's part of the whole model. Local.

        It has the parameter groups of ``optimizer``, without parameters of other ranks.
        """
        here = {self._owner[name]: p for name, p in model.named_parameters()}
        groups = [
            {**group, "params": [here[name] for name in names if name in here]}
            for group, names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        kind: Any = type(optimizer)
        made: Optimizer = kind(groups)
        return made

    def keep(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register this rank's model and optimizer, after all tensors were divided. Local."""
        here = {self._owner[name]: p for name, p in model.named_parameters()}
        self._parameters = {self._numbers[n]: p for n, p in here.items() if n in self._numbers}
        self._model, self._optimizer = model, optimizer

    def state(self) -> dict[str, Any]:
        """Return a tree with the states ``model`` and ``optimizer``. Collective.

        The tree has all tensors of the whole model; each tensor is this rank's piece, possibly
        empty.
        """
        here = dict(self._leaves())
        descriptions = {place: _description(leaf) for place, leaf in here.items()}
        found = gathered(descriptions, self._stages)
        state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
        for place, leaf in chain.from_iterable(each.items() for each in found):
            *path, last = place
            into: Any = state
            for key in path:
                into = into.setdefault(key, {})
            into.setdefault(last, here[place] if place in here else _absent(leaf))
        state["model"] = {name: state["model"][name] for name in self._whole}
        state["optimizer"]["param_groups"] = [
            {**group, "params": [self._numbers[name] for name in names]}
            for group, names in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        return state

    def _leaves(self) -> Iterator[tuple[_Place, Any]]:
        """Yield ``(keys from the root, leaf)`` for each leaf of this rank's state."""
        for name, value in self._model.state_dict().items():
            yield ("model", name), _leaf(value)
        for number, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield ("optimizer", "state", number, key), _leaf(value)

    def wanted(self, tensors: Mapping[str, Record]) -> dict[str, Shard]:
        """Return, for each tensor in a checkpoint, the shard that this rank loads. Local.

        Args:
            tensors: records of the tensors in the checkpoint, by path.

        Raises:
            CheckpointError: the tensors of model and checkpoint differ in name, shape or dtype.
        """
        want = {f"model/{component(name)}": value for name, value in self._whole.items()}
        have = {
            path: torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
            for path, record in tensors.items()
            if path.startswith("model/")
        }
        if lines := misfits(have, want):
            raise CheckpointError(
                f"tensors of model and checkpoint must have the same names, shapes and dtypes, "
                f"but {len(lines)} {'tensors differ' if len(lines) != 1 else 'tensor differs'}; "
                f"build the model that was saved:\n  " + "\n  ".join(lines)
            )
        here = {
            f"model/{component(name)}": _shard(value)
            for name, value in self._model.state_dict().items()
        }
        shards = {number: _shard(parameter) for number, parameter in self._parameters.items()}
        found = {}
        for path, record in tensors.items():
            part, _, rest = path.partition("/")
            if record.shape and part in ("model", "optimizer", "ema"):
                shard = here.get(path)
                if part == "optimizer":
                    shard = shards.get(int(rest.split("/")[1]))
                found[path] = shard or _empty_shard(record.shape)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, which has the shards that ``wanted`` has selected. Local.

        The run that saved the state may have another layout.
        """
        for name, value in self._model.state_dict().items():
            local(value).copy_(_tensor(state["model"][name]))
        saved = state["optimizer"]
        groups = zip(self._optimizer.param_groups, saved["param_groups"], strict=True)
        for group, before in groups:
            group.update({key: value for key, value in before.items() if key != "params"})
        for number, parameter in self._parameters.items():
            before = saved["state"].get(number, {})
            self._optimizer.state[parameter] = {k: _like(v, parameter) for k, v in before.items()}


def _shard(tensor: Tensor) -> Shard:
    if not isinstance(tensor, DTensor):
        return Shard.whole(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # method that torch.distributed.checkpoint uses
    return Shard(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))


def _leaf(value: Any) -> Any:
    """Return this rank's part of a tensor as a ``TensorPiece``; return scalars unchanged."""
    if not isinstance(value, Tensor):
        return value
    return TensorPiece(local(value), _shard(value)) if value.dim() else local(value)


def _description(leaf: Any) -> Any:
    """Return the global shape and the dtype of a tensor piece; return other leaves unchanged."""
    return (leaf.shard.global_shape, leaf.tensor.dtype) if isinstance(leaf, TensorPiece) else leaf


def _absent(description: Any) -> Any:
    """Return an empty piece for the description of a tensor; return other values unchanged.

    Used for leaves of other pipeline stages, which this rank does not have.
    """
    if not isinstance(description, tuple):
        return description
    shape, dtype = description
    empty = _empty_shard(shape)
    return TensorPiece(torch.empty(empty.shape, dtype=dtype), empty)


def _empty_shard(shape: tuple[int, ...]) -> Shard:
    return Shard(shape, (0,) * len(shape), (0, *shape[1:]))


def _tensor(leaf: Any) -> Tensor:
    found: Tensor = leaf.tensor if isinstance(leaf, TensorPiece) else leaf
    return found


def _like(value: Any, parameter: Tensor) -> Any:
    """Return a copy of a loaded optimizer state value, divided and placed like ``parameter``."""
    if not isinstance(value, TensorPiece):
        return value.clone() if isinstance(value, Tensor) else value
    here = value.tensor.to(parameter.device, copy=True)
    if not isinstance(parameter, DTensor):
        return here
    return DTensor.from_local(
        here,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
