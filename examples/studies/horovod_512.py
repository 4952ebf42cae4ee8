"""Horovod's three bars on 512 GPUs, from the size of the models and the speed of the network.

    python examples/studies/horovod_512.py

Published: 128 servers of 4 Pascal GPUs on 25 Gbit/s reach 90 % of linear scaling with Inception-v3
and ResNet-101 and 68 % with VGG-16 (Horovod, docs/benchmarks). Predicted: the range from
no overlap to overlap of sums and backward, with flat rings and fusion buffers of 64 MiB.
Nothing is fitted. Assumed: 64 images a GPU, the speeds below, 5 us for each message.
"""

from hpctrain.cost import AllreduceSpec, Link, Machine, Model, step_time

MACHINE = Machine(nodes=128, ranks_per_node=4, node=Link(5e-6, 10e9), network=Link(5e-6, 25e9 / 8))
BATCH = 64
# Parameters, images a second of one P100 (the first published, the others assumed), and the
# published efficiency.
MODELS = {
    "Inception-v3": (23.8e6, 138.2, 0.90),
    "ResNet-101": (44.5e6, 133.0, 0.90),
    "VGG-16": (138.4e6, 154.0, 0.68),
}


def band(parameters: float, images_per_s: float) -> tuple[float, float]:
    """Predict the efficiency without and with overlap."""
    without, beside = (
        Model(
            parameters=parameters,
            samples_per_s=images_per_s,
            rank_batch=BATCH,
            bucket_bytes=64 * 2**20,
            overlap=overlap,
        )
        for overlap in (False, True)
    )
    spec = AllreduceSpec("ring")
    low, high = (step_time(MACHINE, model, BATCH, spec) for model in (without, beside))
    return low.efficiency, high.efficiency


def main() -> None:
    """Print published and predicted efficiencies."""
    print("efficiency on 512 GPUs   published   predicted")
    for name, (parameters, images_per_s, published) in MODELS.items():
        low, high = band(parameters, images_per_s)
        print(f"{name:<24} {published:>9.2f}   {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
