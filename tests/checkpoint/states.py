"""Provide states with every kind of value, and bitwise comparison of states."""

import torch

from hpctrain.checkpoint.format.shard import TensorPiece
from hpctrain.checkpoint.format.tensor_file import DTYPES

# Part of the golden checkpoint: must not change.
PLAIN = {
    "none": None,
    "flags": [True, False],
    "numbers": (0, -1, 2**63, -(2**5000), 0.1, -0.0, 5e-324, float("inf"), float("-inf")),
    "text": '\u00e4\ud800\n\0 \'quoted\' {"tensor": "x"}',
    "bytes": bytes(range(256)),
    "empty": [(), [], {}, "", b""],
    0: {"0": "text", 0: "number", "-1": 1, "a/b": 2, "a%2Fb": 3, "": 4, "__metadata__": 5},
    "tensor": {"dict": [1], "tensor": "x"},
}


def of_every_dtype():
    """Return tensors of every dtype with random bits, including NaN with payloads."""
    torch.manual_seed(0)
    bits = torch.randint(0, 256, (6, 7, 16), dtype=torch.uint8)
    tensors = {name: bits.clone().view(dtype) for name, dtype in DTYPES.items() if name != "bool"}
    return {**tensors, "bool": bits > 100}


def of_every_kind():
    """Return every kind of value of a run: layouts, dtypes, empty tensors, unusual keys."""
    wide = torch.arange(60.0).reshape(3, 4, 5)
    return {
        "plain": PLAIN,
        "dtypes": of_every_dtype(),
        "layouts": [wide.transpose(0, 2), wide[:, 1::2], wide[1], wide.expand(2, 3, 4, 5)],
        "conj": (wide * 1j).conj(),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(4, 0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "keys": {"a/b": wide[0], "a%2Fb": wide[1], "0": wide[2], 0: wide, "__metadata__": wide},
    }


def same(a, b):
    """Return True if two states have equal types, order and bits."""
    if isinstance(a, TensorPiece):
        return isinstance(b, TensorPiece) and a.shard == b.shard and same(a.tensor, b.tensor)
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def bits(tensor):
    dense = tensor.detach().resolve_conj().contiguous()
    return dense.reshape(-1).view(torch.uint8)
