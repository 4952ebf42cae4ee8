"""Check that codecs report the number of bytes that leave a node by its network adapter."""

import json

import pytest

from tests.cluster.vcluster import VirtualCluster

CODECS = ("none", "bf16", "int8", "one_bit", "sign", "top_k", "power_sgd")


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.requires("cluster")
@pytest.mark.limit(120)
def test_bytes_that_leave_a_node_equal_those_of_the_codec():
    with VirtualCluster(nodes=2) as cluster:
        words = ["python", "-m", "tests.compress.card_job", *CODECS]
        done = cluster.run(words, ranks_per_node=(2, 2))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in CODECS:
        # In a sum over two nodes, each half leaves a node once as input and once as the sum.
        sent, claimed = found[name]
        assert max(sent) == pytest.approx(claimed, rel=0.03), name
