"""``Hogwild``: the ranks of a node update shared parameters without locks."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hpctrain.async_sgd.requirements import first_not_finite, require_hookable
from hpctrain.async_sgd.step_hooks import StepHooks
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, raise_if_refused, require_equal
from hpctrain.comm.common_block import CommonBlock
from hpctrain.core.errors import ConfigError, NotFiniteError
from hpctrain.core.torch_compat import version_of
from hpctrain.runtime import world


class LostUpdates(NamedTuple):
    """Estimate of the updates that were overwritten by concurrent steps of other ranks."""

    components: int
    """Number of parameter elements that have lost at least one update."""
    updates: int  # number of updates of single elements, over all steps and ranks
    share: float  # sum of lost updates divided by the sum of all updates, in absolute values


class Hogwild(CommonBlock):
    """Lets the ranks of one node update shared parameters concurrently, without locks.

    The ranks share one copy of the parameters in node memory. A step adds ``-lr * gradient`` only
    to the elements that the gradient contains; a sparse gradient contains some of the rows.
    Ranks read parameters while other ranks write. Additions are not atomic: if two ranks update
    one element concurrently, one of the updates may be lost. Stores of single aligned elements are
    atomic: a reader gets the old or the new value.

    Hogwild is meant for sparse gradients, such as the gradients of ``nn.Embedding(sparse=True)``,
    because ranks then rarely update the same elements. For dense models the convergence theory
    does not hold, and cache lines move between cores in every step.

    The constructor is collective: it moves the parameters of rank 0 into node memory and hooks the
    optimizer.

    Args:
        model: module with equal parameters on every rank, on the CPU.
        optimizer: ``torch.optim.SGD`` without momentum and weight decay, so that steps may be
            added in any order; the learning rate may change, and differ between ranks.
        counts: whether ``lost_updates()`` is available; each rank then stores the initial
            parameters and the sum of its steps, both in float64.

    Raises:
        ConfigError: the ranks are on several nodes or share no memory, or the optimizer is not
            supported; on every rank.

    Source: Recht et al. 2011, "Hogwild!: a lock-free approach to parallelizing stochastic
    gradient descent", NeurIPS.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, counts: bool = True) -> None:
        here = world.current()
        self.model, self.optimizer = model, optimizer
        self._comm, self._presence = here.comm, here.presence
        with agreed(self._comm, ConfigError):
            require_hookable("Hogwild", model, optimizer)
            self._check(here.topology.num_nodes)
            self._names: dict[Tensor, str] = {
                p: name for name, p in model.named_parameters() if p.requires_grad
            }
            self._check_parameters()
        lines = [f"{name} {tuple(p.shape)} {p.dtype}" for p, name in self._names.items()]
        require_equal(self._comm, [*lines, str(counts)], "parameters")
        broadcast_parameters(model.state_dict())
        counted = [*self._names] if counts else []
        self._own = {p: torch.zeros_like(p, dtype=torch.float64) for p in counted}
        self._first = {p: p.detach().double().clone() for p in counted}
        self._sizes = {
            p: torch.zeros([*p.shape[:1], *[1] * (p.dim() - 1)], dtype=torch.float64)
            for p in counted
        }
        """Largest absolute value of each row, summed over steps; a bound of rounding errors."""
        self._updates = 0
        self._places = {p: self._share(p) for p in self._names}
        self._comm.barrier()
        self._hooks = StepHooks("Hogwild", optimizer, [*self._names], self._on_step)
        self._versions = self._versions_now()

    def lost_updates(self) -> LostUpdates:
        """Estimate the lost updates from the sum of all ranks' steps. Collective, between steps.

        Raises:
            ConfigError: ``counts`` is False, or a rank has written to parameters outside of a
                step, for example by ``load_state_dict``; on every rank.
            NotFiniteError: a parameter is not finite; on every rank.
        """
        if self._own.keys() != self._names.keys():
            raise ConfigError(
                "counts must be True for lost_updates(), got False; make Hogwild with counts=True"
            )
        self._comm.barrier()
        self._require_countable()
        components, missing, moved = 0, 0.0, 0.0
        for p, own in self._own.items():
            total, weight = self._comm.allreduce(own), self._comm.allreduce(own.abs())
            gap = (self._first[p] + total - p.detach().double()).abs()
            # Each step rounds by half an ulp of its result, and so does each addition to the sum.
            noise = 4 * (self._first[p].abs() + weight) + self._comm.allreduce(self._sizes[p])
            noise *= torch.finfo(p.dtype).eps
            components += int((gap > noise).sum())
            missing += float(gap[gap > noise].sum())
            moved += float(weight.sum())
        updates = sum(self._comm.allgather_object(self._updates))
        self._comm.barrier()
        return LostUpdates(components, updates, missing / moved if moved else 0.0)

    def _versions_now(self) -> dict[Tensor, int]:
        return {p: version_of(p) for p in self._names}

    def _require_countable(self) -> None:
        """Raise on all ranks if a parameter was changed outside of steps, or is not finite."""
        now = self._versions_now()
        written = [name for p, name in self._names.items() if now[p] != self._versions[p]]
        wrong = [name for p, name in self._names.items() if not p.detach().isfinite().all()]
        text = (
            f"parameters must change in step() only for lost_updates(), but "
            f"{', '.join(written[:3])} changed outside of step(); load parameters before Hogwild "
            f"is made, or end the block and make another Hogwild after loading"
        )
        raise_if_refused(self._comm, text if written else None, ConfigError)
        text = (
            f"parameters must be finite for lost_updates(), but {', '.join(wrong[:3])} have nan "
            "or inf; restart with a smaller learning rate"
        )
        raise_if_refused(self._comm, text if wrong else None, NotFiniteError)

    def close(self) -> None:
        """Give each rank a private copy of the parameters, and remove the hooks. Collective."""
        if self._hooks.are_on:
            self._comm.barrier()  # after the last step of every rank
            self._unhook()
            self._comm.barrier()

    def _unhook(self) -> None:
        if self._hooks.are_on:
            self._hooks.remove()
            for p in self._names:
                p.data = p.detach().clone()

    def _end_block(self) -> None:
        self.close()

    def _leave_block(self, error: BaseException | None) -> None:
        del error  # the same after an error
        self._unhook()

    def _share(self, p: Tensor) -> int:
        """Move a parameter to node memory, with the values of rank 0; return its address.

        Collective.
        """
        bucket = self._comm.new_bucket(p.numel(), p.dtype)
        home = (bucket.peers or (bucket.flat,))[0].view(p.shape)
        if self._comm.rank == 0:
            home.copy_(p.detach())
        p.data = home
        return p.data_ptr()

    @torch.no_grad()
    def _on_step(self) -> None:
        if self._presence is not None:
            self._presence.check(())  # steps contain no other call that detects lost ranks
        self._check_settings()
        self._check_parameters()
        if wrong := first_not_finite(self._names.values(), [p.grad for p in self._names]):
            raise NotFiniteError(
                f"gradients must be finite, but the gradient of {wrong} on rank {self._comm.rank} "
                "has NaN or inf; restart from a checkpoint with a smaller learning rate, or do "
                "not call step() with such a gradient"
            )
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p in self._names:
                    if p.data_ptr() != self._places[p]:
                        raise ConfigError(
                            "parameters of Hogwild must remain in node memory, but "
                            f"{self._names[p]} was replaced; change its values in place"
                        )
                    self._add(p, p.grad, group["lr"] * (1 if group["maximize"] else -1))

    def _add(self, p: Tensor, grad: Tensor, factor: float) -> None:
        """Add ``factor * grad`` to the parameter ``p``, and count the updates."""
        before = version_of(p)
        grad = grad.coalesce() if grad.is_sparse else grad
        values = (grad.values() if grad.is_sparse else grad) * float(factor)
        rows = grad.indices()[0] if grad.is_sparse else ...
        for into in (p, self._own[p]) if p in self._own else (p,):
            if grad.is_sparse:
                into.index_add_(0, grad.indices()[0], values.to(into.dtype))
            else:
                into.add_(values)
            # Rounding errors of a float64 sum of a narrower parameter are negligible.
            if p in self._own and into.dtype is p.dtype and values.numel():
                self._sizes[p][rows] += _largest(into[rows])
        self._updates += values.numel()
        self._versions[p] += version_of(p) - before

    def _check(self, num_nodes: int) -> None:
        if type(self.optimizer) is not SGD:
            raise ConfigError(
                "the optimizer of Hogwild must be torch.optim.SGD, whose steps may be added in "
                f"any order, got {type(self.optimizer).__name__}; use torch.optim.SGD, or "
                "AsyncSGD instead of Hogwild"
            )
        self._check_settings()
        if num_nodes > 1 or (self._comm.size > 1 and self._comm.node is None):
            raise ConfigError(
                f"the ranks of Hogwild must share the memory of one node, but they "
                f"{f'are on {num_nodes} nodes' if num_nodes > 1 else 'share none'}; start all "
                f"ranks on one node, see hpctrain doctor, or use AsyncSGD or Downpour"
            )
        if any(p.device.type != "cpu" for p in self.model.parameters()):
            raise ConfigError(
                "the parameters of Hogwild must be on the CPU, but some are on another device; "
                "call model.cpu() before the optimizer is made"
            )

    def _check_settings(self) -> None:
        for group in self.optimizer.param_groups:
            if group["momentum"] or group["weight_decay"]:
                raise ConfigError(
                    "momentum and weight_decay of the optimizer must be 0 with Hogwild, whose "
                    f"steps change only elements that have a gradient, got {group['momentum']} "
                    f"and {group['weight_decay']}; leave both out"
                )

    def _check_parameters(self) -> None:
        trained = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        if frozen := [name for p, name in self._names.items() if not p.requires_grad]:
            raise ConfigError(
                f"parameters must not be frozen inside the block of Hogwild, but {frozen[0]} was; "
                f"end the block, freeze the parameter, and begin another block"
            )
        if num_others := sum(p not in self._names for p in trained):
            raise ConfigError(
                "all parameters of the optimizer must be trainable parameters of the model at "
                f"the start of the block, but {num_others} of {len(trained)} are not; pass the "
                "model that contains all of them, or end the block before parameters are added "
                "or unfrozen, and begin another block"
            )


def _largest(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each row, of shape ``(len(rows), 1, ..., 1)``."""
    within = [*range(1, rows.dim())]
    if not within:
        return rows.abs()
    return torch.maximum(rows.amax(within, keepdim=True), -rows.amin(within, keepdim=True))
