"""Rows and state of a table in checkpoints: which part each rank has, and what it takes back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rows import RowShards
from hpctrain.async_sgd.sharded_embedding_rules import learning_rate
from hpctrain.checkpoint.format.shard import Piece, Shard
from hpctrain.core.errors import CheckpointError

_KEYS = {"table", "steps", "lr", "tensors"}


def tensors_of(shards: RowShards) -> dict[str, Tensor]:
    """Return what this rank owns, by name."""
    num = shards.stop - shards.start
    tensors = {"rows": shards.own, "is_stored": torch.from_numpy(shards.is_stored)}
    return {name: values[:num] for name, values in {**tensors, **shards.state}.items()}


def shards_of(shards: RowShards) -> dict[str, Shard]:
    """Return which parts these are."""
    found = {}
    for name, values in tensors_of(shards).items():
        rest = tuple(values.shape[1:])
        start = (shards.start, *(0 for _ in rest))
        found[name] = Shard((shards.num_rows, *rest), start, tuple(values.shape))
    return found


def pieces_of(shards: RowShards) -> dict[str, Piece]:
    """Return both."""
    own = shards_of(shards)
    return {name: Piece(values, own[name]) for name, values in tensors_of(shards).items()}


def check_state(shards: RowShards, what: str, state: Any) -> None:
    """Return if a state is of the table ``what``. Raises ``CheckpointError``: it is not."""
    if not isinstance(state, Mapping) or not {*state} >= _KEYS:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"a table goes on with what its sharded_state() has returned, with {sorted(_KEYS)}, "
            f"got {got}; name the key of the checkpoint at which that was saved"
        )
    own, pieces, tensors = shards_of(shards), state["tensors"], tensors_of(shards)
    if {*pieces} != {*own}:
        raise CheckpointError(
            f"a table goes on with the state of its own optimizer, {sorted(own)}, got "
            f"{sorted(pieces)}; make it as it was saved"
        )
    if state["table"] != what:  # rows that were not stepped yet are not in the state
        raise CheckpointError(
            f"a table goes on with a state of its own, this is one of {what}, and the state is of "
            f"one of {state['table']}; make it as it was saved"
        )
    learning_rate(state["lr"])
    for name, shard in own.items():
        found = pieces[name]
        if not isinstance(found, Piece) or found.shard != shard:
            got = str(found.shard) if isinstance(found, Piece) else type(found).__name__
            raise CheckpointError(
                f"{name} of a table is read in parts, by load(into=table.wanted(path)), of which "
                f"this rank's is {shard}, got {got}"
            )
        if found.tensor.dtype is not tensors[name].dtype:
            raise CheckpointError(
                f"{name} of this table is {tensors[name].dtype}, got {found.tensor.dtype}; make "
                f"it as it was saved"
            )


def restore(shards: RowShards, pieces: Mapping[str, Piece]) -> None:
    """Take back what is stored; everything else is as in a new table. Not collective."""
    is_stored = pieces["is_stored"].tensor.bool()
    is_over = torch.from_numpy(shards.is_stored[: len(is_stored)]).bool() & ~is_stored
    for name, values in tensors_of(shards).items():
        # What was never stored is not touched: its memory is not taken.
        values[is_over] = 0
        values[is_stored] = pieces[name].tensor[is_stored]
