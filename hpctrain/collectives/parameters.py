"""The parameters of a model, the same on every rank."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hpctrain.collectives.objects import allgather_object, broadcast_tensors_
from hpctrain.comm.agreement import by_rank
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int = 0,
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Replace every tensor by that of ``root_rank``. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``;
            entries that are no tensors must not be there. Those of a mapping find each other by
            their names, others by their places.
        root_rank: the rank of the world whose values all ranks of the set take.
        process_set: who takes part.

    Raises:
        ConfigError: an entry is not a dense tensor, or a rank is not in the set.
        MismatchError: the ranks do not have the same tensors; on every rank.
    """
    named = _named(params)
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"broadcast_parameters takes tensors, {name} is a {type(tensor).__name__}; "
                f"send it by broadcast_object"
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(f"broadcast_parameters takes dense tensors, {name} is sparse")
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    _require_equal(lines, process_set)
    tensors = [tensor for _, tensor in named]
    broadcast_tensors_(tensors, root_rank, "parameters", process_set)


def _named(params: object) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ConfigError(
            f"broadcast_parameters takes a state_dict, named_parameters() or parameters(), got a "
            f"{type(params).__name__}"
        )
    return [
        entry if isinstance(entry, tuple) else (f"parameter {number}", entry)
        for number, entry in enumerate(params)
    ]


def _require_equal(lines: Sequence[str], process_set: ProcessSet | None) -> None:
    """Return if every rank gives the same lines; send a digest while all is well."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(allgather_object(digest, "parameters.digest", process_set))) == 1:
        return
    columns = allgather_object(list(lines), "parameters.lines", process_set)
    rows = zip_longest(*columns, fillvalue="none")
    number, seen = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
    raise MismatchError(
        f"parameters must be the same on every rank, number {number} differs: {by_rank(seen)}; "
        f"build the same model on every rank"
    )
