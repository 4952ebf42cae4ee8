"""Launcher of a study on virtual hosts.

    python -m tests.studies.on_cluster NODES RANKS [RATE] -- COMMAND

Creates a cluster of NODES nodes, runs the command on RANKS ranks, and removes the cluster. RATE
is the bandwidth of the links, such as ``200mbit``.
"""

import os
import sys

from tests.cluster.vcluster import VirtualCluster

LIMIT_S = 600.0


def main(sizes: list[str], command: list[str]) -> int:
    """Run the command; return its exit code."""
    nodes, ranks = map(int, sizes[:2])
    each, more = divmod(ranks, nodes)
    ranks_per_node = [each + (node < more) for node in range(nodes)]
    ours = ("HPCTRAIN_", "OMP_", "PYTHON")
    variables = {name: text for name, text in os.environ.items() if name.startswith(ours)}
    with VirtualCluster(nodes=nodes, rate=(*sizes[2:], "1gbit")[0]) as cluster:
        done = cluster.run(
            command, ranks_per_node=ranks_per_node, env=variables, timeout_s=LIMIT_S
        )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    at = sys.argv.index("--")
    sys.exit(main(sys.argv[1:at], sys.argv[at + 1 :]))
