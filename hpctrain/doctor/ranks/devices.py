"""No two ranks of a node take the same GPU."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks
from hpctrain.doctor.ranks.shown import few

if TYPE_CHECKING:
    from hpctrain.cluster.topology import Topology
    from hpctrain.doctor.ranks.report import RankReport

VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Where launchers say which GPUs a rank may use."""

CHECK = "devices"


def visible(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], bool]:
    """Return the GPUs that this process sees, and whether torch has named them.

    Torch's names are the same in all processes of a machine. Those of the environment are only
    where no container or control group numbers the GPUs anew.
    """
    if torch.cuda.is_available():
        numbers = range(torch.cuda.device_count())
        return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in numbers), True
    environ = os.environ if environ is None else environ
    text = next((environ[name] for name in VARIABLES if environ.get(name)), "")
    return tuple(name.strip() for name in text.split(",") if name.strip()), False


def check(reports: "Sequence[RankReport]", topology: "Topology") -> list[Finding]:
    """Compare what the ranks of each node take: the one they see, or that of their local rank."""
    if not any(report.visible for report in reports):
        return [Finding(CHECK, "ok", "no rank sees a GPU: the CPU calculates")]
    findings = []
    for ranks, host in zip(topology.nodes, topology.hosts, strict=True):
        takers: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            seen = reports[rank].visible
            if seen:
                takers.setdefault(seen[number % len(seen)], []).append(rank)
        for device, sharing in takers.items():
            if len(sharing) > 1:
                findings.append(_shared(device, sharing, host, reports))
        blind = [rank for rank in ranks if not reports[rank].visible]
        if blind and len(blind) < len(ranks):
            findings.append(
                Finding(
                    CHECK,
                    "warning",
                    f"{format_ranks(blind)} on {host} see no GPU, the other ranks there do",
                    "ask for a GPU for every rank: srun --gpus-per-task=1",
                )
            )
    if findings:
        return few(findings)
    most, least = (f(len(report.visible) for report in reports) for f in (max, min))
    seen_by = f"{least}" if least == most else f"{least} to {most}"
    if not any(report.by_torch for report in reports):
        what = f"the environment gives {seen_by} GPUs to each rank, and torch sees none of them"
        return [Finding(CHECK, "note", what)]
    return [Finding(CHECK, "ok", f"each rank has a GPU of its own among the {seen_by} it sees")]


def _shared(
    device: str, ranks: "Sequence[int]", host: str, reports: "Sequence[RankReport]"
) -> Finding:
    certain = all(reports[rank].by_torch for rank in ranks)
    source = "" if certain else ", as the environment numbers them"
    return Finding(
        CHECK,
        "error" if certain else "warning",
        f"{format_ranks(ranks)} on {host} take the same GPU {device}{source}",
        "give each rank its own: srun --gpus-per-task=1, or start as many ranks on a node as "
        "there are GPUs and set the same CUDA_VISIBLE_DEVICES for all of them",
    )
