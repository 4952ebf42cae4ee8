"""Replacements for functions of torch that support only the backends of torch.

Functions that cannot support this backend raise an error with an alternative.
"""

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join

from hpctrain.comm.process_group.group import HpctrainGroup
from hpctrain.comm.process_group.ordered import OrderedGroup
from hpctrain.comm.process_group.work import Message, Operation, Several
from hpctrain.core.errors import CommError
from hpctrain.core.torch_compat import (
    dynamo_disable,
    functional,
    leave_out_first_messages,
    leave_unrecorded,
    register_work,
    replace_builtin_hooks,
    resolve_group,
)


def adapt() -> None:
    """Replace functions of torch by versions that support ``HpctrainGroup``.

    A no-op the second time. Groups of other backends use the original functions.
    """
    if getattr(dist.monitored_barrier, "_knows_hpctrain", False):
        return
    _keep_dynamo_out()
    leave_unrecorded(HpctrainGroup)
    leave_out_first_messages(HpctrainGroup)
    _replace("monitored_barrier", _monitored_barrier)
    _replace("split_group", _split_group)
    _FUNCTIONAL.impl("all_gather_into_tensor_out", _gather_into, "CPU")
    _FUNCTIONAL.impl("batch_p2p_ops", _send_and_receive, "CPU")
    replace_builtin_hooks(_refusing)
    Join.notify_join_context = staticmethod(_keep_work(Join.notify_join_context))  # type: ignore[method-assign, assignment]


def _refusing(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``of_torch``, changed to reject C++ communication hooks for an ``HpctrainGroup``."""

    @functools.wraps(of_torch)
    def register(self: Any, comm_hook_type: Any) -> Any:
        if isinstance(self.process_group, HpctrainGroup):
            raise CommError(
                f"communication hooks must be in Python for the backend hpctrain, got the C++ "
                f"hook {comm_hook_type}; use a hook of "
                f"torch.distributed.algorithms.ddp_comm_hooks, for example "
                f"register_comm_hook(None, default_hooks.fp16_compress_hook)"
            )
        return of_torch(self, comm_hook_type)

    return register


def _keep_work(notify: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``notify``, changed to store the returned work in the model, since C++ does not."""

    @functools.wraps(notify)
    def call(joinable: Any) -> Any:
        work = notify(joinable)
        if work is not None:
            joinable.join_work = work
        return work

    return call


def _keep_dynamo_out() -> None:
    """Exclude from compilation by Dynamo the methods that C++ code of torch calls.

    Dynamo does not support access to the attributes of a process group.
    """
    for owner in (OrderedGroup, HpctrainGroup, Operation, Several, Message):
        for found in vars(owner).values():
            function = found.fget if isinstance(found, property) else found
            if inspect.isfunction(function):
                dynamo_disable(function)


def _replace(name: str, ours: Callable[..., Any]) -> None:
    of_torch = getattr(dist, name)
    signature = inspect.signature(of_torch)

    @functools.wraps(of_torch)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        group = next(iter(given.arguments.values())) or dist.group.WORLD
        if isinstance(group, HpctrainGroup):
            return ours(**{**given.arguments, next(iter(given.arguments)): group})
        return of_torch(*args, **options)

    call._knows_hpctrain = True  # type: ignore[attr-defined]  # noqa: SLF001
    setattr(dist, name, call)
    setattr(distributed_c10d, name, call)


def _monitored_barrier(
    group: HpctrainGroup,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,  # noqa: FBT001, FBT002
) -> None:
    group.monitored_barrier(timeout, wait_all_ranks)


def _split_group(
    parent_pg: HpctrainGroup,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
    **_: Any,
) -> Any:
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    members = dist.get_process_group_ranks(parent_pg)
    for ranks in split_ranks:
        if parent_pg.rank() in ranks:
            return dist.new_group(
                [members[rank] for rank in sorted(ranks)],
                timeout=timeout,
                use_local_synchronization=True,
                group_desc=group_desc,
            )
    return None


_FUNCTIONAL = torch.library.Library("_c10d_functional", "IMPL")
"""Replaces operations whose C++ implementation requires a C++ backend."""


def _gather_into(given: Tensor, _: int, group: Any, *, out: Tensor) -> Tensor:
    if not isinstance(group, dist.ProcessGroup):
        group = resolve_group(group)
    register_work(out, group.all_gather_single(out, given))
    return out


def _send_and_receive(
    kinds: list[str], peers: list[int], tags: list[int], tensors: list[Tensor], name: str
) -> list[Tensor]:
    each = zip(kinds, tensors, peers, tags, strict=True)
    return [getattr(functional, kind)(tensor, peer, tag, name) for kind, tensor, peer, tag in each]
