"""All ranks together for as long as they are looked at, without a word in the global world."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError, LaunchError, NodeMemoryError
from hpctrain.core.finding import Finding
from hpctrain.runtime.abort import install, leave


@contextmanager
def connected(settings: Settings) -> Iterator[tuple[Connection, list[Finding]]]:
    """Connect all ranks as a training would, and let go of them at the end. Collective.

    What the settings force and cannot be had becomes a finding, and the ranks go on without.

    Args:
        settings: of this rank; those of rank 0 decide.

    Raises:
        LaunchError: the launcher, the MPI library and the world do not fit together.
    """
    ranks = find_world()
    # An error on its way out finds the hooks still there, and ends all ranks.
    hooks = install(ranks, settings.log_dir) if ranks else None
    threads = torch.get_num_threads()
    found, findings = _connect(partial(connect, ranks), settings)
    yield found, findings
    torch.set_num_threads(threads)
    if found.presence is not None and hooks is not None:
        leave(found.presence, hooks)
    found.comm.close()
    if hooks is not None:
        hooks.uninstall()


def _connect(
    connect_with: Callable[[Settings], Connection], settings: Settings
) -> tuple[Connection, list[Finding]]:
    try:
        return connect_with(settings), []
    except ConfigError as error:
        findings = [
            Finding("plan", "error", str(error), "leave HPCTRAIN_PLAN out, or measure anew")
        ]
    except NodeMemoryError as error:
        findings = [Finding("node memory", "error", str(error), "set HPCTRAIN_SHARED_MEMORY=auto")]
    except LaunchError as error:  # there is no Horovod that works
        remedy = "`hpctrain horovod build`, or HPCTRAIN_ENGINE=hpctrain"
        settings = replace(settings, engine="hpctrain")
        findings = [Finding("engine", "error", str(error), remedy)]
    return connect_with(replace(settings, plan=None, shared_memory="auto")), findings
