"""Functions of Horovod that need more than a name: ``run``, by ``hpctrain.run``, and ``env``."""

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
"""Arguments that concern Horovod's own messages and other hosts; ranks of one host need none."""


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
    """Call ``func(*args, **kwargs)`` on new ranks of this host, as ``horovod.run`` does.

    Not collective: one process calls it.

    Args:
        func: the function; what it returns must be picklable.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: how many ranks.
        np: the same, by its old name.
        hosts: this host with places enough, ``"localhost:4"``.
        others: what else ``horovod.run`` takes: None, or what matters on other hosts only.

    Returns:
        What the function returned, by rank.

    Raises:
        ConfigError: an argument asks for what ``hpctrain.run`` does not do.
        RankError, LaunchError, KeyboardInterrupt: see ``hpctrain.run``.
    """
    ranks = num_proc if np is None else np
    if asked := sorted(
        name for name in others.keys() - HARMLESS if others[name] not in (None, False)
    ):
        raise ConfigError(
            f"horovod.run starts its ranks by hpctrain.run, which has no {', '.join(asked)}; "
            "leave them out, or start the ranks by `hpctrain launch` or mpirun"
        )
    _require_this_host(hosts, ranks)
    # Horovod's modules, to which the function may refer, must be there before it is unpickled.
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
            f"horovod.run starts ranks on this host only, got {', '.join(others)}; "
            f"say `hpctrain launch -n {ranks} --hosts {hosts} python SCRIPT`"
        )


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set variables of the environment inside of a block; those that are None stay as they are."""
    values = {name: value for name, value in variables.items() if value is not None}
    with set_variables(values):
        yield
