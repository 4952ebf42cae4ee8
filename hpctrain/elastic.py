"""Training that survives failed operations, with Horovod's names: ``hpctrain.elastic``."""

from hpctrain.runtime.elastic.interrupt import HostsUpdatedInterrupt, HostUpdate
from hpctrain.runtime.elastic.run import run
from hpctrain.runtime.elastic.sampler import ElasticSampler
from hpctrain.runtime.elastic.state import ObjectState, State
from hpctrain.runtime.elastic.torch_state import TorchState

__all__ = [
    "ElasticSampler",
    "HostUpdate",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
