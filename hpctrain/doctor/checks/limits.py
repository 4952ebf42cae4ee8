"""Check of the limits of open files and of threads."""

import math

from hpctrain.cluster.env import launched, ranks_per_node, slurm, tasks_of_nodes
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import note, ok, plural, warning
from hpctrain.doctor.checks.facts import Facts
from hpctrain.doctor.checks.network import slow_settings

# Measured with Open MPI 5: a rank has 20 descriptors, one for each TCP peer, and four threads in
# addition to those of torch; mpirun has 20 descriptors and three for each rank of its node.
BASE_FILES = 64  # includes files of data
FILES_PER_RANK = 3
PEERS_PER_ROUND = 5  # dissemination, trees and doubling over all ranks and on the rails
BASE_THREADS = 8


def check_limits(facts: Facts) -> list[Finding]:
    """Report limits of descriptors and of threads that are too low for the ranks of the run."""
    environ, limits = facts.environ, facts.limits
    local, launch = ranks_per_node(environ) or 1, launched(environ)
    tasks = sum(tasks_of_nodes(slurm("tasks_per_node", environ)))
    size = max(launch.size if launch else tasks, local)
    is_fast = any(one.is_fast for one in facts.network.adapters) and not slow_settings(environ)
    by_tcp = 0 if is_fast or size == local else size - 1  # the largest number of TCP peers
    peers = min(by_tcp, PEERS_PER_ROUND * (size - 1).bit_length())
    files = BASE_FILES + max(FILES_PER_RANK * local, peers)
    threads = BASE_THREADS * local + facts.cores.num_granted
    run = f"a run of {plural(size, 'rank')}, {local} on this node"
    found = []
    if limits.files < files:
        rule = f"a process must be able to open {files} files for {run}"
        what = f"{rule}, got a limit of {limits.files}"
        found.append(
            warning(f"{what}: MPI fails in init()", _raise_files(files, limits.most_files))
        )
    elif limits.files < (all_files := BASE_FILES + by_tcp):
        what = (
            f"a limit of {limits.files} open files is enough for data parallel training, but "
            f"all-to-all operations over TCP open a connection to each rank, {all_files} files"
        )
        found.append(note(what, _raise_files(all_files, limits.most_files)))
    if limits.threads < threads:
        what = f"a user must be able to start {threads} threads on a node for {run}"
        found.append(
            warning(
                f"{what}, got a limit of {limits.threads}: torch or MPI fails to start threads",
                f"`ulimit -u {threads}` before the launch, a larger limit of processes of the "
                "container (docker run --pids-limit), or fewer ranks on each node",
            )
        )
    text = f"{_limit(limits.files)} open files ({files} needed), {_limit(limits.threads)} threads"
    return found or [ok(f"{text} ({threads} needed) for {run}")]


def _raise_files(num: int, most: float) -> str:
    if most < num:
        return (
            f"ask the administrators for a hard limit of {num} open files, now {most}: "
            "LimitNOFILE of slurmd or docker run --ulimit nofile"
        )
    return f"`ulimit -n {num}` before the launch, with Slurm also `srun --propagate=NOFILE`"


def _limit(num: float) -> str:
    return "any number of" if math.isinf(num) else str(num)
