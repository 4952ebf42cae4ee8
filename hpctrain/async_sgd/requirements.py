"""Requirements of methods that hook a plain optimizer: model, optimizer, servers and numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.step_hooks import require_unhooked
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.checks import Count, checked
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.gradients.optimizer import require_plain

Servers = int | Sequence[int] | None


class Roles(NamedTuple):
    """Who serves and who works, the same on every rank; and which one this is."""

    rank: int
    size: int
    servers: list[int]
    workers: list[int]

    @classmethod
    def of(cls, servers: Servers, rank: int, size: int) -> "Roles":
        """Return them as ``servers`` says; raises ``ConfigError`` where that cannot be."""
        everyone = [*range(size)]
        if servers is None or size == 1:
            return cls(rank, size, everyone, everyone)
        ranks = everyone[-servers:] if isinstance(servers, int) else sorted(servers)
        is_number = isinstance(servers, int) and 0 < servers < size
        is_list = not isinstance(servers, int) and len({*ranks}) == len(ranks) > 0
        if not (is_number or (is_list and {*ranks} < {*everyone})):
            raise ConfigError(
                f"servers is None for all ranks, a number of dedicated ranks (the last ones), or "
                f"a list of them, each once, and leaves a worker, got {servers!r} of {size} ranks"
            )
        return cls(rank, size, ranks, [r for r in everyone if r not in ranks])


def require_hookable(name: str, model: object, optimizer: object) -> None:
    """Raise ``ConfigError`` unless these are a module and a plain optimizer that nobody hooks."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a torch.nn.Module, got {type(model).__name__}; give that")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is one of torch.optim, got {type(optimizer).__name__}; make one of the "
            f"model's parameters"
        )
    require_plain(name, optimizer)
    require_unhooked(name, optimizer)


def require_servable(name: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` unless servers can have, and step, what the optimizer trains."""
    require_hookable(name, model, optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    strangers = {*map(id, trained)} - {*map(id, model.parameters())}
    away = ", ".join(sorted({p.device.type for p in trained} - {"cpu"}))
    refusals = {
        f"{name} cuts parameters over servers, so the optimizer must step every element by "
        f"itself, and whether {type(optimizer).__qualname__} does is not known; take SGD, Adam, "
        f"AdamW or another such, or say so by elementwise = True in a class of your own": (
            not is_known_as("elementwise", optimizer)
        ),
        f"the optimizer has the parameters of the model, {len(strangers)} of {len(trained)} are "
        f"not in it; give the module that has them all": bool(strangers),
        f"{name} needs trained parameters of floating point numbers": (
            not trained or any(not p.is_floating_point() for p in trained)
        ),
        f"{name} needs parameters on the CPU, where its servers have them, got some on {away}; "
        f"move them there, or take DistributedOptimizer or LocalSGD": bool(away),
        f"{name} takes no step that is differentiated, got differentiable=True; leave it out": (
            any(group.get("differentiable") for group in optimizer.param_groups)
        ),
        f"{name} needs an MPI that several threads may call at once (THREAD_MULTIPLE); see "
        f"hpctrain doctor, or take DistributedOptimizer": not calls_from_threads(),
    }
    for refusal, is_due in refusals.items():
        if is_due:
            raise ConfigError(refusal)


def first_not_finite(names: Iterable[str], gradients: Iterable[Tensor | None]) -> str:
    """Return the name of the first gradient that is NaN or infinite somewhere; empty for none."""
    for name, grad in zip(names, gradients, strict=True):
        values = grad._values() if grad is not None and grad.is_sparse else grad  # noqa: SLF001
        if values is None or not values.numel() or values.abs().max().isfinite():
            continue
        return name
    return ""


def bound_of(most_ahead: int | None) -> float:
    """Return how far a worker may be ahead, infinitely for None; raises ``ConfigError``."""
    if most_ahead is None:
        return math.inf
    checked("most_ahead", most_ahead, Count)
    return most_ahead
