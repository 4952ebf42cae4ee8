"""Training data copied to each node before the first step, as ``[data] stage`` says."""

import numpy as np

from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.data.loader import Loader
from hpctrain.data.loading.steps import share
from hpctrain.data.order.stream_partition import lane_blocks, rank_lanes
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Indices
from hpctrain.data.staging import stage
from hpctrain.train.agreed import agreed


def stage_for(loader: Loader, to: str, comm: Communicator, topology: Topology) -> None:
    """Let ``loader`` read from a copy that the ranks of each node share. Collective.

    Args:
        loader: over a ``ShardedDataset``.
        to: a folder, or ``auto``.
        comm: all ranks.
        topology: of the same ranks.

    Raises:
        ConfigError: what the loader reads is no data set on disk.
        MismatchError: the folder cannot be used, or the data is damaged; on all ranks.
    """
    dataset = loader.dataset
    if not isinstance(dataset, ShardedDataset):
        raise ConfigError(
            f"data.stage copies a ShardedDataset, got {type(dataset).__name__}; "
            f"stage its parts in data.target, or leave data.stage out"
        )
    groups = [comm.group(ranks) for ranks in topology.nodes]
    node = groups[topology.node]
    assert node is not None
    with agreed(comm):
        loader.dataset = stage(dataset, node, to, blocks_of_node(loader, topology))
    node.close()


def blocks_of_node(loader: Loader, topology: Topology) -> Indices | None:
    """Return the blocks of the data set that this node's ranks read in every epoch.

    None where an order has no lanes: there any rank may read any sample.
    """
    shape = loader.window_shape
    if shape is None:
        return None
    num_samples, block_size = len(loader.dataset), loader.dataset.block_size
    num_parts = loader.micro_shards or topology.size
    parts = [share(0, num_parts, rank, topology.size) for rank in topology.node_ranks]
    lanes = {
        lane
        for own in parts
        for lane in rank_lanes(own.start, own.stop, size=num_parts, lanes=shape.lanes)
    }
    blocks = [
        lane_blocks(num_samples, loader.seed, lane, block=shape.block, lanes=shape.lanes)
        for lane in sorted(lanes)
    ]
    per_block = shape.block // block_size
    finest = np.concatenate(blocks)[:, None] * per_block + np.arange(per_block)
    return finest[finest < -(-num_samples // block_size)]
