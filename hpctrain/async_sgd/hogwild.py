"""``Hogwild``: the ranks of a node step on shared parameters, without locks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hpctrain.async_sgd.requirements import (
    claim,
    release,
    require_model,
    require_unclaimed,
)
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, raise_if_any, require_equal
from hpctrain.comm.common_block import CommonBlock
from hpctrain.core.errors import ConfigError, NotFiniteError
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain
from hpctrain.runtime import world


class LostUpdates(NamedTuple):
    """What concurrent steps have overwritten, as far as sums can tell."""

    components: int
    """Elements of parameters that have lost at least one update: each counts once."""
    updates: int  # single elements that all ranks have stepped
    share: float  # sum of what is missing over the sum of all steps, absolute values


class Hogwild(CommonBlock):
    """Lets the ranks of one node step on the same parameters at any time.

    Parameters lie once in node memory. A step adds ``-lr * gradient`` to the elements that the
    gradient has, row by row where it is sparse, and touches no others. Forward and backward read
    while others write. Nothing is locked and no addition is atomic: two ranks that step one
    element at the same moment may lose one of the updates. Only the store of a single aligned
    element is whole, by the processor: a reader sees old or new numbers, never half of one.

    Made for sparse gradients, of ``nn.Embedding(sparse=True)`` for instance, where ranks rarely
    meet. On dense models it is out of the theory, and caches bounce.

    Source: Recht et al. 2011, "Hogwild!: a lock-free approach to parallelizing stochastic
    gradient descent", NeurIPS.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, counts: bool = True) -> None:
        """Move the parameters of rank 0 into node memory and hook the optimizer. Collective.

        Args:
            model: with equal parameters on every rank, on the CPU.
            optimizer: ``torch.optim.SGD`` without momentum and weight decay, whose steps add up
                in any order; its learning rate may change, and differ between ranks.
            counts: whether ``lost_updates()`` can tell what was lost: each rank keeps the sum of
                its steps, a copy of the parameters in float64.

        Raises:
            ConfigError: the ranks are on several nodes or share no memory, or the optimizer is
                another one; on every rank.
        """
        here = world.current()
        self.model, self.optimizer = model, optimizer
        self._comm, self._presence = here.comm, here.presence
        with agreed(self._comm, ConfigError):
            self._check(here.topology.num_nodes)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named]
        require_equal(self._comm, [*lines, str(counts)], "parameters")
        broadcast_parameters(model.state_dict())
        self._own = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        self._first = [p.detach().double() for p in self._parameters]
        self._counts, self._updates = counts, 0
        self._shared = self._share()
        self._comm.barrier()
        self._kept: list[Tensor | None] = []
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        setattr(optimizer, METHOD_MARK, type(self).__name__)
        claim(type(self).__name__, self._parameters)
        self._versions = self._versions_now()

    def lost_updates(self) -> LostUpdates:
        """Compare the parameters with the sum of all ranks' steps. Collective; nobody steps then.

        Raises:
            ConfigError: ``counts`` is off, or a rank has written to parameters by other means
                than its steps, as by ``load_state_dict``; on every rank.
            NotFiniteError: parameters are not finite; on every rank.
        """
        if not self._counts:
            raise ConfigError("lost updates are known with counts=True alone; make Hogwild so")
        self._comm.barrier()
        self._require_countable()
        components, missing, moved = 0, 0.0, 0.0
        for p, first, own in zip(self._parameters, self._first, self._own, strict=True):
            total = self._comm.allreduce(own)
            weight = self._comm.allreduce(own.abs())
            gap = (first + total - p.detach().double()).abs()
            # Rounding of a sum of many steps, in the precision of the parameters.
            noise = torch.finfo(p.dtype).eps * (first.abs() + weight) * 4
            components += int((gap > noise).sum())
            missing += float(gap[gap > noise].sum())
            moved += float(weight.sum())
        updates = sum(self._comm.allgather_object(self._updates))
        self._comm.barrier()
        return LostUpdates(components, updates, missing / moved if moved else 0.0)

    def _versions_now(self) -> list[int]:
        return [p._version for p in self._parameters]  # noqa: SLF001 - autograd's

    def _require_countable(self) -> None:
        """Raise on all ranks unless steps alone have moved the parameters, to numbers."""
        both = zip(self._names, self._versions, self._versions_now(), strict=True)
        written = [name for name, before, now in both if before != now]
        text = (
            f"lost updates are the difference between parameters and the sum of steps, and "
            f"{', '.join(written[:3])} changed outside of step(); load before Hogwild is made, or "
            f"end the block and make another one after loading"
        )
        raise_if_any(self._comm.allgather_object(text if written else None), ConfigError)
        both_now = zip(self._names, self._parameters, strict=True)
        wrong = [name for name, p in both_now if not p.detach().isfinite().all()]
        text = (
            f"lost updates are told of finite parameters, {', '.join(wrong[:3])} have nan or inf; "
            f"take a smaller learning rate"
        )
        raise_if_any(self._comm.allgather_object(text if wrong else None), NotFiniteError)

    def close(self) -> None:
        """Give each rank parameters of its own, as they are, and remove the hooks. Collective."""
        if not self._hooks:
            return
        self._comm.barrier()  # nobody steps any more
        self._unhook()
        self._comm.barrier()

    def _unhook(self) -> None:
        if not self._hooks:
            return
        delattr(self.optimizer, METHOD_MARK)
        release(self._parameters)
        while self._hooks:
            self._hooks.pop().remove()
        for p in self._parameters:
            p.data = p.detach().clone()

    def _end_block(self) -> None:
        self.close()

    def _leave_block(self, error: BaseException | None) -> None:  # noqa: ARG002 - of others
        self._unhook()

    def _share(self) -> list[Tensor]:
        """Let the parameters of all ranks be those of rank 0, in node memory. Collective."""
        found = []
        for p in self._parameters:
            bucket = self._comm.new_bucket(p.numel(), p.dtype)
            home = (bucket.peers or (bucket.flat,))[0].view(p.shape)
            if self._comm.rank == 0:
                home.copy_(p.detach())
            p.data = home
            found.append(home)
        return found

    @torch.no_grad()
    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs.get("closure"):
            raise ConfigError("Hogwild takes no closure; call backward() before step()")
        self._check_settings()
        places = {id(p): n for n, p in enumerate(self._parameters)}
        self._kept = [p.grad for p in self._parameters]
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) in places:
                    number = places[id(p)]
                    if p.data_ptr() != self._shared[number].data_ptr():
                        raise ConfigError(
                            "parameters of Hogwild stay where they are in node memory, one was "
                            "replaced; change values in place"
                        )
                    self._add(p, number, float(group["lr"]) * (-1 if not group["maximize"] else 1))
                    p.grad = None  # an optimizer without gradients does nothing

    def _add(self, p: Tensor, number: int, factor: float) -> None:
        """Add to the elements that a gradient has, one by one."""
        grad = p.grad
        assert grad is not None
        before = p._version  # noqa: SLF001 - autograd's
        self._move(p, number, grad, factor)
        self._versions[number] += p._version - before  # noqa: SLF001

    def _move(self, p: Tensor, number: int, grad: Tensor, factor: float) -> None:
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values() * factor
            p.detach().index_add_(0, rows, values)
            if self._counts:
                self._own[number].index_add_(0, rows, values.double())
            self._updates += values.numel()
            return
        values = grad * factor
        p.detach().add_(values)
        if self._counts:
            self._own[number].add_(values)
        self._updates += values.numel()

    def _after_step(self) -> None:
        for p, grad in zip(self._parameters, self._kept, strict=bool(self._kept)):
            p.grad = grad
        self._kept = []

    def _check(self, num_nodes: int) -> None:
        require_model(self.model, self.optimizer)
        require_plain("Hogwild", self.optimizer)
        require_unclaimed("Hogwild", self.optimizer)
        if type(self.optimizer) is not SGD:
            raise ConfigError(
                f"Hogwild takes torch.optim.SGD, whose steps add up in any order, got "
                f"{type(self.optimizer).__name__}; take that, or AsyncSGD"
            )
        self._check_settings()
        if num_nodes > 1 or (self._comm.size > 1 and self._comm.levels is None):
            raise ConfigError(
                f"Hogwild is for ranks that share memory, these are on {num_nodes} nodes or share "
                f"none; run it on one node, or take AsyncSGD or Downpour"
            )
        if any(p.device.type != "cpu" for p in self.model.parameters()):
            raise ConfigError("Hogwild needs parameters on the CPU; move the model there")

    def _check_settings(self) -> None:
        for group in self.optimizer.param_groups:
            if group["momentum"] or group["weight_decay"]:
                raise ConfigError(
                    f"Hogwild steps touch the elements of their gradient alone, so momentum and "
                    f"weight_decay are 0, got {group['momentum']} and {group['weight_decay']}; "
                    f"leave them out"
                )
