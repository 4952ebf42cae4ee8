"""The store of checkpoints on disk: a directory of one file per rank and a manifest.

``DIRECTORY/rank-00000.safetensors`` and so on hold the tensors, ``DIRECTORY/manifest.json`` says
what is where. A checkpoint is there when its manifest is, which is written last.
"""

from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.format.shard import Piece, Shard
from hpctrain.checkpoint.loading import Loaded, Privates, check, load
from hpctrain.checkpoint.saving import Saved, save

__all__ = [
    "CheckpointManifest",
    "Loaded",
    "Piece",
    "Privates",
    "Saved",
    "Shard",
    "check",
    "load",
    "save",
]
