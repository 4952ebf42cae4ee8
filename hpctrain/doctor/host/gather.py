"""Collection of facts about this process and its machine."""

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster import resources
from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import MPI_WHEELS, copy_error, family, libmpi_of
from hpctrain.cluster.machine_load import LOAD_S, measured_for
from hpctrain.cluster.resources import CLASSES, live_adapters, rooms
from hpctrain.comm.node import kernel
from hpctrain.core import config
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.provenance import version_of
from hpctrain.doctor.checks.facts import (
    Adapter,
    CoreFacts,
    Facts,
    GpuFacts,
    LimitFacts,
    MemoryFacts,
    MpiFacts,
    NetworkFacts,
    Reached,
    VisibleGpus,
)
from hpctrain.doctor.checks.gpus import named
from hpctrain.doctor.checks.node import SHM
from hpctrain.doctor.host import gather_gpu_network
from hpctrain.doctor.host.directory_trial import try_directory
from hpctrain.launch.horovod_build import check_import
from hpctrain.launch.pmi import load
from hpctrain.launch.program import run_to_end
from hpctrain.launch.slurm import scheduler

PACKAGES = ("hpctrain", "torch", "numpy", "mpi4py", "h5py")
SRUN_TIMEOUT_S = 5.0
SMI_TIMEOUT_S = 20.0  # nvidia-smi starts slowly if the driver is not in persistence mode
_PAGE = 4096


def gather(
    environ: Mapping[str, str] = os.environ,
    directories: Sequence[Path] = (),
    *,
    lightly: bool = False,
) -> Facts:
    """Return the facts about this process and its machine; takes about a second.

    The function tries file operations in ``directories``, and removes the files that it creates.
    With ``lightly``, the function omits facts that are equal on all ranks of a node, such as the
    MPI library and the GPUs.
    """
    environ = dict(environ)
    versions = {"python": platform.python_version(), **{n: version_of(n) for n in PACKAGES}}
    if horovod := version_of("horovod"):
        versions["horovod"] = horovod
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus = gpus_of(environ) if num_gpus and not lightly else GpuFacts()
    libc = " ".join(platform.libc_ver())
    tried = tuple(try_directory(each) for each in directories)
    return Facts(
        environ=environ,
        host=socket.gethostname(),
        place=f"{platform.system()} {platform.machine()}, {libc}, {sys.prefix}",
        versions=versions,
        mpi=MpiFacts() if lightly else _mpi(environ),
        cores=CoreFacts(
            mask=resources.affinity(),
            quota=resources.quota(),
            num_granted=resources.num_granted(environ),
            num_siblings=resources.num_siblings(),
            load=None if lightly or launched(environ) else measured_for(LOAD_S),
        ),
        memory=_memory(environ),
        network=_network(),
        limits=LimitFacts(**resources.limits()),
        horovod_error="" if lightly else _horovod_error(environ),
        gpus=replace(gpus, num_devices=num_gpus),
        visible=VisibleGpus(names=named(environ)),
        gpu_network=gather_gpu_network.gather(environ, tried),
        directories=tried,
    )


def _mpi(environ: Mapping[str, str]) -> MpiFacts:
    try:
        mpi, error = load(environ), ""
    except LaunchError as failed:
        mpi, error = None, str(failed)
    library = mpi.library.resolve() if mpi else None
    return MpiFacts(
        library=library,
        error=error,
        reached=reached(environ),
        is_wheel=_is_of_wheel(library),
        srun_types=() if launched(environ) else _srun_types(environ),
    )


def _horovod_error(environ: Mapping[str, str]) -> str:
    """Load Horovod in a separate process; return the error and the remedy, or an empty text.

    The text is also empty if the engine is not Horovod.
    """
    try:
        if config.setting("engine", environ) != "horovod":
            return ""
    except ConfigError:  # the check of settings reports it
        return ""
    if version_of("horovod") is None:
        what = "Horovod must be installed for HPCTRAIN_ENGINE=horovod, but is not"
        return f"{what}; hpctrain horovod build"
    try:
        check_import(load(environ))
    except LaunchError as failed:
        return str(failed)
    return ""


def _is_of_wheel(library: Path | None) -> bool:
    own = library is not None and library.is_relative_to(sys.prefix)
    return own and any(map(version_of, MPI_WHEELS))


