"""The random generators of a process: torch's, numpy's and Python's."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Begin the random numbers of all generators anew."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's model may draw from it
    random.seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of all generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.array(keys)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "gauss": next_gauss,
        },
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Let the generators go on from what ``random_states`` returned."""
    torch.set_rng_state(states["torch"].clone())
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.clone() for state in states["cuda"]])
    of_numpy, of_python = states["numpy"], states["python"]
    keys: Tensor = of_numpy["keys"]
    np.random.set_state(  # noqa: NPY002 - a user's model may draw from it
        (
            of_numpy["kind"],
            keys.numpy(),
            of_numpy["position"],
            of_numpy["has_gauss"],
            of_numpy["gauss"],
        )
    )
    numbers = tuple(of_python["numbers"].tolist())
    random.setstate((of_python["version"], numbers, of_python["gauss"]))
