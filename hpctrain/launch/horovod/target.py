"""Target of a wheel of Horovod, as its version and the name of its folder say it."""

import re
import sys
import sysconfig
from dataclasses import dataclass
from typing import Literal

from hpctrain.launch.horovod.mpi import NAMES, Mpi
from hpctrain.launch.horovod.sdist import VERSION

RECIPE = 1
"""Counts changes in how it is built: a wheel of an older recipe is not used again."""

Gpu = Literal["", "nccl"]

_LABEL = re.compile(rf"torch(.+?)\.({'|'.join(NAMES)})(\w[\w.]*?)(\.nccl)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The versions that a wheel fits to."""

    torch: str
    """With its local label: ``2.13.0+cpu``."""
    mpi: str
    """Its vendor, a key of ``NAMES``, and its version: ``openmpi5.0.11``."""
    place: str = ""
    """Tells MPI libraries of a site apart; empty for one of this environment."""
    gpu: Gpu = ""
    """What tensors on GPUs are reduced by."""
    python: str = ""
    """Such as ``cp311``."""
    machine: str = ""
    """Such as ``linux_x86_64``."""
    horovod: str = VERSION

    @property
    def key(self) -> str:
        """The folder of the wheel: another one as soon as any version differs."""
        parts = (f"horovod{self.horovod}", self.python, self.machine, f"torch{self.torch}")
        more = (self.mpi, self.place, self.gpu, f"r{RECIPE}")
        return "-".join(filter(None, (*parts, *more)))

    @property
    def label(self) -> str:
        """The local part of the wheel's version: ``torch2.13.0.cpu.openmpi5.0.11``."""
        return plain(".".join(filter(None, (f"torch{self.torch}", self.mpi, self.gpu))))


def target_of(torch: str, mpi: Mpi, gpu: Gpu = "") -> Target:
    """Return what a wheel built here and now is for."""
    threads = "t" if "t" in getattr(sys, "abiflags", "") else ""
    return Target(
        torch=torch,
        mpi=mpi.label,
        place=mpi.place,
        gpu=gpu,
        python=f"{sys.implementation.name[:1]}p{sys.version_info[0]}{sys.version_info[1]}{threads}",
        machine=re.sub(r"[-.]", "_", sysconfig.get_platform()),
    )


def parts_of(version: str) -> tuple[str, str]:
    """Read torch and MPI from the version of a wheel built here; empty for any other wheel.

    ``0.28.1+torch2.13.0.cpu.openmpi5.0.11`` gives ``2.13.0.cpu`` and ``openmpi5.0.11``.
    """
    match = _LABEL.fullmatch(version.partition("+")[2])
    return (match[1], f"{match[2]}{match[3]}") if match else ("", "")


def plain(text: str) -> str:
    """Write a version as it stands in a label: ``2.13.0+cpu`` as ``2.13.0.cpu``."""
    return re.sub(r"[^a-z0-9]+", ".", text.lower())


def name_of(mpi: str) -> str:
    """Write ``openmpi5.0.11`` for people: ``Open MPI 5.0.11``."""
    vendor = next((each for each in NAMES if mpi.startswith(each)), "")
    return f"{NAMES[vendor]} {mpi.removeprefix(vendor)}" if vendor else mpi
