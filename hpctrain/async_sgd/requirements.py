"""Checks of the arguments of methods that hook a plain optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.step_hooks import require_unhooked
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.checks import Count, checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import values_of
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.gradients.optimizer import require_plain

Servers = int | Sequence[int] | None


class Roles(NamedTuple):
    """The server ranks and the worker ranks, identical on all ranks, and this rank."""

    rank: int
    size: int
    servers: list[int]
    workers: list[int]

    @classmethod
    def of(cls, servers: Servers, rank: int, size: int) -> "Roles":
        """Return the roles for ``servers``; raise ``ConfigError`` if ``servers`` is not valid."""
        everyone = [*range(size)]
        if servers is None or size == 1:
            # Each worker sends a message to each server, so few ranks of a large world serve.
            num = min(size, 4 * size.bit_length())
            return cls(rank, size, [each * size // num for each in range(num)], everyone)
        ranks = everyone[-servers:] if isinstance(servers, int) else sorted(servers)
        is_number = isinstance(servers, int) and 0 < servers < size
        is_list = not isinstance(servers, int) and len({*ranks}) == len(ranks) > 0
        if not (is_number or (is_list and {*ranks} < {*everyone})):
            raise ConfigError(
                f"servers must be None, a number of dedicated ranks (the last "
                f"ranks), or a list of distinct ranks, and leave a worker among the ranks, got "
                f"{servers!r} with {size} ranks; use at most {size - 1} servers, or leave servers "
                f"out"
            )
        return cls(rank, size, ranks, [r for r in everyone if r not in ranks])

    def moved(self, rank: int, numbers: Mapping[int, int]) -> "Roles":
        """Return the roles of the surviving ranks; ``numbers`` maps old to new ranks."""
        servers = [numbers[each] for each in self.servers]
        workers = [numbers[each] for each in self.workers if each in numbers]
        return Roles(rank, len(numbers), servers, workers)


def require_hookable(name: str, model: object, optimizer: object) -> None:
    """Raise ``ConfigError`` unless a method can hook ``optimizer`` of ``model``."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass the module that "
            "is trained"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer must be one of torch.optim, got {type(optimizer).__name__}; pass an "
            f"optimizer of the model's parameters"
        )
    require_plain(name, optimizer)
    require_unhooked(name, optimizer)


def require_servable(name: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` unless servers can update the parameters of the optimizer."""
    require_hookable(name, model, optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    unknown = {*map(id, trained)} - {*map(id, model.parameters())}
    away = ", ".join(sorted({p.device.type for p in trained} - {"cpu"}))
    refusals = {
        f"the optimizer of {name} must treat each element separately, which is not known of "
        f"{type(optimizer).__qualname__}; use SGD, Adam, AdamW or another elementwise optimizer, "
        f"or set elementwise = True in your class": (not is_known_as("elementwise", optimizer)),
        f"the parameters of the optimizer must be in the model, but {len(unknown)} of "
        f"{len(trained)} are not; pass the module that contains all of them": bool(unknown),
        f"the optimizer of {name} must have trained parameters, all of a floating-point dtype, "
        "got "
        f"{len(trained)} trained parameters; unfreeze some, or leave integer parameters out": (
            not trained or any(not p.is_floating_point() for p in trained)
        ),
        f"parameters must be on the CPU, in the memory of the servers of {name}, got some on "
        f"{away}; call model.cpu() before the optimizer is made, or use DistributedOptimizer or "
        f"LocalSGD": bool(away),
        f"differentiable must be False with {name}, got differentiable=True; leave it out": (
            any(group.get("differentiable") for group in optimizer.param_groups)
        ),
        f"the MPI library must support calls from several threads (MPI_THREAD_MULTIPLE) for "
        f"{name}, but does not; see hpctrain doctor, or use DistributedOptimizer": (
            not calls_from_threads()
        ),
    }
    for refusal, is_due in refusals.items():
        if is_due:
            raise ConfigError(refusal)


def first_not_finite(names: Iterable[str], gradients: Iterable[Tensor | None]) -> str:
    """Return the name of the first gradient that has NaN or inf, or an empty string."""
    for name, grad in zip(names, gradients, strict=True):
        values = None if grad is None else values_of(grad)
        if values is not None and values.numel() and not values.abs().max().isfinite():
            return name
    return ""


def bound_of(most_ahead: int | None) -> float:
    """Return ``most_ahead`` as a number, inf for None; raise ``ConfigError`` if not valid."""
    return math.inf if most_ahead is None else checked("most_ahead", most_ahead, Count)
