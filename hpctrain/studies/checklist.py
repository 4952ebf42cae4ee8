"""Checklist for reports on performance, computed from the data of a study.

Sources: Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems, SC15 (twelve
rules, numbered as in this paper); Bailey, Twelve Ways to Fool the Masses, 1991; rules of
MLPerf HPC.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

from hpctrain.core.python_compat import tomllib
from hpctrain.studies.point_records import PointRecord
from hpctrain.studies.points import attempts_of
from hpctrain.studies.study_results import StudyResults, shown_batch

MIN_REPEATS = 5

_UNMEASURED = "nothing was measured"
_UNRECORDED = "state that hpctrain train does not record these values for this method"

_Fault = Callable[[StudyResults], str | tuple[str, str]]
"""Check of one rule. Returns the fault, or an empty text if the study obeys the rule.

If the remedy of the rule does not fit the fault, returns a pair: the fault, and another remedy.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of checking a study against one rule of the checklist."""

    name: str
    source: str
    rule: str
    remedy: str
    fault: str  # why the study breaks the rule; empty if it does not

    @property
    def advice(self) -> str:
        """Text of the fault and its remedy; empty if the study obeys the rule."""
        return f"{self.fault}; {self.remedy}" if self.fault else ""


def verdicts(results: StudyResults) -> list[Verdict]:
    """Check a study against every rule of ``templates/checklist.toml``."""
    path = resources.files("hpctrain.studies") / "templates" / "checklist.toml"
    rules = tomllib.loads(path.read_text(encoding="utf-8"))
    found = {name: _FAULTS[name](results.own) for name in rules}
    return [Verdict(name, **(rule | _judged(found[name]))) for name, rule in rules.items()]


def _judged(found: str | tuple[str, str]) -> dict[str, str]:
    if found == _UNMEASURED:
        return {"fault": found, "remedy": "measure points with hpctrain study run"}
    if isinstance(found, str):
        return {"fault": found}
    fault, remedy = found
    return {"fault": fault, "remedy": remedy}


def _base(results: StudyResults) -> str:
    sizes = [each.ranks for each in results.summaries if each.step_s and not each.oversubscribed]
    if not sizes:
        return "no point with a core for each rank was measured"
    return "" if min(sizes) == 1 else f"the smallest measured point has {min(sizes)} ranks"


def _complete(results: StudyResults) -> str:
    planned = len(attempts_of(results.config))
    if planned > len(results.records):
        missing = planned - len(results.records)
        return f"{missing} of {planned} repeats have neither a result nor a failure"
    return _named(results, [each for each in results.failed if not each.error], "no reason")


def _batch(results: StudyResults) -> str:
    batches: dict[tuple[str, str], set[float]] = {}
    for record in results.done:
        mode: str = results.config.mode_of(record.point)
        share = 1 if mode == "strong" else record.layout.ranks
        key = results.curve(record.point), mode
        batches.setdefault(key, set()).add(round(record.batch / share, 6))
    for (_, mode), found in batches.items():
        if max(found) > 1.05 * min(found):  # the last batch of an epoch may be smaller
            whose = "all ranks" if mode == "strong" else "a rank"
            least, most = (shown_batch(each(found)) for each in (min, max))
            return f"{whose} processed {least} samples in a step, and {most} in another step"
    return _nothing(results)


def _repeats(results: StudyResults) -> str | tuple[str, str]:
    few = [each for each in results.summaries if len(each.done) < MIN_REPEATS]
    if not few:
        return _nothing(results)
    fault = f"{len(few[0].done)} at {results.label(few[0].point)}"
    if results.config.study.repeats < MIN_REPEATS:
        return fault
    return fault, "measure the others with hpctrain study run --retry-failed"


def _interleaved(results: StudyResults) -> str:
    points = [record.point for record in results.records]  # in order of measurement
    changes = sum(one != other for one, other in pairwise(points))
    kinds = len(results.summaries)
    is_consecutive = 1 < kinds < len(points) and changes < kinds
    return "all repeats of a point were measured one after the other" * is_consecutive or _nothing(
        results
    )


def _setup(results: StudyResults) -> str | tuple[str, str]:
    if (found := results.environment) is None:
        return "environment.json is missing"
    names = ("versions", "cpu", "cores", "host", "topology", "plan", "pinning")
    missing = [name for name in names if not found.get(name)]
    missing += ["command"] * (not results.config.command.run)
    if missing:
        return f"not recorded: {', '.join(missing)}"
    if (found.get("commit") or "").endswith("+"):
        return "not recorded: changes beyond the commit", "commit them, and measure again"
    return ""


def _cores(results: StudyResults) -> str:
    table = results.config.study
    for record in results.done:
        if record.is_oversubscribed(table.cores, table.hosts) and not record.oversubscribed:
            return f"{results.label(record.point)} has more ranks than cores, but is not marked"
    fit = {each.ranks for each in results.summaries if each.efficiency}
    return "" if len(fit) > 1 else f"the number of sizes with a core for each rank is {len(fit)}"


def _quiet(results: StudyResults) -> str:
    disturbed = [record for record in results.done if record.is_disturbed]
    if not disturbed:
        return _lacking(lambda record: record.other_cores is None, "not recorded")(results)
    worst = max(disturbed, key=lambda record: record.other_cores or 0.0)
    used = f"other processes used {worst.other_cores:.1f} of {worst.machine_cores} cores"
    return (
        f"{used} in repeat {worst.repeat} of {results.label(worst.point)}, the worst of "
        f"{len(disturbed)} repeats"
    )


def _target(results: StudyResults) -> str | tuple[str, str]:
    if not results.config.study.target:
        return "the study has no target"
    fault = _lacking(lambda record: record.time_to_target_s is None, "not reached")(results)
    return (fault, "train longer, or state a lower target") if results.done else fault


def _lacking(is_bare: Callable[[PointRecord], bool], what: str) -> Callable[[StudyResults], str]:
    """Return a check that reports ``what`` if ``is_bare`` is true for a measured repeat."""

    def fault(results: StudyResults) -> str:
        return _named(results, list(filter(is_bare, results.done)), what) or _nothing(results)

    return fault


def _unknown(*names: str) -> _Fault:
    """Return a check that reports measured repeats in which a field of ``names`` has no value."""
    lacks = _lacking(
        lambda record: any(getattr(record, name) is None for name in names),
        f"no {', '.join(names)}",
    )

    def fault(results: StudyResults) -> str | tuple[str, str]:
        is_train = results.done and results.config.command.run.startswith("hpctrain train ")
        return (lacks(results), _UNRECORDED) if is_train else lacks(results)

    return fault


def _named(results: StudyResults, records: list[PointRecord], what: str) -> str:
    if not records:
        return ""
    where = f"{what}: repeat {records[0].repeat} of {results.label(records[0].point)}"
    return where if len(records) == 1 else f"{where}, and {len(records) - 1} more"


def _nothing(results: StudyResults) -> str:
    return "" if results.done else _UNMEASURED


_FAULTS: dict[str, _Fault] = {
    "base": _base,
    "complete": _complete,
    "batch": _batch,
    "rates": _lacking(lambda each: not (each.samples and each.seconds), "no samples or seconds"),
    "repeats": _repeats,
    "interleaved": _interleaved,
    "steps": _lacking(
        lambda each: len(each.step_s) != each.num_steps, "not every step was recorded"
    ),
    "setup": _setup,
    "bytes": _unknown("node_bytes", "rail_bytes"),
    "warm_up": _lacking(lambda each: not each.warm_up_steps, "no step was dropped as warm-up"),
    "bound": lambda results: "" if results.bound else "the report has no model of the machine",
    "parts": _unknown("compute_s", "communication_s", "idle_s"),
    "cores": _cores,
    "quiet": _quiet,
    "target": _target,
    "input": _unknown("input_s"),
}
