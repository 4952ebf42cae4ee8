"""Model and data of text.toml: a small transformer over the bytes of Python's standard library."""

import math
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import DataError
from hpctrain.comm import Communicator
from hpctrain.data import MANIFEST, ShardedDataset, write_arrays

CONTEXT = 128
"""Predicted bytes of a window, which follow one more byte."""
FILES_PER_TEST_FILE = 20
"""One in this number of files is used for tests only."""
REACH = 4
"""Kernel size of the convolution before the attention, in bytes."""


class Block(nn.Module):
    """Causal attention and two linear layers, with residual connections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, stream: Tensor) -> Tensor:
        """Return a tensor of the same shape ``(n, length, width)``."""
        parts = self.queries_keys_values(self.norms[0](stream)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        stream = stream + self.mix(seen.transpose(1, 2).flatten(2))
        result: Tensor = stream + self.layers(self.norms[1](stream))
        return result


class Transformer(nn.Module):
    """Predicts each byte of a window from the previous bytes."""

    def __init__(self, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.join = nn.Conv1d(width, width, REACH)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.05)

    def forward(self, windows: Tensor) -> Tensor:
        """Return ``(n, CONTEXT, 256)`` scores for bytes 1 to ``CONTEXT`` of windows.

        ``windows`` is ``(n, CONTEXT + 1)``. A score depends on previous bytes only.
        """
        seen = self.bytes(windows[:, :-1].long())
        past = functional.pad(seen.transpose(1, 2), (REACH - 1, 0))
        stream = seen + self.join(past).transpose(1, 2) + self.places.weight
        scores: Tensor = self.norm(self.blocks(stream)) @ self.bytes.weight.T
        return scores


def model(width: int = 64, depth: int = 2, num_heads: int = 4) -> Transformer:
    """Return a transformer with ``depth`` blocks of ``width`` features per byte."""
    return Transformer(width, depth, num_heads)


def bits_per_byte(scores: Tensor, windows: Tensor) -> Tensor:
    """Return the cross-entropy per byte of each window in bits, ``(n,)``; 8 for uniform scores."""
    guessed = windows[:, 1:].long()
    nats = functional.cross_entropy(scores.transpose(1, 2), guessed, reduction="none")
    return nats.mean(dim=1) / math.log(2)


def loss(scores: Tensor, windows: Tensor) -> Tensor:
    """Return the mean of ``bits_per_byte``."""
    return bits_per_byte(scores, windows).mean()


def data(
    comm: Communicator, folder: str, num_windows: int, num_test: int
) -> tuple[ShardedDataset, ShardedDataset]:
    """Return training and test windows, which rank 0 packs in the first run. Collective.

    Args:
        comm: all ranks.
        folder: folder of the two data sets, which are from different files.
        num_windows: largest number of training windows.
        num_test: largest number of test windows.
    """
    root = Path(folder)
    most = {"train": num_windows, "test": num_test}
    refusal = _pack(root, most) if comm.rank == 0 else None
    comm.agree(refusal is None, refusal or "")
    return ShardedDataset.open(root / "train", comm), ShardedDataset.open(root / "test", comm)


def _pack(root: Path, most: dict[str, int]) -> str | None:
    """Write missing data sets; return a message if that fails."""
    library = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[Path]] = {"train": [], "test": []}
    for path in sorted(library.glob("*.py")):
        is_test = zlib.crc32(path.name.encode()) % FILES_PER_TEST_FILE == 0
        files["test" if is_test else "train"].append(path)
    try:
        for split, paths in files.items():
            if not (root / split / MANIFEST).exists():
                windows = _windows(paths)[: most[split]]
                write_arrays(root / split, {"bytes": windows}, samples_per_shard=8192, split=split)
    except (DataError, OSError) as error:
        return f"cannot pack the text of {library}: {error}"
    return None


def _windows(paths: Iterable[Path]) -> NDArray[np.uint8]:
    """Return the windows of files, ``(n, CONTEXT + 1)``, in random order."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    num_windows = len(text) // (CONTEXT + 1)
    windows = text[: num_windows * (CONTEXT + 1)].reshape(num_windows, CONTEXT + 1)
    return np.random.default_rng(0).permutation(windows)
