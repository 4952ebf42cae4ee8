"""A step of a transformer of 350 M parameters in bfloat16 on a GPU that the ranks share.

    hpctrain launch -n 2 -- python perf/gpu_step.py

``plain`` is the loop without communication, ``hooks`` is hpctrain without communication, and
``full`` is training. Each rank interleaves the three variants on separate models; the time of a
step is that of the slowest rank. ``alone`` is the communication without computation that hides it:
a backward that produces the same gradients at once, minus the same backward without communication.
``hidden`` is the fraction of that time which computation hides in a real step.

For ``gpu_check.py``; ``DEV`` is the device, see ``gpu_device.py``. A simulated device has a small
model.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_device as here
import torch
from gpu_finding import Finding, reported_errors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hpctrain as hvd

IS_REAL = here.KIND == "cuda"
LAYERS, WIDTH, HEADS, VOCABULARY = (24, 1024, 16, 50_304) if IS_REAL else (2, 64, 2, 256)
SAMPLES, TOKENS = (4, 1024) if IS_REAL else (2, 16)
ROUNDS, STEPS = (5, 4) if IS_REAL else (2, 2)
MOST_OF_HOOKS, LEAST_HIDDEN = 0.02, 0.70

Step = Callable[[], None]


class Block(nn.Module):
    """Residual blocks: attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Return the output, of shape ``(samples, tokens, width)`` like the input."""
        of_heads = self.heads(self.first(values)).unflatten(-1, (3, HEADS, -1))
        query, key, value = (one.transpose(1, 2) for one in of_heads.unbind(2))
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.joined(seen.transpose(1, 2).flatten(2))
        inner = nn.functional.gelu(self.wide(self.second(values)))
        return values + self.narrow(inner)


class Transformer(nn.Module):
    """A decoder that shares its embedding with its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the prediction of each token from the previous tokens."""
        values = self.last(self.blocks(self.embedding(tokens) + self.places))
        scores = values[:, :-1] @ self.embedding.weight.T
        return cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Variant:
    """Variant of the step: a model and its optimizer."""

    def __init__(self, *, is_distributed: bool) -> None:
        torch.manual_seed(0)
        with here.DEVICE:
            self.model = Transformer().to(torch.bfloat16)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if is_distributed:
            named = self.model.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named)
        source = torch.Generator().manual_seed(hvd.rank())
        tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=source)
        self.tokens = tokens.to(here.DEVICE)

    def step(self) -> None:
        """Run a training step."""
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()
        self.optimizer.step()

    def backward_alone(self) -> None:
        """Run a backward that produces gradients of the same sizes without computation."""
        self.optimizer.zero_grad()
        torch.stack([p.view(-1)[0] for p in self.model.parameters()]).sum().backward()

    def keep_home(self) -> None:
        """Disable communication from the second step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # else weights would part, which is an error
        reduction = self.optimizer._exchange.reduction  # noqa: SLF001 - all but this is measured
        reduction._reduce = lambda _: None  # noqa: SLF001
        for bucket in reduction.layout.buckets:
            bucket.place.depart = bucket.place.arrive = lambda: None


def timed(works: dict[str, Step]) -> dict[str, float]:
    """Return the median milliseconds of each function on the slowest rank, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            for turn in range(-1, STEPS):
                here.wait_for_all()
                hvd.barrier()
                start = time.perf_counter()
                work()
                here.wait_for_all()
                own = time.perf_counter() - start
                if turn >= 0:
                    seconds[name].append(max(hvd.allgather_object(own)))
    return {name: statistics.median(times) * 1e3 for name, times in seconds.items()}


def main() -> None:
    """Measure the variants, and print the finding."""
    hvd.init()
    plain, full, hooks = (Variant(is_distributed=each) for each in (False, True, True))
    for variant in (plain, full, hooks):
        variant.step()
    hooks.keep_home()
    ms = timed({"plain": plain.step, "hooks": hooks.step, "full": full.step})
    at_once = {"plain at once": plain.backward_alone, "full at once": full.backward_alone}
    ms |= timed(at_once)
    alone = ms["full at once"] - ms["plain at once"]
    exposed = ms["full"] - ms["hooks"]
    cost, hidden = ms["hooks"] / ms["plain"] - 1, 1 - exposed / alone
    numel = sum(p.numel() for p in plain.model.parameters())
    figures = {
        "parameters": numel,
        "bytes of gradients": 2 * numel,
        "ms": {name: round(value, 2) for name, value in ms.items()},
        "hooks / plain - 1": round(cost, 4),
        "exposed ms": round(exposed, 2),
        "alone ms": round(alone, 2),
        "hidden": round(hidden, 3),
        "GB/s of gradients alone": round(2 * numel / alone / 1e6, 2),
    }
    if IS_REAL:
        figures["GiB on the GPU"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    is_alone = "CUDA_MPS_PIPE_DIRECTORY" not in os.environ  # kernels of ranks do not overlap
    is_good = cost < MOST_OF_HOOKS and (is_alone or hidden >= LEAST_HIDDEN)
    says = f"hooks cost {cost:.1%}, {exposed:.1f} of {alone:.1f} ms exposed"
    says += ", ranks share the GPU without MPS" if is_alone else f": {hidden:.0%} hidden"
    Finding("pass" if is_good or not IS_REAL else "fail", says, figures).write_on_rank_0()


if __name__ == "__main__":
    with reported_errors():
        main()
