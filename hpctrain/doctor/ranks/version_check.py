"""Versions and settings that all ranks should have in common."""

from collections.abc import Callable, Mapping, Sequence

from hpctrain.core.finding import Finding, Level
from hpctrain.core.units import format_ranks
from hpctrain.doctor.ranks.report import RankReport

VERSIONS, SETTINGS = "versions", "settings"

UNSET = "not set"
SHOWN = 4
"""Different values that are told."""


def check_versions(reports: Sequence[RankReport]) -> list[Finding]:
    """Find packages and libraries of which the ranks have different versions."""
    findings = [
        Finding(
            VERSIONS,
            "error",
            f"{name} differs: {told}",
            "start all ranks from one environment, on a file system that all nodes see, or staged "
            "to each node from one archive; look for modules and PATH in the nodes' start files",
        )
        for name, told in _differences(reports, lambda report: report.versions)
    ]
    told = ", ".join(f"{name} {version}" for name, version in reports[0].versions.items())
    return findings or [Finding(VERSIONS, "ok", f"the same on all ranks: {told}")]


def check_settings(reports: Sequence[RankReport]) -> list[Finding]:
    """Find settings that are not valid, or differ between ranks."""
    refusals: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.refusal:
            refusals.setdefault(report.refusal, []).append(rank)
    findings = [
        Finding(
            SETTINGS, "error", f"{text} ({format_ranks(ranks)})", "correct it, or leave it out"
        )
        for text, ranks in refusals.items()
    ]
    findings += _different(reports, lambda report: report.settings, "warning")
    findings += _different(reports, lambda report: report.tuning, "note")
    return findings or [Finding(SETTINGS, "ok", "the same on all ranks")]


def _different(
    reports: Sequence[RankReport], of: Callable[[RankReport], Mapping[str, str]], level: Level
) -> list[Finding]:
    return [
        Finding(
            SETTINGS,
            level,
            f"{name} differs between ranks, {told}",
            "set it for all of them: mpirun -x NAME for Open MPI, mpiexec -genv for MPICH; srun "
            "passes on the whole environment unless --export says less",
        )
        for name, told in _differences(reports, of)
    ]


def _differences(
    reports: Sequence[RankReport], of: Callable[[RankReport], Mapping[str, str]]
) -> list[tuple[str, str]]:
    """Return each name whose value differs, and which ranks have which."""
    names = dict.fromkeys(name for report in reports for name in of(report))
    found = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            values.setdefault(of(report).get(name, UNSET), []).append(rank)
        if len(values) > 1:
            told = [f"{value} ({format_ranks(ranks)})" for value, ranks in values.items()]
            rest = f", and {len(told) - SHOWN} more values" if len(told) > SHOWN else ""
            found.append((name, f"{', '.join(told[:SHOWN])}{rest}"))
    return found
