from hpctrain.parallel.context_attention import context_attention as context_attention
from hpctrain.parallel.mesh import build_mesh as build_mesh
from hpctrain.parallel.mesh import gradient_mesh as gradient_mesh
from hpctrain.parallel.mesh import hybrid_mesh as hybrid_mesh
from hpctrain.parallel.mesh import placement as placement
from hpctrain.parallel.pipeline import Pipeline as Pipeline
from hpctrain.parallel.recomputation import recompute as recompute
from hpctrain.parallel.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from hpctrain.parallel.sharding import shard as shard
from hpctrain.parallel.tensor import tensor_parallel as tensor_parallel

__all__: list[str]
