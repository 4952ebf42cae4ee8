"""The transformer of ``examples/lm``, and its reference results from one process."""

import functools
import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from hpctrain.core.torch_compat import VERSION

ROOT = Path(__file__).parents[2]
STEPS, BATCH, LENGTH = 5, 8, 16
CLIP = 0.1  # below the gradient norm of every step


def example(name):
    """Import a file of the example."""
    path = ROOT / f"examples/lm/{name}.py"
    spec = importlib.util.spec_from_file_location(f"lm_{name}", path)
    # registered, so that its classes can be pickled
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lm = example("model")


def transformer(*, tied=False, **shape):
    """Return the model that every test trains, with identical values on every rank."""
    torch.manual_seed(1)
    made = lm.Transformer(**{"width": 16, "depth": 2, "num_heads": 4, **shape}).double()
    for module in made.modules():
        # with weights of 1 an exchange of features would go unnoticed
        if isinstance(module, nn.RMSNorm):
            nn.init.normal_(module.weight, mean=1, std=0.1)
    if tied:
        made.head.weight = made.embedding.weight
    return made


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def batches(steps=STEPS):
    """Draw inputs and next bytes, ``(8, 16)`` each."""
    random = torch.Generator().manual_seed(2)
    draw = functools.partial(torch.randint, 256, (BATCH, LENGTH + 1), generator=random)
    return [(windows[:, :-1], windows[:, 1:]) for windows in (draw() for _ in range(steps))]


def loss_of(scores, following):
    return cross_entropy(scores.flatten(0, 1), following.flatten())


@functools.cache
def alone(**shape):
    """Train in one process; return losses and parameters by name."""
    model = transformer(**shape)
    optimizer, losses = adamw(model.parameters()), []
    for given, following in batches():
        optimizer.zero_grad()
        loss = loss_of(model(given), following)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: p.detach() for name, p in named}


def check(losses, parameters, **shape):
    """Compare losses and parameters by name with one process."""
    expected, values = alone(**shape)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    for name, found in parameters:
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        # Older versions of torch sum in another order; AdamW amplifies that for tiny gradients.
        atol = 1e-12 if VERSION >= (2, 13) else 1e-8
        torch.testing.assert_close(whole.detach(), values[name], rtol=1e-12, atol=atol)
