"""Data sets and checkpoints can live in a directory."""

from hpctrain.core.finding import Finding
from hpctrain.core.units import GIB, format_bytes
from hpctrain.doctor.checks.check import check, error, note, ok, warning
from hpctrain.doctor.checks.facts import DirectoryFacts, Facts

FULL_BYTES = GIB
"""Less than this is soon used up by checkpoints."""

_WITHOUT_LOCKS = (
    "hpctrain reads and writes HDF5 without locks; for other programs "
    "export HDF5_USE_FILE_LOCKING=FALSE, or mount with locks (lustre: -o flock, nfs: lockd)"
)


@check("directory")
def check_directories(facts: Facts) -> list[Finding]:
    """Name what fails or hangs in each directory that was asked about."""
    return [found for each in facts.directories for found in _judge(each)]


def _judge(facts: DirectoryFacts) -> list[Finding]:
    where = f"{facts.path} ({facts.file_system})" if facts.file_system else str(facts.path)
    if facts.hung:
        return [_hung(where, facts.hung)]
    failed = {step: refusal for step, refusal in facts.steps.items() if refusal}
    if failed:
        # One finding of a kind: where no locks are, HDF5 fails with them as well.
        kinds = {"lock" in step: step for step in reversed(failed)}
        return [_failed(where, step, failed[step]) for step in kinds.values()]
    if facts.free_bytes < FULL_BYTES:
        what = f"{where} has {format_bytes(facts.free_bytes)} left"
        return [note(what, "remove what is old: `hpctrain checkpoint prune`")]
    free = format_bytes(facts.free_bytes)
    return [ok(f"{where}: files, locks and HDF5 work, {free} free")]


def _hung(where: str, step: str) -> Finding:
    if "lock" in step:
        return error(f"{where}: taking a lock hangs (step {step})", _WITHOUT_LOCKS)
    what = f"{where}: the step {step} does not end; the file server is slow or away"
    return error(what, "ask the site, and use another file system meanwhile")


def _failed(where: str, step: str, refusal: str) -> Finding:
    if step == "list":
        do = "check the path; make it with `mkdir -p`, or get the right to read it"
        return error(f"{where} cannot be read: {refusal}", do)
    if step == "write":
        do = "data sets can be read from there; give runs and checkpoints another directory"
        return warning(f"{where} cannot be written to: {refusal}", do)
    if "lock" in step:
        return warning(f"{where}: no locks: {refusal}", _WITHOUT_LOCKS)
    do = "pip install --force-reinstall h5py, or use another file system"
    return error(f"{where}: HDF5 does not work there, even without locks: {refusal}", do)
