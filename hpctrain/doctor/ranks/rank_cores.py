"""Affinity masks and threads of the ranks that share a host."""

from collections.abc import Sequence

from hpctrain.core.finding import Finding
from hpctrain.core.units import format_numbers, format_ranks
from hpctrain.doctor.ranks.report import RankReport
from hpctrain.doctor.ranks.shown import few

MASKS, THREADS = "cores of ranks", "threads of ranks"


def check_masks(reports: Sequence[RankReport]) -> list[Finding]:
    """Find ranks that take turns on cores, and ranks that are kept from cores of their job."""
    findings = []
    for host, ranks in _hosts(reports).items():
        crowded = _crowded(ranks, reports)
        if crowded:
            mask = {core for rank in crowded for core in reports[rank].cores}
            findings.append(
                Finding(
                    MASKS,
                    "warning",
                    f"{format_ranks(crowded)} on {host} take turns on {_cores(len(mask))} (mask "
                    f"{format_numbers(mask)})",
                    "start fewer ranks, or give each its own core: srun --cpus-per-task=N "
                    "--cpu-bind=cores, mpirun --bind-to none",
                )
            )
            continue
        narrow = [r for r in ranks if len(reports[r].cores) < reports[r].num_granted // len(ranks)]
        if narrow:
            first = reports[narrow[0]]
            one_core = len(first.cores) <= first.num_siblings  # more may be what was wanted
            findings.append(
                Finding(
                    MASKS,
                    "warning" if one_core else "note",
                    f"{format_ranks(narrow)} on {host} may use {len(first.cores)} of "
                    f"{_cores(first.num_granted)} (mask {format_numbers(first.cores)}), "
                    f"{first.num_granted // len(ranks)} are there for each",
                    "pass the cores on: srun --cpus-per-task=$SLURM_CPUS_PER_TASK (srun does not "
                    "take it from sbatch), mpirun --bind-to none, no taskset",
                )
            )
    counts = sorted({len(report.cores) for report in reports})
    told = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return few(findings) or [Finding(MASKS, "ok", f"{told} for each rank, enough for all")]


def check_threads(reports: Sequence[RankReport]) -> list[Finding]:
    """Find hosts where ``OMP_NUM_THREADS`` asks for more threads than there are cores."""
    findings = []
    for host, ranks in _hosts(reports).items():
        asked = [rank for rank in ranks if reports[rank].threads is not None]
        threads = sum(reports[rank].threads or 0 for rank in asked)
        cores = len({core for rank in asked for core in reports[rank].cores})
        room = min(cores, int(reports[ranks[0]].quota or cores)) or 1
        alone = next((r for r in asked if (reports[r].threads or 0) > len(reports[r].cores)), None)
        if threads <= max(room, len(asked)) and alone is None:
            continue
        each = max(1, room // len(asked))
        findings.append(
            Finding(
                THREADS,
                "warning",
                f"{format_ranks(asked)} on {host} start {threads} threads on {_cores(room)} "
                f"(OMP_NUM_THREADS={reports[asked[0]].threads})",
                f"leave OMP_NUM_THREADS out: hpctrain takes what is there; or set it to {each}",
            )
        )
    if findings:
        return few(findings)
    chosen = any(report.threads is not None for report in reports)
    how = "OMP_NUM_THREADS fits the cores" if chosen else "chosen by the cores of each rank"
    return [Finding(THREADS, "ok", how)]


def _hosts(reports: Sequence[RankReport]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        found.setdefault(report.host, []).append(rank)
    return found


def _crowded(ranks: Sequence[int], reports: Sequence[RankReport]) -> list[int]:
    """Return the ranks of a host that have fewer cores together than they are."""
    found: set[int] = set()
    for rank in ranks:
        mask = set(reports[rank].cores)
        peers = [other for other in ranks if mask & set(reports[other].cores)]
        if len(peers) > len({core for other in peers for core in reports[other].cores}):
            found.update(peers)
    return sorted(found)


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number != 1)}"
