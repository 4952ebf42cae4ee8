"""Check of the job: its division, and whether its srun can start these ranks."""

import re
from collections.abc import Mapping

from hpctrain.cluster.env import job_id, launched, scheduler
from hpctrain.cluster.interface import srun_type
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.facts import Facts

CHECK = "job"
LAUNCHER = "launcher"

_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def ranks_per_node(environ: Mapping[str, str]) -> int | None:
    """Return how many ranks this node has or will have; None where nothing tells."""
    found = launched(environ)
    if found and found.local_size:
        return found.local_size
    step = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_ID" in environ else ""
    text = environ.get(step) or environ.get("SLURM_TASKS_PER_NODE", "")
    counts = [
        int(number)
        for number, times in _RUN.findall(text)
        for _ in range(int(times) if times else 1)
    ]
    node = environ.get("SLURM_NODEID", "0")
    if node.isdigit() and int(node) < len(counts):
        return counts[int(node)]
    return max(counts, default=None)


def check(facts: Facts) -> list[Finding]:
    """Tell the job and its division; name what srun would not pass on to the ranks."""
    environ, name = facts.environ, scheduler(facts.environ)
    if not name:
        return [Finding(CHECK, "ok", "no job: this looks like a login node or a workstation")]
    words = [f"{name} job {job_id(environ)}"]
    if nodes := environ.get("SLURM_JOB_NUM_NODES"):
        words.append(f"{nodes} nodes {environ.get('SLURM_JOB_NODELIST', '')}".strip())
    if count := ranks_per_node(environ):
        words.append(f"{count} tasks on this node")
    found = [Finding(CHECK, "ok", ", ".join(words))]
    if launched(environ) is None and (cores := _lost_cores(environ)):
        found.append(
            Finding(
                CHECK,
                "note",
                f"the job has {cores} cores for each task, but srun does not pass that on",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or say "
                "`srun --cpus-per-task=$SLURM_CPUS_PER_TASK`",
            )
        )
    return found


def check_launcher(facts: Facts) -> list[Finding]:
    """Tell who started this rank; before a launch, whether srun can."""
    environ, offered, library = facts.environ, facts.mpi.srun_types, facts.mpi.library
    found = launched(environ)
    if found:
        text = f"{found.name}: rank {found.rank} of {found.size} ({found.size_variable})"
        return [Finding(LAUNCHER, "ok", text)]
    if not offered or library is None:
        return [Finding(LAUNCHER, "ok", "no launcher: this process is alone")]
    needed = srun_type(library)
    if any(each.startswith(needed) for each in offered):
        text = f"no launcher: start ranks with `srun --mpi={needed}` or `hpctrain launch -n N`"
        return [Finding(LAUNCHER, "ok", text)]
    return [
        Finding(
            LAUNCHER,
            "warning",
            f"{library} needs `srun --mpi={needed}`, and this Slurm offers "
            f"{', '.join(offered)}: under srun every rank would be alone, or end at once",
            "start ranks by mpirun inside the job: `hpctrain launch -n N ...`, or "
            "`hpctrain submit --template mpirun`",
        )
    ]


def _lost_cores(environ: Mapping[str, str]) -> int | None:
    """Cores per task of an allocation that srun 22.05 and newer would not give its tasks."""
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    is_lost = text.isdigit() and int(text) > 1 and "SRUN_CPUS_PER_TASK" not in environ
    return int(text) if is_lost else None
