"""A transformer over bytes: rotary positions, RMSNorm, SwiGLU.

Of ranks it says only how they may divide it, which `hpctrain train` reads off it.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from hpctrain.parallel import context_attention

NUM_BYTES = 256
ROLES = {
    "embedding": "vocabulary",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.feed.gate": "column",
    "blocks.*.feed.up": "column",
    "blocks.*.feed.down": "row",
    "head": "vocabulary",
}
"""Roles of the matrices for tensor parallelism: `hpctrain guide parallel`."""
LAYERS = ("embedding", "blocks.*", "norm", "head")
"""The chain of layers that a pipeline divides into stages."""


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention; all tensors are ``(n, heads, length, head_width)``."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal attention; how many heads are here its matrices say."""

    attend = staticmethod(causal)
    part = 0  # of the sequence, which is here

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(
                f"every head has a pair of features or more, got a width of {width} for "
                f"{num_heads} heads; take a multiple of {2 * num_heads}"
            )
        self.head_width = width // num_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``(n, length, width)`` into the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        first = self.part * query.shape[-2]
        seen = self.attend(rotated(query, first), rotated(key, first), value)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor, first: int, base: float = 10000.0) -> Tensor:
    """Turn pairs of features, ``(..., length, head_width)``, by an angle for each place."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    places = torch.arange(first, first + length, dtype=x.dtype, device=x.device)
    angles = places[:, None] * speeds
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Feed(nn.Module):
    """SwiGLU: a product of two projections, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``(n, length, width)`` into the same shape."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.feed_norm = nn.RMSNorm(width)
        self.feed = Feed(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``(n, length, width)`` into the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed(self.feed_norm(x))
        return out


class Transformer(nn.Module):
    """Guesses each byte from those before it."""

    parallel_roles = ROLES
    parallel_layers = LAYERS

    def __init__(self, *, width: int = 64, depth: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.05)

    def forward(self, given: Tensor) -> Tensor:
        """Return ``(n, length, 256)`` scores of the next bytes for ``(n, length)`` bytes."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embedding(given))))
        return scores

    def parallel_context(self, mesh: DeviceMesh) -> None:
        """Let each rank of the mesh have a part of the sequence."""
        for block in self.blocks:
            block.attention.attend = partial(context_attention, mesh=mesh)
            block.attention.part = mesh.get_local_rank()


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """Mean of the nats that a byte costs, given those before it."""
    return cross_entropy(scores.flatten(0, 1), following.flatten())
