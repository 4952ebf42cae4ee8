"""Training that survives failed operations, with Horovod's names: ``hpctrain.elastic``."""

from hpctrain.horovod.elastic.run import run
from hpctrain.horovod.elastic.sampler import ElasticSampler
from hpctrain.horovod.elastic.state import (
    HostsUpdatedInterrupt,
    HostUpdate,
    ObjectState,
    State,
    TorchState,
)

__all__ = [
    "ElasticSampler",
    "HostUpdate",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
