"""Check of engines: Horovod fits to the torch and MPI of today."""

from hpctrain.cluster.libraries import family
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.facts import Facts
from hpctrain.launch.installed_horovod import Installed, plain
from hpctrain.launch.pmi import name_of

CHECK = "engines"

BUILD = "hpctrain horovod build"

_FAMILIES = {"openmpi": "Open MPI", "mpich": "MPICH", "abi": "the standard ABI"}


def check(facts: Facts) -> list[Finding]:
    """Name a Horovod that was built for something else, and one that is asked for and absent."""
    found = facts.horovod
    is_wanted = facts.environ.get("HPCTRAIN_ENGINE", "").strip().lower() == "horovod"
    if found is None:
        if is_wanted:
            what = "HPCTRAIN_ENGINE=horovod, and Horovod is not installed"
            return [Finding(CHECK, "error", what, BUILD)]
        return [Finding(CHECK, "ok", f"hpctrain's own; Horovod by `{BUILD}`")]
    differences = [*_torch(facts, found), *_mpi(facts, found)]
    if not differences:
        text = f"hpctrain's own; Horovod {found.version}, built for {_built_for(found)}"
        return [Finding(CHECK, "ok", text)]
    what = f"Horovod {found.version} does not fit: {'; '.join(differences)}"
    # Nobody runs on it yet: it is in nobody's way.
    return [Finding(CHECK, "error" if is_wanted else "warning", what, BUILD)]


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


def _built_for(found: Installed) -> str:
    mpi = name_of(found.mpi) if found.mpi else f"a {found.needs}"
    return f"torch {found.torch or 'of any version'} and {mpi}"
