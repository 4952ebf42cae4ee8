from hpctrain.checkpoint.format.shard import Shard as Shard
from hpctrain.checkpoint.format.shard import TensorPiece as TensorPiece
from hpctrain.checkpoint.format.state_hash import state_hash as state_hash
from hpctrain.checkpoint.loading import Loaded as Loaded
from hpctrain.checkpoint.loading import load as load
from hpctrain.checkpoint.manager import Manager as Manager
from hpctrain.checkpoint.manager import Stateful as Stateful
from hpctrain.checkpoint.saving import Saved as Saved
from hpctrain.checkpoint.saving import save as save

__all__: list[str]
