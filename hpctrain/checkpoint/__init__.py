"""Checkpoints that are whole or absent, of any number of ranks.

Every name is loaded at its first use.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import exports

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.shard import Piece, Shard
    from hpctrain.checkpoint.format.state_hash import state_hash
    from hpctrain.checkpoint.loading import Loaded, load
    from hpctrain.checkpoint.manager import Manager, Stateful
    from hpctrain.checkpoint.saving import Saved, save

_HOME = {
    "hpctrain.checkpoint.format.shard": ("Piece", "Shard"),
    "hpctrain.checkpoint.format.state_hash": ("state_hash",),
    "hpctrain.checkpoint.loading": ("Loaded", "load"),
    "hpctrain.checkpoint.manager": ("Manager", "Stateful"),
    "hpctrain.checkpoint.saving": ("Saved", "save"),
}

__all__ = [
    "Loaded",
    "Manager",
    "Piece",
    "Saved",
    "Shard",
    "Stateful",
    "load",
    "save",
    "state_hash",
]

__getattr__, __dir__ = exports(__name__, _HOME)
