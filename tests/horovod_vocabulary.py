"""List the names of Horovod 0.28.1's ``horovod.torch``, with the arguments of its functions.

``test_migrate.py`` compares the list with an installed Horovod, if any.
"""

_REDUCTION = "op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set"
_SCATTER = "op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0"
_SET = "name=None, process_set=global_process_set"

_WITHOUT_ARGUMENTS = """
shutdown is_initialized rank size local_rank local_size cross_rank cross_size
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
ccl_built cuda_built rocm_built stop_timeline
"""

FUNCTIONS = dict.fromkeys(_WITHOUT_ARGUMENTS.split(), "") | {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "allreduce": f"tensor, average=None, name=None, compression=Compression.none, {_REDUCTION}",
    "allreduce_": f"tensor, average=None, name=None, {_REDUCTION}",
    "allreduce_async": f"tensor, average=None, name=None, {_REDUCTION}",
    "allreduce_async_": f"tensor, average=None, name=None, {_REDUCTION}",
    "grouped_allreduce": (
        f"tensors, average=None, name=None, compression=Compression.none, {_REDUCTION}"
    ),
    "grouped_allreduce_": f"tensors, average=None, name=None, {_REDUCTION}",
    "grouped_allreduce_async": f"tensors, average=None, name=None, {_REDUCTION}",
    "grouped_allreduce_async_": f"tensors, average=None, name=None, {_REDUCTION}",
    "sparse_allreduce_async": "tensor, name, op, process_set=global_process_set",
    "reducescatter": f"tensor, name=None, compression=Compression.none, {_SCATTER}",
    "reducescatter_async": f"tensor, name=None, {_SCATTER}",
    "grouped_reducescatter": f"tensors, name=None, compression=Compression.none, {_SCATTER}",
    "grouped_reducescatter_async": f"tensors, name=None, {_SCATTER}",
    "allgather": f"tensor, {_SET}",
    "allgather_async": f"tensor, {_SET}",
    "grouped_allgather": f"tensors, {_SET}",
    "grouped_allgather_async": f"tensors, {_SET}",
    "broadcast": f"tensor, root_rank, {_SET}",
    "broadcast_": f"tensor, root_rank, {_SET}",
    "broadcast_async": f"tensor, root_rank, {_SET}",
    "broadcast_async_": f"tensor, root_rank, {_SET}",
    "alltoall": f"tensor, splits=None, {_SET}",
    "alltoall_async": f"tensor, splits=None, {_SET}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set=global_process_set",
    "broadcast_object": f"obj, root_rank=0, {_SET}",
    "allgather_object": "obj, name=None",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, "
        "groups=None, sparse_as_dense=False, process_set=global_process_set"
    ),
    "SyncBatchNorm": (
        "num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True"
    ),
    "elastic.run": "func",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
}
"""Functions and classes, and what they take."""

METHODS = {
    "ProcessSet": {"size": "", "rank": "", "included": ""},
    "elastic.TorchState": {
        "save": "",
        "restore": "",
        "sync": "",
        "reset": "",
        "commit": "",
        "on_reset": "",
        "check_host_updates": "",
        "on_hosts_updated": "timestamp, update_res",
        "register_reset_callbacks": "callbacks",
    },
    "elastic.ElasticSampler": {
        "set_epoch": "epoch",
        "record_batch": "batch_idx, batch_size",
        "state_dict": "",
        "load_state_dict": "state_dict",
        "reset": "",
    },
}
"""What objects can do, and what that takes."""

_OTHERS = """
Adasum Average Compression Compression.fp16 Compression.none HorovodInternalError Max Min
Product ProcessSet.included ProcessSet.mpi_comm ProcessSet.process_set_id ProcessSet.rank
ProcessSet.ranks ProcessSet.size Sum elastic global_process_set
"""
OTHERS = tuple(_OTHERS.split())  # all other public names