def _srun_types(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the valid values of ``srun --mpi=``; empty if Slurm does not answer."""
    try:
        done = scheduler.run(["srun", "--mpi=list"], environ, timeout_s=SRUN_TIMEOUT_S)
    except LaunchError:
        return ()
    return srun_types_of(done.stdout + done.stderr) if done.returncode == 0 else ()


def srun_types_of(text: str) -> tuple[str, ...]:
    """Return the names in the output of ``srun --mpi=list``.

    The output has one name per line, followed by a heading and version numbers.
    """
    words = text.replace("srun:", " ").replace(",", " ").split()
    known = ("none", "pmi", "cray", "openmpi")
    return tuple(dict.fromkeys(word for word in words if word.startswith(known)))


def gpus_of(environ: Mapping[str, str]) -> GpuFacts:
    """Return the facts that nvidia-smi reports, if nvidia-smi is installed."""
    names = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
    runtime = next(filter(None, map(version_of, names)), "")
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return GpuFacts(runtime=runtime)
    asked: list[list[str]] = [[], ["topo", "-m"], ["--query-gpu=uuid", "--format=csv,noheader"]]
    try:
        outputs = [
            run_to_end([program, *words], environ, timeout_s=SMI_TIMEOUT_S) for words in asked
        ]
    except (LaunchError, OSError) as failed:
        return GpuFacts(runtime=runtime, error=str(failed))
    table, topology, uuids = (each.stdout if each.returncode == 0 else "" for each in outputs)
    found = re.search(r"Driver Version: (\S+)\s+CUDA Version: ([\d.]+)", table)
    if not found:
        words = (outputs[0].stdout + outputs[0].stderr).strip().splitlines()
        return GpuFacts(runtime=runtime, error=words[0] if words else "no output")
    return GpuFacts(
        driver=found[1],
        cuda=found[2],
        runtime=runtime,
        uuids=tuple(uuids.split()),
        topology=re.sub(r"\x1b\[[\d;]*m", "", topology),  # remove terminal escapes
        has_peermem=Path("/sys/module/nvidia_peermem").exists(),
    )


def _memory(environ: Mapping[str, str]) -> MemoryFacts:
    try:
        size, _, free = shutil.disk_usage(SHM)
    except OSError:
        size, free = 0, 0
    functions = kernel.library()
    kernel_error = ""
    with suppress(ConfigError):  # the check of settings reports it
        kernel_error = kernel.why_off(environ)
    return MemoryFacts(
        rooms=tuple(rooms()),
        shm_bytes=size,
        shm_free_bytes=free,
        memfd_error=_memfd_error(),
        kernel_error=kernel_error,
        vector_bytes=functions.calls.hpctrain_vector_bytes() if functions else 0,
    )


def _memfd_error() -> str:
    """Create anonymous shared memory as ranks do; return the error, or an empty text."""
    try:
        descriptor = os.memfd_create("hpctrain-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, _PAGE)
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error)
    return ""


def _network() -> NetworkFacts:
    live = live_adapters()
    return NetworkFacts(
        adapters=tuple(
            Adapter(
                name=adapter.name,
                family=folder.name,
                is_live=adapter in live,
                speaks_ethernet=_speaks_ethernet(adapter),
            )
            for folder in CLASSES
            if folder.exists()
            for adapter in sorted(folder.iterdir())
        ),
        copy_error=copy_error(),
    )


def _speaks_ethernet(adapter: Path) -> bool:
    layers = [file.read_text().strip() for file in adapter.glob("ports/*/link_layer")]
    return bool(layers) and all(layer == "Ethernet" for layer in layers)


_VERSIONED = re.compile(r"\.so\.\d")
"""Name of a shared library; a ``libmpi.so`` that is no link to such a file is a linker script."""


def reached(environ: Mapping[str, str]) -> tuple[Reached, ...]:
    """Return the MPI libraries in LD_LIBRARY_PATH, and the library of the first mpirun in PATH."""
    found: dict[tuple[Path, str], Reached] = {}
    for each in (*_of_folders(environ), *_of_mpirun(environ)):
        found.setdefault((each.library, each.by), each)
    return tuple(found.values())


def libraries_in(folder: Path) -> list[Path]:
    """Return the resolved paths of the MPI libraries in a folder, one per MPI installation."""
    try:
        names = sorted(folder.glob("libmpi*.so*"), key=lambda path: len(path.name))
    except OSError:
        return []
    found = libmpi_of(f"- - - - - {path.absolute()}" for path in names)
    real = [path for each in found if _VERSIONED.search((path := each.resolve()).name)]
    by_tree = {(path.parent, family(path)): path for path in real}
    own = [path for path in by_tree.values() if family(path) != "abi"]
    return own or list(by_tree.values())


def _of_folders(environ: Mapping[str, str]) -> Iterator[Reached]:
    for word in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if word:
            for library in libraries_in(Path(word)):
                yield Reached(library=library, by="LD_LIBRARY_PATH")


def _of_mpirun(environ: Mapping[str, str]) -> Iterator[Reached]:
    word = shutil.which("mpirun", path=environ.get("PATH"))
    if word is None:
        return
    program = Path(word)
    # A link through /etc/alternatives to /usr/bin/orterun resolves to the tree of the library.
    for tree in dict.fromkeys((program.parent.parent, program.resolve().parent.parent)):
        for folder in (tree / "lib", tree / "lib64", *sorted((tree / "lib").glob("*-linux-gnu"))):
            for library in libraries_in(folder):
                yield Reached(library=library, by="mpirun", program=program)
                return
