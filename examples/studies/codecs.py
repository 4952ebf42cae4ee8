"""Bandwidth below which a codec is faster, and compression that a network needs.

    python examples/studies/codecs.py

Predicted: the bandwidth at which bf16 saves as much time as its rounding takes, and the
compression ratio with which backward hides the communication. Published: at full utilisation 100
Gbit/s need no compression, and 10 Gbit/s 2 to 5 times (Zhang et al. 2020, "Is network the
bottleneck of distributed training?"). Assumed: 8 servers of 8 GPUs, 64 images a GPU (half as many
need twice the compression), the speeds of a V100 below, backward two thirds of a step, and how
many bytes a second a rank rounds.
"""

from hpctrain.cost import AllreduceSpec, Link, Machine, allreduce

MODELS = {  # parameters, images a second of a V100
    "ResNet-50": (25.6e6, 360.0),
    "ResNet-101": (44.5e6, 210.0),
    "VGG-16": (138.4e6, 220.0),
}
BATCH, BACKWARD = 64, 2 / 3
GBITS = (1, 10, 25, 100)
PUBLISHED = {10: "2 to 5", 100: "1"}
ROUNDING = {"one core": 4e9, "a GPU": 400e9}  # bytes a second


def machine(gbit: float, reduce_bytes_per_s: float = 400e9) -> Machine:
    """Describe the servers."""
    return Machine(
        nodes=8,
        ranks_per_node=8,
        node=Link(0, 100e9),
        network=Link(0, gbit * 1e9 / 8),
        reduce_bytes_per_s=reduce_bytes_per_s,
    )


def break_even_gbit(reduce_bytes_per_s: float) -> float:
    """Return the bandwidth above which bf16 costs more than it saves."""
    here = machine(1, reduce_bytes_per_s)
    plain, half = (
        allreduce(here, 1.0, AllreduceSpec("ring", 8, codec)) for codec in ("none", "bf16")
    )
    saved = plain.network_bytes - half.network_bytes
    cost_s = (half.combined_bytes - plain.combined_bytes) / reduce_bytes_per_s
    return saved / cost_s * 8 / 1e9


def ratio_needed(parameters: float, images_per_s: float, gbit: float) -> float:
    """Return by how much gradients must shrink so that backward hides them; 1 or more."""
    load = allreduce(machine(gbit), 4 * parameters, AllreduceSpec("ring", 8))
    hidden_s = BACKWARD * BATCH / images_per_s
    return max(1.0, load.network_bytes / (gbit * 1e9 / 8) / hidden_s)


def main() -> None:
    """Print both tables."""
    print("bf16 is predicted to be faster below")
    for name, rate in ROUNDING.items():
        gbit = break_even_gbit(rate)
        print(f"  {gbit:>8.0f} Gbit/s, rounded by {name} at {rate / 1e9:.0f} GB/s (assumed)")
    print("compression needed, predicted" + "".join(f"{gbit:>7} Gbit/s" for gbit in GBITS))
    for name, (parameters, images_per_s) in MODELS.items():
        ratios = (ratio_needed(parameters, images_per_s, gbit) for gbit in GBITS)
        print(f"  {name:<27}" + "".join(f"{ratio:>14.1f}" for ratio in ratios))
    output = (PUBLISHED.get(gbit, "-") for gbit in GBITS)
    print(f"  {'published':<27}" + "".join(f"{text:>14}" for text in output))


if __name__ == "__main__":
    main()
