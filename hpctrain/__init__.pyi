from hpctrain import elastic as elastic
from hpctrain.async_sgd.downpour import AsyncSGD as AsyncSGD
from hpctrain.async_sgd.downpour import Downpour as Downpour
from hpctrain.async_sgd.hogwild import Hogwild as Hogwild
from hpctrain.async_sgd.sharded_embedding import ShardedEmbedding as ShardedEmbedding
from hpctrain.async_sgd.stale_synchronous import StaleSynchronous as StaleSynchronous
from hpctrain.async_sgd.staleness import stable_rate as stable_rate
from hpctrain.cluster.env import STOPPED as STOPPED
from hpctrain.cluster.step_records import record as record
from hpctrain.collectives.allgather import allgather as allgather
from hpctrain.collectives.allgather import allgather_async as allgather_async
from hpctrain.collectives.allgather import grouped_allgather as grouped_allgather
from hpctrain.collectives.allgather import grouped_allgather_async as grouped_allgather_async
from hpctrain.collectives.allreduce import allreduce as allreduce
from hpctrain.collectives.allreduce import allreduce_ as allreduce_
from hpctrain.collectives.allreduce import allreduce_async as allreduce_async
from hpctrain.collectives.allreduce import allreduce_async_ as allreduce_async_
from hpctrain.collectives.allreduce import grouped_allreduce as grouped_allreduce
from hpctrain.collectives.allreduce import grouped_allreduce_ as grouped_allreduce_
from hpctrain.collectives.allreduce import grouped_allreduce_async as grouped_allreduce_async
from hpctrain.collectives.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from hpctrain.collectives.alltoall import alltoall as alltoall
from hpctrain.collectives.alltoall import alltoall_async as alltoall_async
from hpctrain.collectives.barrier import barrier as barrier
from hpctrain.collectives.barrier import join as join
from hpctrain.collectives.broadcast import broadcast as broadcast
from hpctrain.collectives.broadcast import broadcast_ as broadcast_
from hpctrain.collectives.broadcast import broadcast_async as broadcast_async
from hpctrain.collectives.broadcast import broadcast_async_ as broadcast_async_
from hpctrain.collectives.objects import allgather_object as allgather_object
from hpctrain.collectives.objects import broadcast_object as broadcast_object
from hpctrain.collectives.operation import poll as poll
from hpctrain.collectives.operation import synchronize as synchronize
from hpctrain.collectives.parameters import broadcast_optimizer_state as broadcast_optimizer_state
from hpctrain.collectives.parameters import broadcast_parameters as broadcast_parameters
from hpctrain.collectives.reducescatter import grouped_reducescatter as grouped_reducescatter
from hpctrain.collectives.reducescatter import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from hpctrain.collectives.reducescatter import reducescatter as reducescatter
from hpctrain.collectives.reducescatter import reducescatter_async as reducescatter_async
from hpctrain.collectives.sparse import sparse_allreduce_async as sparse_allreduce_async
from hpctrain.compress.half import Compression as Compression
from hpctrain.core.errors import CheckpointError as CheckpointError
from hpctrain.core.errors import CommError as CommError
from hpctrain.core.errors import ConfigError as ConfigError
from hpctrain.core.errors import CorruptError as CorruptError
from hpctrain.core.errors import DataError as DataError
from hpctrain.core.errors import DuplicateNameError as DuplicateNameError
from hpctrain.core.errors import HorovodInternalError as HorovodInternalError
from hpctrain.core.errors import HpctrainDeprecationWarning as HpctrainDeprecationWarning
from hpctrain.core.errors import HpctrainError as HpctrainError
from hpctrain.core.errors import LaunchError as LaunchError
from hpctrain.core.errors import MismatchError as MismatchError
from hpctrain.core.errors import NodeMemoryError as NodeMemoryError
from hpctrain.core.errors import NotFiniteError as NotFiniteError
from hpctrain.core.errors import NotInitializedError as NotInitializedError
from hpctrain.core.errors import OperationMismatchError as OperationMismatchError
from hpctrain.core.errors import RankLostError as RankLostError
from hpctrain.core.errors import ReplicaError as ReplicaError
from hpctrain.core.errors import TopologyError as TopologyError
from hpctrain.data.distributed_loader import shard_data as shard_data
from hpctrain.gradients.batch_norm import SyncBatchNorm as SyncBatchNorm
from hpctrain.gradients.noise_watch import watch_noise as watch_noise
from hpctrain.gradients.optimizer import DistributedOptimizer as DistributedOptimizer
from hpctrain.gradients.replica_check import check_replicas as check_replicas
from hpctrain.local_sgd.diloco import DiLoCo as DiLoCo
from hpctrain.local_sgd.local_sgd import HierarchicalLocalSGD as HierarchicalLocalSGD
from hpctrain.local_sgd.local_sgd import LocalSGD as LocalSGD
from hpctrain.local_sgd.local_sgd import PostLocalSGD as PostLocalSGD
from hpctrain.local_sgd.staged_sgd import StagedSGD as StagedSGD
from hpctrain.negotiation.request import Adasum as Adasum
from hpctrain.negotiation.request import Average as Average
from hpctrain.negotiation.request import Max as Max
from hpctrain.negotiation.request import Min as Min
from hpctrain.negotiation.request import Product as Product
from hpctrain.negotiation.request import Sum as Sum
from hpctrain.runtime.abilities import ccl_built as ccl_built
from hpctrain.runtime.abilities import cuda_built as cuda_built
from hpctrain.runtime.abilities import ddl_built as ddl_built
from hpctrain.runtime.abilities import gloo_built as gloo_built
from hpctrain.runtime.abilities import gloo_enabled as gloo_enabled
from hpctrain.runtime.abilities import mpi_built as mpi_built
from hpctrain.runtime.abilities import mpi_enabled as mpi_enabled
from hpctrain.runtime.abilities import mpi_threads_supported as mpi_threads_supported
from hpctrain.runtime.abilities import nccl_built as nccl_built
from hpctrain.runtime.abilities import rocm_built as rocm_built
from hpctrain.runtime.function_job import Job as Job
from hpctrain.runtime.function_job import Resources as Resources
from hpctrain.runtime.function_job import submit as submit
from hpctrain.runtime.initialization import init as init
from hpctrain.runtime.initialization import shutdown as shutdown
from hpctrain.runtime.process_sets import ProcessSet as ProcessSet
from hpctrain.runtime.process_sets import add_process_set as add_process_set
from hpctrain.runtime.process_sets import global_process_set as global_process_set
from hpctrain.runtime.process_sets import remove_process_set as remove_process_set
from hpctrain.runtime.run import RankError as RankError
from hpctrain.runtime.run import run as run
from hpctrain.runtime.world import cross_rank as cross_rank
from hpctrain.runtime.world import cross_size as cross_size
from hpctrain.runtime.world import current as current
from hpctrain.runtime.world import is_homogeneous as is_homogeneous
from hpctrain.runtime.world import is_initialized as is_initialized
from hpctrain.runtime.world import local_rank as local_rank
from hpctrain.runtime.world import local_size as local_size
from hpctrain.runtime.world import rank as rank
from hpctrain.runtime.world import should_stop as should_stop
from hpctrain.runtime.world import size as size
from hpctrain.runtime.world import start_timeline as start_timeline
from hpctrain.runtime.world import stop_timeline as stop_timeline

# The spelling of torch.distributed and of ``Communicator``, next to Horovod's.
all_gather = allgather
all_gather_async = allgather_async
grouped_all_gather = grouped_allgather
grouped_all_gather_async = grouped_allgather_async
grouped_reduce_scatter = grouped_reducescatter
grouped_reduce_scatter_async = grouped_reducescatter_async
reduce_scatter = reducescatter
reduce_scatter_async = reducescatter_async

__all__: list[str]
__version__: str
