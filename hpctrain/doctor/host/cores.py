"""May a rank use the cores it was given, and do its threads fit on them?"""

from hpctrain.cluster.preflight import threads_for
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_numbers
from hpctrain.doctor.host.facts import Facts
from hpctrain.doctor.host.job import ranks_per_node

CHECK = "cores"
THREADS = "threads"

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check(facts: Facts) -> list[Finding]:
    """Name a mask that leaves cores of the job idle."""
    mask, given = facts.cores.mask, num_given(facts)
    ranks = ranks_per_node(facts.environ) or 1
    asked = _number(facts, "SLURM_CPUS_PER_TASK")
    text = f"{len(mask)} of {facts.cores.num_online} cores (mask {format_numbers(mask)})"
    if len(mask) == 1 and given > ranks:
        return [
            Finding(
                CHECK,
                "warning",
                f"this process may use one core only, number {mask[0]}, where {given} cores are "
                f"for {ranks} rank{'s' * (ranks != 1)}: threads, loading and sending take turns",
                f"srun --cpus-per-task={given // ranks} (or --cpu-bind=none), mpirun --bind-to "
                "none, or `hpctrain launch -n N ...`; in a container --cpuset-cpus",
            )
        ]
    if asked and len(mask) < min(asked, given // ranks):
        return [
            Finding(
                CHECK,
                "warning",
                f"the job asked for {asked} cores per task, this rank may use {len(mask)} "
                f"(mask {format_numbers(mask)})",
                "srun --cpus-per-task=$SLURM_CPUS_PER_TASK: srun does not take it from the job",
            )
        ]
    if facts.cores.quota is not None:
        text += f", time for {facts.cores.quota:g} of them"
    return [Finding(CHECK, "ok", text)]


def check_threads(facts: Facts) -> list[Finding]:
    """Name variables that make more threads than a rank has cores, or far fewer."""
    each = cores_each(facts)
    found = []
    for name in _THREADS:
        threads = _number(facts, name)
        if threads is None or threads == each:
            continue
        what = f"{name}={threads} and a rank has {each} core{'s' * (each != 1)}"
        if threads > each:
            what, level = f"{what}: threads take turns and wait for each other", "warning"
        else:
            what, level = f"{what}: {each - threads} of them idle", "note"
        do = f"export {name}={each}, or unset it: hpctrain then takes what fits"
        found.append(Finding(THREADS, "warning" if level == "warning" else "note", what, do))
    return found or [Finding(THREADS, "ok", f"{each} for each rank")]


def num_given(facts: Facts) -> int:
    """Return the cores of this node that are ours: those of the job, or of the machine."""
    on_node = _number(facts, "SLURM_CPUS_ON_NODE") or facts.cores.num_online
    given = min(on_node, facts.cores.num_online)
    return given if facts.cores.quota is None else max(1, min(given, int(facts.cores.quota)))


def cores_each(facts: Facts) -> int:
    """Return the cores of one rank: all of its mask, or its share of a mask that all have."""
    ranks, size = ranks_per_node(facts.environ) or 1, len(facts.cores.mask)
    is_shared = size * ranks > num_given(facts)
    return threads_for(size, ranks if is_shared else 1, facts.cores.quota)


def _number(facts: Facts, name: str) -> int | None:
    """Read a variable as a number; of a list, such as ``4,2`` for nested threads, its first."""
    text = facts.environ.get(name, "").partition(",")[0]
    return int(text) if text.isdigit() and int(text) > 0 else None
