"""ImageNet in one hour: ResNet-50 from 8 to 256 GPUs, by the model.

    python examples/studies/goyal_hour.py

Published: 90 epochs in 29 hours on 8 GPUs and in one on 256, about 90 % efficiency, 32 images a
GPU on servers of 8 P100 with 50 Gbit/s (Goyal et al. 2017, "Accurate, large minibatch SGD").
Predicted: efficiency and hours without and with overlap of sums and backward, with halving and
doubling between servers as in the paper. Nothing is fitted; the speed of a GPU follows from
the 29 hours. Assumed: 20 us for a message, 20 GB/s between the GPUs of a server.
"""

from dataclasses import replace

from hpctrain.cost import AllreduceSpec, Link, Machine, Model, step_time

SERVER = Machine(nodes=1, ranks_per_node=8, network=Link(20e-6, 50e9 / 8), reduce_bytes_per_s=20e9)
BATCH = 32
IMAGES = 90 * 1_281_167
PUBLISHED = {8: (1.0, 29.0), 256: (0.90, 1.0)}  # efficiency and hours
IMAGES_PER_S = IMAGES / (PUBLISHED[8][1] * 3600) / 8


def images_per_s(gpus: int, *, overlap: bool) -> float:
    """Predict the images a second of all GPUs."""
    machine = replace(SERVER, nodes=gpus // 8)
    model = Model(
        parameters=25.56e6, samples_per_s=IMAGES_PER_S, rank_batch=BATCH, overlap=overlap
    )
    spec = AllreduceSpec("halving", rails=8) if gpus > 8 else AllreduceSpec("slices", rails=8)
    return gpus * BATCH / step_time(machine, model, BATCH, spec).total_s


def efficiency(gpus: int, *, overlap: bool) -> float:
    """Predict the efficiency over one server."""
    return images_per_s(gpus, overlap=overlap) / images_per_s(8, overlap=overlap) / (gpus / 8)


def main() -> None:
    """Print efficiency and time by the number of GPUs."""
    print(f"images a second of one GPU: {IMAGES_PER_S:.0f}, from published figures")
    print("GPUs   efficiency: published   predicted       hours: published   predicted")
    for gpus in (8, 16, 32, 64, 128, 256):
        low, high = (efficiency(gpus, overlap=overlap) for overlap in (False, True))
        slow, fast = (
            IMAGES / images_per_s(gpus, overlap=overlap) / 3600 for overlap in (False, True)
        )
        output, hours = (f"{x:.2f}" for x in PUBLISHED[gpus]) if gpus in PUBLISHED else "--"
        print(f"{gpus:>4} {output:>23}   {low:.2f} to {high:.2f}", end="")
        print(f"{hours:>19}   {fast:.2f} to {slow:.2f}")


if __name__ == "__main__":
    main()
