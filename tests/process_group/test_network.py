"""Each node receives every byte once, measured between virtual nodes."""

import json
from pathlib import Path

import pytest

from tests.cluster.vcluster import VirtualCluster

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.launches,
    pytest.mark.limit(120),
    pytest.mark.requires("cluster"),
]

NUMEL = 1 << 20  # float32 values, 4 MiB
MORE = 1.05  # allowance for headers and control messages
LEAST = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
"""How often a node has to receive the part of the message that it lacks, by operation."""

PROGRAM = f"""
import json
import time

import torch
import torch.distributed as dist

import hpctrain
from tests.comm.network_job import sent_bytes
from tests.process_group.conftest import all_gather_single, reduce_scatter_single

dist.init_process_group("hpctrain")
rank, size = dist.get_rank(), dist.get_world_size()
whole, part = torch.ones({NUMEL}), torch.ones({NUMEL} // size)
calls = dict(
    all_reduce=lambda: dist.all_reduce(whole),
    all_gather=lambda: all_gather_single(whole, part),
    reduce_scatter=lambda: reduce_scatter_single(part, whole),
    broadcast=lambda: dist.broadcast(whole, 0),
)
found = dict()
for name, call in calls.items():
    call()
    dist.barrier()
    time.sleep(0.2)
    before = sent_bytes()
    dist.barrier()
    call()
    dist.barrier()
    time.sleep(0.2)
    found[name] = sent_bytes() - before
every = [None] * size
dist.all_gather_object(every, found)
if rank == 0:
    print(json.dumps(every))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2)])
def test_nodes_send_no_more_bytes_than_other_nodes_lack(tmp_path: Path, nodes: int, ranks: int):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    with VirtualCluster(nodes=nodes) as cluster:
        done = cluster.run(
            ["python", str(program)], ranks_per_node=[ranks] * nodes, env={"PYTHONPATH": root}
        )
    assert done.returncode == 0, done.stdout + done.stderr
    every = json.loads(done.stdout.splitlines()[-1])
    for name, times in LEAST.items():
        most = max(found[name] for found in every)
        total = sum(found[name] for found in every) / ranks
        lacking = times * (nodes - 1) * NUMEL * 4  # sum over all nodes
        assert total <= MORE * lacking, name
        if name != "broadcast":  # a broadcast is a tree, whose root sends more
            assert most <= MORE * lacking / nodes, name
