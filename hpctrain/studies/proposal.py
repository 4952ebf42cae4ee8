"""Scaling report for a proposal to a computing centre: tables, figures and text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from hpctrain.core.python_compat import tomllib
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.report.document import Document, Listing, Section, Table
from hpctrain.report.figure import Estimate, Figure, Series
from hpctrain.report.page import NOTHING, Cell, value_cell
from hpctrain.studies.figures import EFFICIENCY, SPEED_UP, figures_of
from hpctrain.studies.job_script import job_script
from hpctrain.studies.prediction import VALIDATION_HEADS, Prediction
from hpctrain.studies.scaling_limit import ScalingLimit, per_doubling
from hpctrain.studies.study_results import PointSummary, StudyResults, shown_batch

PER_SAMPLES = 1e6  # samples to which costs refer if the length of the training is unknown

_WH = 3600.0  # joules per watt-hour

_METHOD = (
    "A step lasts as long as on its slowest rank. The time of a repeat is the mean of its steps "
    "after {warm_up} warm-up steps; the value of a point is the median over its repeats "
    "({repeats} are planned). Brackets contain the confidence interval of 95 %, or of the stated "
    "lower confidence if the repeats are too few. The interval of a median is from the sign test, "
    "the interval of a ratio from the rank-sum test. "
    "Neither test assumes a distribution. Each repeat measures all points, in random order. "
    "Excluded are the warm-up steps, repeats that ended with an error, and, from speed-up "
    "and efficiency, points with more ranks than cores. No other repeat is excluded: outliers are "
    "shown in the figures and count in the medians."
)

_Column = tuple[str, Callable[[PointSummary], Cell | None]]


@dataclass(frozen=True, kw_only=True)
class Centre:
    """Requirements of a computing centre: an entry of ``templates/centres.toml``."""

    name: str
    compare: Literal["base", "doubling"]
    efficiency: float
    rule: str

    @classmethod
    def named(cls, name: str, efficiency: float | None = None) -> "Centre":
        """Return the centre of this name; ``efficiency`` replaces its required efficiency."""
        path = resources.files("hpctrain.studies") / "templates" / "centres.toml"
        found = tomllib.loads(path.read_text(encoding="utf-8"))[name]
        return cls(**found | ({} if efficiency is None else {"efficiency": efficiency}))


@dataclass(frozen=True)
class Proposal:
    """Scaling report of a study, with the requirements of one computing centre.

    Args:
        results: results of the study.
        centre: the centre.
        num_samples: samples of the whole training; None uses the target of the study, if every
            repeat reached it, and otherwise ``PER_SAMPLES``.
    """

    results: StudyResults
    centre: Centre
    num_samples: float | None = None

    def document(self) -> Document:
        """Return the report."""
        results = self.results
        found = {figure.name: figure for figure in figures_of(results)}
        if EFFICIENCY in found and self.centre.compare == "base":
            found[EFFICIENCY] = self._with_requirement(found[EFFICIENCY])
        together = [
            (SPEED_UP, EFFICIENCY),
            ("time",),
            ("throughput",),
            ("core-hours",),
            ("breakdown",),
        ]
        pages = [[found[name] for name in names if name in found] for names in together]
        return Document(
            title=f"Scaling of {results.config.study.name} for {self.centre.name}",
            sections=[
                Section(title="Largest size with the required efficiency", blocks=self._result()),
                Section(title="Application and machine", blocks=self._setup()),
                *self._scaling(),
                Section(title="Prediction of larger sizes", blocks=self._prediction()),
                Section(
                    title="Memory, input and output, utilisation and energy",
                    blocks=self._resources(),
                ),
                Section(title="Conditions of the measurement", blocks=self._conditions()),
                Section(title="Method", blocks=[self._method()]),
                Section(title="Job script", blocks=[Listing(self._script())]),
            ],
            pages=[page for page in pages if page],
            about=results.caption,
        )

    def _with_requirement(self, figure: Figure) -> Figure:
        required = self.centre.efficiency
        sizes = sorted({x for series in figure.series for x in series.x})
        line = Series.of(
            [(x, required) for x in sizes],
            kind="solid",
            name=f"required: {required:.0%}",
            colour=7,
        )
        return replace(figure, series=[*figure.series, line])

    @cached_property
    def curves(self) -> dict[str, list[PointSummary]]:
        """Summaries of the points of each curve, by the title of the curve."""
        found: dict[str, list[PointSummary]] = {}
        for summary in self.results.own.summaries:
            mode = self.results.config.mode_of(summary.point)
            other = self.results.curve({n: v for n, v in summary.point.items() if n != "mode"})
            title = f"{mode.capitalize()} scaling{f', {other}' if other else ''}"
            found.setdefault(title, []).append(summary)
        return found

    @cached_property
    def limits(self) -> dict[str, ScalingLimit]:
        """Largest size of each curve with the required efficiency, by the title of the curve."""
        compare, required = self.centre.compare, self.centre.efficiency
        return {n: ScalingLimit.of(each, compare, required) for n, each in self.curves.items()}

    def training_s(self, summary: PointSummary) -> float | None:
        """Return the seconds of the training at a point; None if unknown.

        The report states the cost of this training, see ``num_samples``.
        """
        if self._by_target:
            found = summary.median_of("time_to_target_s")
            return None if found is None else found.value
        rate = summary.samples_per_s
        return (self.num_samples or PER_SAMPLES) / rate.value if rate else None

    @cached_property
    def _by_target(self) -> bool:
        measured = [each for each in self.results.summaries if each.done]
        reached = (each.median_of("time_to_target_s") for each in measured)
        return self.num_samples is None and bool(measured) and None not in reached

    @cached_property
    def _amount(self) -> str:
        if self._by_target:
            [(name, value)] = self.results.config.study.target.items()
            return f"the training to {name} {value:g}"
        if self.num_samples is None:
            return f"{PER_SAMPLES:,.0f} samples"
        return f"the whole training of {self.num_samples:,.0f} samples"

    def _result(self) -> list[str]:
        percent = f"{self.centre.efficiency:.0%}"
        rule = self.centre.rule.format(
            efficiency=percent, speed_up=f"{2 * self.centre.efficiency:.3g}"
        )
        found = [rule]
        for title, limit in self.limits.items():
            text = f"{title}: {limit.text}"
            if limit.largest is not None and (hours := self._node_hours(limit.largest)):
                text += (
                    f" Cost at {limit.largest.size}: {hours:.3g} node-hours for {self._amount}."
                )
            found.append(text)
        if self.results.remarks:
            found.append("Attention: some points were disturbed; see the conditions below.")
        return found

    def _setup(self) -> list[str]:
        results, about = self.results, self.results.environment or {}
        versions = about.get("versions") or {}
        software = ", ".join(f"{name} {text}" for name, text in versions.items() if text)
        cores = results.config.study.describe_machine(about.get("cores"))
        gpu = f", {results.gpu} for each rank" if results.gpu else ""
        machine = f"{about.get('host') or 'unknown host'}, {about.get('cpu') or 'unknown CPU'}"
        mpi = about.get("mpi") or "MPI library not recorded"
        commit = about.get("commit") or "not recorded"
        model = results.config.study.model
        return [
            f"{f'Model: {model}. ' * bool(model)}Command: {results.config.command.run}",
            f"Machine: {machine}, {cores}{gpu}.",
            f"Software: {software or 'not recorded'}; {mpi}; commit {commit}.",
            f"Measured: {results.dates}.",
        ]

    def _scaling(self) -> list[Section]:
        return [
            Section(title=title, blocks=[self._base(points), self._scaling_table(title, points)])
            for title, points in self.curves.items()
        ]

    def _base(self, points: Sequence[PointSummary]) -> str:
        base = points[0].base
        if base is None:
            return "No point with a core for each rank was measured, so speed-up has no base."
        step = format_seconds(base.step_s.value) if base.step_s else NOTHING
        return f"Base of speed-up and efficiency: {base.size}, {step} per step."

    def _scaling_table(self, title: str, points: Sequence[PointSummary]) -> Table:
        before = dict(zip(map(id, points[1:]), points, strict=False))

        def doubling(summary: PointSummary) -> Cell | None:
            if self.centre.compare == "base" or id(summary) not in before:
                return None
            found = per_doubling(before[id(summary)], summary)
            return value_cell(found, lambda each: f"{2 * each:.2f}")

        columns: list[_Column] = [
            *_SIZES,
            ("batch", lambda each: shown_batch(each.done[0].batch) if each.done else None),
            ("time per step", lambda each: value_cell(each.step_s, format_seconds)),
            ("speed-up", lambda each: value_cell(each.speed_up, "{:.2f}".format)),
            ("efficiency", lambda each: value_cell(each.efficiency, "{:.0%}".format)),
            ("speed-up\nper doubling", doubling),
            ("samples/s", lambda each: value_cell(each.samples_per_s, "{:.4g}".format)),
            ("node-hours", lambda each: _number(self._node_hours(each))),
            (self.results.unit, lambda each: _number(self._rank_hours(each))),
            ("repeats", lambda each: f"{len(each.done)} of {self.results.config.study.repeats}"),
        ]
        return _table(f"{title}. Costs are for {self._amount}.", columns, points)

    def _node_hours(self, summary: PointSummary) -> float | None:
        seconds = self.training_s(summary)
        return None if seconds is None else seconds * summary.records[0].layout.nodes / 3600

    def _rank_hours(self, summary: PointSummary) -> float | None:
        seconds = self.training_s(summary)
        return None if seconds is None else seconds * summary.ranks / 3600

    def _resources(self) -> list[Any]:
        def moved(name: str) -> Callable[[PointSummary], Cell | None]:
            def cell(summary: PointSummary) -> Cell | None:
                found, seconds = summary.median_of(name), self.training_s(summary)
                if found is None or seconds is None or summary.step_s is None:
                    return None
                return format_bytes(found.value * seconds / summary.step_s.value)

            return cell

        def energy(summary: PointSummary) -> Cell | None:
            power, seconds = summary.median_of("power_w"), self.training_s(summary)
            if power is None or seconds is None:
                return None
            return f"{power.value * seconds / _WH / 1000:.3g}"

        columns: list[_Column] = [
            ("GPU\nutilisation", lambda each: _plain(each.median_of("gpu_busy"), "{:.0%}".format)),
            ("GPU memory\nof a rank", _bytes("gpu_memory_bytes")),
            ("host memory\nof a rank", _bytes("host_memory_bytes")),
            ("bytes\nread", moved("read_bytes")),
            ("bytes\nwritten", moved("written_bytes")),
            ("bytes between\nnodes, per step", _bytes("rail_bytes")),
            ("mean power,\nW", lambda each: _plain(each.median_of("power_w"), "{:.4g}".format)),
            ("energy,\nkWh", energy),
        ]
        missing = [
            name.replace("\n", " ").partition(",")[0]
            for name, cell in columns
            if not any(cell(each) for each in self.results.summaries)
        ]
        totals = "bytes" if "energy" in missing else "bytes and energy"
        found: list[Any] = [
            _table(
                f"{title}. Peak memory is the largest of all ranks; {totals} are for "
                f"{self._amount}.",
                [*_SIZES, *columns],
                points,
            )
            for title, points in self.curves.items()
        ]
        if sources := sorted(
            {each.power_source for each in self.results.done if each.power_source}
        ):
            found.append(f"Power is measured by {', '.join(sources)}, over all nodes of a point.")
        if any(each.read_bytes is not None for each in self.results.done):
            found.append("Bytes read and written are counted in system calls of the ranks.")
        if missing:
            found.append(f"Not recorded by a counter or by the program: {', '.join(missing)}.")
        return found

    def _prediction(self) -> list[Any]:
        found = Prediction.of(self.results.own, required=self.centre.efficiency)
        validation = Table(
            title="Measured sizes, predicted from smaller ones.",
            heads=VALIDATION_HEADS,
            rows=found.validation_rows,
        )
        forecasts = Table(
            title="Larger sizes.", heads=found.forecast_heads, rows=found.forecast_rows
        )
        return [found.text, *(each for each in (validation, forecasts) if each.rows)]

    def _conditions(self) -> list[Any]:
        columns: list[_Column] = [
            ("load", lambda each: _plain(each.median_of("load"), "{:.1f}".format)),
            ("cores used by\nothers, worst", _worst("other_cores", "{:.1f}".format)),
            ("clock,\nMHz", lambda each: _plain(each.median_of("mhz"), "{:.0f}".format)),
            ("hottest,\n\N{DEGREE SIGN}C", _worst("celsius", "{:.0f}".format)),
            ("throttled,\ntimes", _worst("num_throttled", "{:.0f}".format)),
            ("disturbed\nrepeats", _disturbed),
        ]
        title = "conditions of each point"
        found: list[Any] = [
            _table(f"{name}: {title}.", [*_SIZES, *columns], points)
            for name, points in self.curves.items()
        ]
        return [*found, *(f"Attention: {each}" for each in self.results.remarks)]

    def _method(self) -> str:
        table = self.results.config.study
        return _METHOD.format(warm_up=table.warm_up, repeats=table.repeats)

    def _script(self) -> str:
        sizes = [each.largest for each in self.limits.values() if each.largest is not None]
        fit = sizes or self.results.summaries
        if not fit:
            return self.results.config.command.run
        point = max(fit, key=lambda each: each.ranks)
        return job_script(self.results, point, self.training_s(point))


_SIZES: list[_Column] = [
    ("nodes", lambda each: str(each.records[0].layout.nodes)),
    ("ranks", lambda each: f"{each.ranks}{' *' * each.oversubscribed}"),
]


def _table(title: str, columns: Sequence[_Column], points: Sequence[PointSummary]) -> Table:
    """Return a table without the columns for which no point has a value."""
    found = [(head, [cell(each) for each in points]) for head, cell in columns]
    kept = [(head, cells) for head, cells in found if any(each is not None for each in cells)]
    rows = [
        [NOTHING if each is None else each for each in row]
        for row in zip(*(c for _, c in kept), strict=True)
    ]
    many = " * More ranks than cores." if any(each.oversubscribed for each in points) else ""
    return Table(title=title + many, heads=[head for head, _ in kept], rows=rows)


def _number(value: float | None) -> Cell | None:
    return None if value is None else f"{value:.3g}"


def _plain(found: Estimate | None, form: Callable[[float], str]) -> Cell | None:
    return None if found is None else form(found.value)


def _bytes(name: str) -> Callable[[PointSummary], Cell | None]:
    return lambda each: _plain(each.median_of(name), format_bytes)


def _worst(name: str, form: Callable[[float], str]) -> Callable[[PointSummary], Cell | None]:
    def cell(summary: PointSummary) -> Cell | None:
        known = [v for each in summary.done if (v := getattr(each, name)) is not None]
        return form(max(known)) if known else None

    return cell


def _disturbed(summary: PointSummary) -> Cell | None:
    if not summary.done or any(each.other_cores is None for each in summary.done):
        return None
    return f"{sum(each.is_disturbed for each in summary.done)} of {len(summary.done)}"
