"""Scaling limit of parameter servers on Piz Daint and EC2, and a ring on the same networks.

    python examples/studies/parameter_server.py

Published: images per second of Inception-v3, 64 per GPU, one GPU per node, with the best number of
servers (the report in e-bug/distributed-tensorflow-benchmarks). The model has two parameters. The
busiest server sends its share of the parameters to every node and receives as many gradients; the
share is at least the largest tensor, because a tensor is stored on one server. A step waits for a
fraction of a transfer in addition to computation, or takes two transfers if that is longer:

    step = max(alone + waits * transfer, 2 * transfer)

The speed of the network is fitted to the points up to 32 GPUs of the same system. The fraction
``waits`` is fitted to all points of the other system, because points up to 32 GPUs do not
determine it. Predicted are 64 and 128 GPUs.
"""

from statistics import median

from hpctrain.cost import AllreduceSpec, Machine, allreduce, parameter_server

BATCH = 64
GRADIENTS = 4 * 23.85e6  # bytes of Inception-v3
LARGEST = 4 * 2048 * 1001  # bytes of its last layer
FITTED_UP_TO = 32
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
TABLES = {  # images a second and servers, for each number of GPUs
    "Piz Daint": (
        (138.23, 264.57, 523.38, 1018.18, 2001.00, 3840.35, 7118.31, 9219.70),
        (1, 1, 3, 2, 4, 12, 40, 116),
    ),
    "EC2 p2.xlarge": (
        (30.55, 57.45, 114.57, 228.41, 431.64, 825.64, 996.32, 1077.59),
        (1, 2, 4, 8, 12, 32, 64, 128),
    ),
}


def load(gpus: int, servers: int) -> float:
    """Return the bytes that the busiest server sends in a step, and takes."""
    return parameter_server(Machine(nodes=gpus), GRADIENTS, servers, largest=LARGEST).network_bytes


def steps(system: str) -> dict[int, float]:
    """Return the published seconds of a step."""
    return {k: BATCH * k / rate for k, rate in zip(GPUS, TABLES[system][0], strict=True)}


def loads(system: str) -> dict[int, float]:
    """Return the bytes of the busiest server."""
    return {k: load(k, servers) for k, servers in zip(GPUS, TABLES[system][1], strict=True)}


def waiting_per_byte(system: str) -> float:
    """Fit the seconds that a step waits for each byte, up to 32 GPUs, by least squares."""
    found, sent = steps(system), loads(system)
    few = [k for k in GPUS if 1 < k <= FITTED_UP_TO]
    late = sum((found[k] - found[1]) * sent[k] for k in few)
    return late / sum(sent[k] ** 2 for k in few)


def waits(system: str) -> float:
    """Fit the part of a transfer that a step waits for, to a whole table."""
    found, sent = steps(system), loads(system)
    per_byte_s = waiting_per_byte(system)
    # Where the servers are all that counts, a step takes two transfers.
    full = [k for k in GPUS if found[k] > 1.5 * found[1]]
    bytes_per_s = median(2 * sent[k] / found[k] for k in full)
    return per_byte_s * bytes_per_s


def predicted(system: str, part: float) -> dict[int, float]:
    """Return the efficiencies by the model, given the part that a step waits for."""
    alone, sent = steps(system)[1], loads(system)
    bytes_per_s = part / waiting_per_byte(system)
    return {
        k: alone / max(alone + part * sent[k] / bytes_per_s, 2 * sent[k] / bytes_per_s)
        for k in GPUS
    }


def ring(system: str, part: float) -> dict[int, float]:
    """Return the efficiencies of a ring at the same speed, of which as much is waited for."""
    alone, bytes_per_s = steps(system)[1], part / waiting_per_byte(system)
    sent = {
        k: allreduce(Machine(nodes=k), GRADIENTS, AllreduceSpec("ring")).network_bytes
        / bytes_per_s
        for k in GPUS
    }
    return {k: alone / max(alone + part * sent[k], sent[k]) for k in GPUS}


def main() -> None:
    """Print all tables."""
    for system, other in zip(TABLES, reversed(TABLES), strict=True):
        part, found = waits(other), steps(system)
        model, by_ring = predicted(system, part), ring(system, part)
        speed = part / waiting_per_byte(system) / 1e6
        print(f"{system}: {speed:.0f} MB/s fitted up to {FITTED_UP_TO} GPUs;", end=" ")
        print(f"a step waits for {part:.2f} of a transfer, fitted on {other}")
        print("GPUs   servers   efficiency: published   model             ring, predicted")
        for k, servers in zip(GPUS, TABLES[system][1], strict=True):
            kind = "fitted" if k <= FITTED_UP_TO else "predicted"
            output = f"{found[1] / found[k]:.3f}{model[k]:>18.3f} {kind:<9}"
            print(f"{k:>4} {servers:>9} {'':>17}{output}{by_ring[k]:>14.3f}")
        print()


if __name__ == "__main__":
    main()
