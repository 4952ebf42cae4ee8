"""Train digits.toml or text.toml with a codec, and with what that codec wants beside it.

    hpctrain launch -n 2 --nodes 2 python examples/compressed.py digits int8 --out runs/int8

The studies ``studies/compressed-*.toml`` compare all of them by it. What else is said goes to
``hpctrain train``, such as ``--set train.epochs=30``.
"""

import argparse
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent

TASKS = {
    "digits": ["model.args.width=64", "train.epochs=12"],
    "text": ["data.args.num_windows=8000", "data.args.num_test=500"],
}
"""Networks large enough that their gradients take time, and runs short enough to repeat."""

NO_MOMENTUM = ["optimizer.name=SGD", "optimizer.args={}"]
CODECS = {
    **{name: [] for name in ("none", "bf16", "int8", "top_k", "qsgd", "auto")},
    "power_sgd": ["sync.compression_args={rank = 4}"],
    # Two values a row are rough as long as gradients change quickly:
    "one_bit": ["sync.compression_args={warmup_steps = 50}"],
    # A vote has no length: the rate alone says how far a step goes.
    "sign": [*NO_MOMENTUM, "optimizer.lr=0.001"],
    # It has a momentum of its own.
    "dgc": [*NO_MOMENTUM, "sync.compression_args={warmup_steps = 50}"],
}
RATES = {("digits", "dgc"): 0.05, ("text", "dgc"): 0.5}
"""Where another optimizer wants another one."""


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
