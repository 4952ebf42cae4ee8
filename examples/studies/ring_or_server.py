"""Time of a ring and of parameter servers by the number of nodes.

    python examples/studies/ring_or_server.py

All numbers are predicted: 100 MB of gradients over links of 10 Gbit/s and 20 us, with one server,
four servers, a server on every node, a ring and two trees, and the lower bound of 2 (K - 1) / K of
the message in log2 K rounds. A server first receives and then sends, without overlap.
"""

from hpctrain.cost import AllreduceSpec, Link, Machine, allreduce, bound, parameter_server

GRADIENTS = 100e6
NETWORK = Link(20e-6, 10e9 / 8)
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def seconds(nodes: int) -> dict[str, float]:
    """Return the predicted time of each method, and the lower bound."""
    machine = Machine(nodes=nodes, network=NETWORK)

    def served(servers: int) -> float:
        return 2 * parameter_server(machine, GRADIENTS, servers).seconds(machine)

    return {
        "1 server": served(1),
        "4 servers": served(min(4, nodes)),
        "all nodes": served(nodes),
        "ring": allreduce(machine, GRADIENTS, AllreduceSpec("ring")).seconds(machine),
        "trees": allreduce(machine, GRADIENTS, AllreduceSpec("double_tree")).seconds(machine),
        "bound": bound(machine, GRADIENTS).seconds(machine),
    }


def main() -> None:
    """Print seconds by the number of nodes."""
    print("seconds, predicted")
    print("nodes" + "".join(f"{name:>11}" for name in seconds(2)))
    for nodes in NODES:
        print(f"{nodes:>5}" + "".join(f"{value:>11.3f}" for value in seconds(nodes).values()))


if __name__ == "__main__":
    main()
