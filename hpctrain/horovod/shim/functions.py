"""Functions of Horovod without a counterpart in hpctrain: ``run`` and ``env``."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from hpctrain.cluster.env import variables as set_variables
from hpctrain.core.errors import ConfigError
from hpctrain.horovod.shim.modules import install
from hpctrain.launch.mpiexec import check_hosts
from hpctrain.runtime.run import run as hpctrain_run

HARMLESS = {"disable_cache", "ssh_port", "start_timeout", "use_gloo", "use_mpi", "verbose"}
"""Arguments that are ignored, because they only affect Horovod's output, or other hosts."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on new ranks of this host, like ``horovod.run``.

    Not collective.

    Args:
        func: function to call; its result must be picklable.
        args: positional arguments of ``func``.
        kwargs: keyword arguments of ``func``.
        num_proc: number of ranks.
        np: old name of ``num_proc``.
        hosts: None, or this host with enough slots, such as ``"localhost:4"``.
        others: other arguments of ``horovod.run``. Arguments in ``HARMLESS`` are ignored; the rest
            must be None or False.

    Returns:
        The results of the function, by rank.

    Raises:
        ConfigError: an argument requests a feature that ``hpctrain.run`` does not have.
        RankError, LaunchError, KeyboardInterrupt: see ``hpctrain.run``.
    """
    ranks = num_proc if np is None else np
    if unsupported := sorted(
        name for name in others.keys() - HARMLESS if others[name] not in (None, False)
    ):
        raise ConfigError(
            f"horovod.run can only have arguments of hpctrain.run, got {', '.join(unsupported)}; "
            "leave them out, or start the ranks by `hpctrain launch` or mpirun"
        )
    _require_this_host(hosts, ranks)
    # The function may refer to Horovod's modules, so each rank installs the shim before
    # unpickling.
    call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    return hpctrain_run(_call, (call,), np=ranks)


def _call(call: bytes) -> Any:
    install()
    func, args, kwargs = cloudpickle.loads(call)
    return func(*args, **kwargs)


def _require_this_host(hosts: str | None, ranks: int) -> None:
    if hosts is None:
        return
    check_hosts(hosts, ranks, None)
    here = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}
    others = [entry for entry in hosts.split(",") if entry.partition(":")[0] not in here]
    if others:
        raise ConfigError(
            f"horovod.run can start ranks on this host only, got {', '.join(others)}; "
            f"use `hpctrain launch -n {ranks} --hosts {hosts} python SCRIPT`"
        )


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables during a block; None leaves a variable unchanged."""
    values = {name: value for name, value in variables.items() if value is not None}
    with set_variables(values):
        yield
