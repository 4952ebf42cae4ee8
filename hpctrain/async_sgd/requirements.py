"""Requirements of methods that hook a plain optimizer, and who has which parameters."""

import math
import os
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.gradients.optimizer import METHOD_MARK

_CLAIM = "_async_method"  # that of a parameter; copies of it, which carry it along, do not count

Servers = int | Sequence[int] | None


def require_model(model: object, optimizer: object) -> None:
    """Raise ``ConfigError`` unless these are a module and a plain optimizer that nobody hooks."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a torch.nn.Module, got {type(model).__name__}; give that")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is one of torch.optim, got {type(optimizer).__name__}; make one of the "
            f"model's parameters"
        )


def require_unclaimed(name: str, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` if another method has the optimizer, or one of its parameters."""
    has = getattr(optimizer, METHOD_MARK, None)
    if has is not None:
        raise ConfigError(
            f"an optimizer has one such method at a time, {name} comes beside {has}; end its "
            f"block, or call its close(), before"
        )
    claimed = [p for p in trained_by(optimizer) if _is_claimed(p)]
    if claimed:
        other = getattr(claimed[0], _CLAIM)[2]
        raise ConfigError(
            f"a parameter has one such method at a time, {name} comes beside {other}, which has "
            f"{len(claimed)} parameters of this optimizer by another one; end its block, or call "
            f"its close(), before"
        )


def claim(name: str, parameters: Iterable[Tensor]) -> None:
    """Note that a method has these parameters."""
    for p in parameters:
        setattr(p, _CLAIM, (os.getpid(), id(p), name))


def release(parameters: Iterable[Tensor]) -> None:
    """Forget who has these parameters. Harmless the second time."""
    for p in parameters:
        if hasattr(p, _CLAIM):
            delattr(p, _CLAIM)


def _is_claimed(p: Tensor) -> bool:
    has = getattr(p, _CLAIM, None)
    return has is not None and has[:2] == (os.getpid(), id(p))


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def require_servable(name: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` unless servers can have, and step, what the optimizer trains."""
    kind = type(optimizer)
    if not is_known_as("elementwise", optimizer):
        raise ConfigError(
            f"{name} cuts parameters over servers, so the optimizer must step every element "
            f"by itself, and whether {kind.__qualname__} does is not known; take SGD, Adam, "
            f"AdamW or another such, or say so by elementwise = True in a class of your own"
        )
    trained = trained_by(optimizer)
    if strangers := {id(p) for p in trained} - {id(p) for p in model.parameters()}:
        raise ConfigError(
            f"the optimizer has the parameters of the model, {len(strangers)} of "
            f"{len(trained)} are not in it; give the module that has them all"
        )
    if any(not p.is_floating_point() for p in trained) or not trained:
        raise ConfigError(f"{name} needs trained parameters of floating point numbers")
    if away := {p.device.type for p in trained} - {"cpu"}:
        raise ConfigError(
            f"{name} needs parameters on the CPU, where its servers have them, got some on "
            f"{', '.join(sorted(away))}; move them there, or take DistributedOptimizer or LocalSGD"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} takes no step that is differentiated, got differentiable=True; leave it out"
        )
    if not calls_from_threads():
        raise ConfigError(
            f"{name} needs an MPI that several threads may call at once (THREAD_MULTIPLE); "
            f"see hpctrain doctor, or take DistributedOptimizer"
        )


def dedicated_servers(servers: Servers, size: int) -> list[int]:
    """Return the ranks that do nothing but serve; empty where all ranks serve and work."""
    if servers is None or size == 1:
        return []
    ranks = list(range(size - servers, size)) if isinstance(servers, int) else sorted(servers)
    is_proper = len({*ranks}) == len(ranks) and {*ranks} < {*range(size)}
    if not ranks or not is_proper:
        raise ConfigError(
            f"servers is None for all ranks, a number of dedicated ranks (the last ones), or a "
            f"list of them, each once, and leaves a worker, got {servers!r} of {size} ranks"
        )
    return ranks


def require_number(name: str, value: object, least: int) -> None:
    """Raise ``ConfigError`` unless a value is a whole number, and large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is a whole number, at least {least}, got {value!r}")


def bound_of(most_ahead: int | None) -> float:
    """Return how far a worker may be ahead, infinitely for None; raises ``ConfigError``."""
    if most_ahead is None:
        return math.inf
    require_number("most_ahead", most_ahead, 0)
    return most_ahead


def require_positive(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is a finite number above 0, got {value!r}")
