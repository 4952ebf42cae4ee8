"""Train PyTorch models across the nodes of a supercomputer, under plain ``mpirun`` or ``srun``.

Importing this package loads neither torch nor MPI: every name below is loaded at first use. With
``import hpctrain as hvd`` a script written for ``horovod.torch`` runs as it is.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hpctrain import elastic
    from hpctrain.collectives.allgather import (
        allgather,
        allgather_async,
        grouped_allgather,
        grouped_allgather_async,
    )
    from hpctrain.collectives.allreduce import (
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
    )
    from hpctrain.collectives.alltoall import alltoall, alltoall_async
    from hpctrain.collectives.barrier import barrier, join
    from hpctrain.collectives.broadcast import (
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
    )
    from hpctrain.collectives.objects import allgather_object, broadcast_object
    from hpctrain.collectives.operation import poll, synchronize
    from hpctrain.collectives.parameters import broadcast_optimizer_state, broadcast_parameters
    from hpctrain.collectives.reducescatter import (
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from hpctrain.collectives.sparse import sparse_allreduce_async
    from hpctrain.compress.half import Compression
    from hpctrain.core.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        CorruptError,
        DataError,
        DuplicateNameError,
        HorovodInternalError,
        HpctrainError,
        LaunchError,
        MismatchError,
        NodeMemoryError,
        NotFiniteError,
        NotInitializedError,
        OperationMismatchError,
        RankLostError,
        ReplicaError,
        TopologyError,
    )
    from hpctrain.data.rank_share import shard
    from hpctrain.gradients.batch_norm import SyncBatchNorm
    from hpctrain.gradients.optimizer import DistributedOptimizer
    from hpctrain.gradients.replica_check import check_replicas
    from hpctrain.local_sgd.diloco import DiLoCo
    from hpctrain.local_sgd.hierarchical_local_sgd import HierarchicalLocalSGD
    from hpctrain.local_sgd.local_sgd import LocalSGD
    from hpctrain.local_sgd.post_local_sgd import PostLocalSGD
    from hpctrain.local_sgd.staged_sgd import StagedSGD
    from hpctrain.negotiation.request import Adasum, Average, Max, Min, Product, Sum
    from hpctrain.runtime.built import (
        ccl_built,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
    )
    from hpctrain.runtime.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        remove_process_set,
    )
    from hpctrain.runtime.run import run
    from hpctrain.runtime.world import (
        cross_rank,
        cross_size,
        current,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
        start_timeline,
        stop_timeline,
    )

_HOME = {
    "hpctrain.compress.half": ("Compression",),
    "hpctrain.data.rank_share": ("shard",),
    "": ("elastic",),
    "hpctrain.core.errors": (
        "CheckpointError",
        "CommError",
        "ConfigError",
        "CorruptError",
        "DataError",
        "DuplicateNameError",
        "HorovodInternalError",
        "HpctrainError",
        "LaunchError",
        "MismatchError",
        "NodeMemoryError",
        "NotFiniteError",
        "NotInitializedError",
        "OperationMismatchError",
        "RankLostError",
        "ReplicaError",
        "TopologyError",
    ),
    "hpctrain.runtime.built": (
        "ccl_built",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
    ),
    "hpctrain.negotiation.request": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
    "hpctrain.collectives.objects": ("allgather_object", "broadcast_object"),
    "hpctrain.collectives.allgather": (
        "allgather",
        "allgather_async",
        "grouped_allgather",
        "grouped_allgather_async",
    ),
    "hpctrain.collectives.allreduce": (
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_allreduce_async",
        "grouped_allreduce_async_",
    ),
    "hpctrain.collectives.alltoall": ("alltoall", "alltoall_async"),
    "hpctrain.collectives.barrier": ("barrier", "join"),
    "hpctrain.collectives.broadcast": (
        "broadcast",
        "broadcast_",
        "broadcast_async",
        "broadcast_async_",
    ),
    "hpctrain.collectives.operation": ("poll", "synchronize"),
    "hpctrain.collectives.reducescatter": (
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "reducescatter",
        "reducescatter_async",
    ),
    "hpctrain.collectives.sparse": ("sparse_allreduce_async",),
    "hpctrain.collectives.parameters": ("broadcast_optimizer_state", "broadcast_parameters"),
    "hpctrain.runtime.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ),
    "hpctrain.runtime.run": ("run",),
    "hpctrain.runtime.world": (
        "cross_rank",
        "cross_size",
        "current",
        "init",
        "is_homogeneous",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
        "start_timeline",
        "stop_timeline",
    ),
    "hpctrain.gradients.batch_norm": ("SyncBatchNorm",),
    "hpctrain.local_sgd.diloco": ("DiLoCo",),
    "hpctrain.local_sgd.hierarchical_local_sgd": ("HierarchicalLocalSGD",),
    "hpctrain.local_sgd.local_sgd": ("LocalSGD",),
    "hpctrain.gradients.optimizer": ("DistributedOptimizer",),
    "hpctrain.local_sgd.post_local_sgd": ("PostLocalSGD",),
    "hpctrain.gradients.replica_check": ("check_replicas",),
    "hpctrain.local_sgd.staged_sgd": ("StagedSGD",),
}
__all__ = [
    "Adasum",
    "Average",
    "CheckpointError",
    "CommError",
    "Compression",
    "ConfigError",
    "CorruptError",
    "DataError",
    "DiLoCo",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HierarchicalLocalSGD",
    "HorovodInternalError",
    "HpctrainError",
    "LaunchError",
    "LocalSGD",
    "Max",
    "Min",
    "MismatchError",
    "NodeMemoryError",
    "NotFiniteError",
    "NotInitializedError",
    "OperationMismatchError",
    "PostLocalSGD",
    "ProcessSet",
    "Product",
    "RankLostError",
    "ReplicaError",
    "StagedSGD",
    "Sum",
    "SyncBatchNorm",
    "TopologyError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_replicas",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "current",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shard",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

__getattr__, __dir__ = exports(__name__, _HOME)
