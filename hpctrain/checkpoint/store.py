"""The store of checkpoints on disk: a directory of one file per rank and a manifest.

``DIRECTORY/rank-00000.safetensors`` and so on hold the tensors, ``DIRECTORY/manifest.json`` says
what is where. A checkpoint is there when its manifest is, which is written last.
"""

from hpctrain.checkpoint.loading import Loaded, Privates, check, load
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.saving import Saved, save
from hpctrain.checkpoint.shard import Piece, Shard

__all__ = ["Loaded", "Manifest", "Piece", "Privates", "Saved", "Shard", "check", "load", "save"]
