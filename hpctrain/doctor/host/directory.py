"""Check of a directory: data sets and checkpoints can live there."""

from hpctrain.core.finding import Finding
from hpctrain.core.units import GIB, format_bytes
from hpctrain.doctor.host.facts import DirectoryFacts, Facts, JobStep

CHECK = "directory"

FULL_BYTES = GIB
"""Less than this is soon used up by checkpoints."""

_WITHOUT_LOCKS = (
    "hpctrain reads and writes HDF5 without locks; for other programs "
    "export HDF5_USE_FILE_LOCKING=FALSE, or mount with locks (lustre: -o flock, nfs: lockd)"
)


def check(facts: Facts) -> list[Finding]:
    """Name what fails or hangs in each directory that was asked about."""
    return [found for each in facts.directories for found in _check(each)]


def _check(facts: DirectoryFacts) -> list[Finding]:
    where = f"{facts.path} ({facts.file_system})" if facts.file_system else str(facts.path)
    if facts.hung:
        return [_hung(where, facts.hung)]
    failed = [step for step in facts.steps if step.error]
    if failed:
        # One finding of a kind: where no locks are, HDF5 fails with them as well.
        kinds = {"lock" in step.name: step for step in reversed(failed)}
        return [_failed(where, step) for step in kinds.values()]
    if facts.free_bytes < FULL_BYTES:
        what = f"{where} has {format_bytes(facts.free_bytes)} left"
        return [Finding(CHECK, "note", what, "remove what is old: `hpctrain checkpoint prune`")]
    text = f"{where}: files, locks and HDF5 work, {format_bytes(facts.free_bytes)} free"
    return [Finding(CHECK, "ok", text)]


def _hung(where: str, step: str) -> Finding:
    if "lock" in step:
        return Finding(
            CHECK, "error", f"{where}: taking a lock hangs (step {step})", _WITHOUT_LOCKS
        )
    what = f"{where}: the step {step} does not end; the file server is slow or away"
    return Finding(CHECK, "error", what, "ask the site, and use another file system meanwhile")


def _failed(where: str, step: JobStep) -> Finding:
    if step.name == "list":
        do = "check the path; make it with `mkdir -p`, or get the right to read it"
        return Finding(CHECK, "error", f"{where} cannot be read: {step.error}", do)
    if step.name == "write":
        return Finding(
            CHECK,
            "warning",
            f"{where} cannot be written to: {step.error}",
            "data sets can be read from there; give runs and checkpoints another directory",
        )
    if "lock" in step.name:
        return Finding(CHECK, "warning", f"{where}: no locks: {step.error}", _WITHOUT_LOCKS)
    return Finding(
        CHECK,
        "error",
        f"{where}: HDF5 does not work there, even without locks: {step.error}",
        "pip install --force-reinstall h5py, or use another file system",
    )
