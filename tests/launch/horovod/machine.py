"""A machine that has all that building Horovod takes, to take things away from."""

from pathlib import Path

from hpctrain.core.units import GIB
from hpctrain.launch.horovod.mpi import Mpi
from hpctrain.launch.horovod.tools import Compiler, Tools

MPI = Mpi(vendor="openmpi", version="5.0.11", library=Path("/opt/mpi/lib/libmpi.so.40.40.11"))

WHOLE = Tools(
    torch="2.13.0+cpu",
    compiler=Compiler(path=Path("/usr/bin/c++")),
    cmake=Path("/usr/bin/cmake"),
    maker=Path("/usr/bin/make"),
    mpi=MPI,
    mpicxx=Path("/opt/mpi/bin/mpicxx"),
    memory_bytes=16 * GIB,
    num_cores=4,
    disk_bytes=16 * GIB,
)


def executable(path, text):
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
