"""Report of a rank about itself; the checks compare those of all ranks."""

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata

import torch

from hpctrain import __version__
from hpctrain.cluster import cores, env, process
from hpctrain.comm import mpi_library
from hpctrain.core.config import PREFIX, Settings
from hpctrain.doctor.ranks import allotted_cores, devices, network

OWN_TO_A_NODE = ("log_dir", "stage_dir")
"""Settings that name folders, which may differ between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank, as it sees itself."""

    host: str
    machine: str = ""
    """The kernel's number of this boot: hosts with the same one are one machine."""
    cores: tuple[int, ...] = (0,)
    """Affinity mask."""
    num_granted: int = 1
    """Cores of the host that the job may use, as far as the scheduler and the kernel tell."""
    num_siblings: int = 1
    """Hardware threads of a core."""
    quota: float | None = None
    """Cores' worth of time that the control groups allow; None for no limit."""
    threads: int | None = None
    """``OMP_NUM_THREADS``, where it is set: torch takes it over."""
    thread_level: str = "MULTIPLE"
    """What MPI granted."""
    visible: tuple[str, ...] = ()
    """The GPUs that this rank sees, under names that mean the same on its host."""
    by_torch: bool = False
    """Whether torch named the GPUs; else the environment."""
    fast_cards: tuple[str, ...] = ()
    """InfiniBand and its kin, with a live port."""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of hpctrain that all ranks should have in common."""
    tuning: Mapping[str, str] = field(default_factory=dict)
    """Variables of the MPI library and its network."""
    refusal: str = ""
    """Why the settings of this rank are not valid; empty where they are."""


def look(refusal: str = "", *, with_mpi: bool = True) -> RankReport:
    """Report on this process. Not collective.

    Args:
        refusal: what is wrong with the settings.
        with_mpi: whether the MPI library may be asked; else it is not loaded.
    """
    visible, by_torch = devices.visible()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return RankReport(
        host=socket.gethostname(),
        machine=process.identity().namespace[0],
        cores=cores.affinity(),
        num_granted=allotted_cores.num_granted(),
        num_siblings=allotted_cores.num_siblings(),
        quota=cores.quota(),
        threads=int(threads) if threads.isdigit() else None,
        thread_level=mpi_library.thread_level() if with_mpi else "MULTIPLE",
        visible=visible,
        by_torch=by_torch,
        fast_cards=network.fast_cards(),
        versions=_versions(with_mpi=with_mpi),
        settings=_settings(),
        tuning=env.tuning(),
        refusal=refusal,
    )


def _versions(*, with_mpi: bool) -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hpctrain": __version__,
        "numpy": metadata.version("numpy"),
    }
    if with_mpi:
        found |= {"mpi4py": metadata.version("mpi4py"), "MPI library": mpi_library.version()}
    return found


def _settings() -> dict[str, str]:
    names = (
        PREFIX + setting.name.upper()
        for setting in fields(Settings)
        if setting.name not in OWN_TO_A_NODE
    )
    return {name: os.environ[name] for name in names if name in os.environ}
