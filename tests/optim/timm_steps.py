"""Steps of LARS and LAMB as computed by timm, stored in ``timm_steps.json``.

``python -m tests.optim.timm_steps`` rewrites the file; this needs timm. The present file was
written with timm 1.0.31.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("timm_steps.json")
SHAPES = ((3, 2), (3,), (2, 2, 1))
NUM_STEPS, SHOWN = 50, (1, 2, 10, 50)
DTYPES = {"float64": torch.float64, "float32": torch.float32}

_LARS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
_LAMB = {"lr": 0.02, "weight_decay": 0.01}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LARS": ({**_LARS, "trust_coefficient": 0.02}, {**_LARS, "trust_coeff": 0.02, "eps": 0}),
    "LARS Nesterov": (
        {**_LARS, "trust_coefficient": 0.02, "nesterov": True},
        {**_LARS, "trust_coeff": 0.02, "eps": 0, "nesterov": True},
    ),
    "LARS without decay": (
        {"lr": 0.5, "trust_coefficient": 0.02},
        {"lr": 0.5, "momentum": 0.9, "trust_coeff": 0.02, "eps": 0, "always_adapt": True},
    ),
    "LARS corrected, as the rate falls": (
        {**_LARS, "trust_coefficient": 0.02, "momentum_correction": True},
        {**_LARS, "trust_coeff": 0.02, "eps": 0},
    ),
    "LARS that does not adapt": ({"lr": 0.05, "adapt": False}, {"lr": 0.05, "momentum": 0.9}),
    "LAMB": (_LAMB, {**_LAMB, "max_grad_norm": None}),
    "LAMB with bias": (
        {**_LAMB, "bias_correction": False},
        {**_LAMB, "bias_correction": False, "max_grad_norm": None},
    ),
}
"""For each case, the arguments of hpctrain's optimizer and of timm's."""


def wave(shape: tuple[int, ...], phase: float) -> Tensor:
    """Return pseudo-random numbers that are the same on every machine."""
    numel = int(torch.tensor(shape).prod())
    return torch.sin(torch.arange(numel, dtype=torch.float64) * 1.7 + phase).view(shape)


def trajectory(
    make: Callable[[list[Tensor]], Any], dtype: torch.dtype, *, falls: bool = False
) -> list[list[float]]:
    """Return all weights after each step in ``SHOWN``; with ``falls`` the rate decreases."""
    weights = [wave(s, n).to(dtype).requires_grad_() for n, s in enumerate(SHAPES)]
    optimizer, found = make(weights), []
    for step in range(1, NUM_STEPS + 1):
        for n, w in enumerate(weights):
            w.grad = (wave(tuple(w.shape), 0.9 * step + n) + 0.3 * w.detach().double()).to(dtype)
        if falls:
            optimizer.param_groups[0]["lr"] *= step / (step + 1)
        optimizer.step()
        if step in SHOWN:
            found.append([x for w in weights for x in w.detach().double().flatten().tolist()])
    return found


def main() -> None:
    from timm.optim.lamb import Lamb  # noqa: PLC0415
    from timm.optim.lars import Lars  # noqa: PLC0415

    found = {}
    for case, (_, options) in CASES.items():
        kind = Lars if case.startswith("LARS") else Lamb
        for name, dtype in DTYPES.items():
            steps = trajectory(lambda w: kind(w, **options), dtype, falls="falls" in case)  # noqa: B023
            found[f"{case}, {name}"] = steps
    lines = [f"{json.dumps(case)}: {json.dumps(steps)}" for case, steps in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
