"""Train digits.toml or text.toml with a codec and the settings that the codec needs.

    hpctrain launch -n 2 --nodes 2 python examples/compressed.py digits int8 --out runs/int8

The studies ``studies/compressed-*.toml`` use this script. Other arguments, such as
``--set train.epochs=30``, are passed to ``hpctrain train``.
"""

import argparse
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent

TASKS = {
    "digits": ["model.args.width=64", "train.epochs=12"],
    "text": ["data.args.num_windows=8000", "data.args.num_test=500"],
}
"""Settings for networks with large gradients, and for short runs."""

NO_MOMENTUM = ["optimizer.name=SGD", "optimizer.args={}"]
CODECS = {
    **{name: [] for name in ("none", "bf16", "int8", "top_k", "qsgd", "auto")},
    "power_sgd": ["sync.compression_args={rank = 4}"],
    # Quantization to two values per row is too coarse for the first steps.
    "one_bit": ["sync.compression_args={warmup_steps = 50}"],
    # A majority vote of signs has no magnitude; the learning rate alone determines the step.
    "sign": [*NO_MOMENTUM, "optimizer.lr=0.001"],
    # DGC applies momentum itself.
    "dgc": [*NO_MOMENTUM, "sync.compression_args={warmup_steps = 50}"],
}
RATES = {("digits", "dgc"): 0.05, ("text", "dgc"): 0.5}
"""Learning rates for SGD without momentum."""


def main() -> None:
    """Become ``hpctrain train`` with these keys."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("codec", choices=CODECS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    rate = RATES.get((options.task, options.codec))
    keys = [
        *TASKS[options.task],
        *CODECS[options.codec],
        *([f"optimizer.lr={rate}"] if rate else []),
        f"sync.compression={options.codec}",
        f"output_dir={options.out}",
        f"seed={options.seed}",
        "checkpoint.every=none",
        "log.plots=false",
    ]
    sets = [word for key in keys for word in ("--set", key)]
    config = str(HERE / f"{options.task}.toml")
    os.execvp("hpctrain", ["hpctrain", "train", config, *sets, *more])  # noqa: S606, S607


if __name__ == "__main__":
    main()
