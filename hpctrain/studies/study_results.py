"""Results of a study for its report: records, summaries, bounds, and labels of points."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from hpctrain.core.errors import DataError
from hpctrain.core.records import read
from hpctrain.core.units import plural
from hpctrain.cost.machine import Machine
from hpctrain.cost.step import least_step_s
from hpctrain.report.figure import Estimate, shown
from hpctrain.studies.attempt import RECORDS
from hpctrain.studies.imported import TOOL, read_imported
from hpctrain.studies.measurement import begin_of
from hpctrain.studies.point_records import Environment, PointRecord, StudyFolder
from hpctrain.studies.points import Placement, Point
from hpctrain.studies.statistics import median, ratio
from hpctrain.studies.study_file import StudyConfig, load

StepBound = Callable[[Point], float]
"""Lower bound of the step time of a point in seconds, by a model of the machine."""

MAX_POINTS = 100  # maximum number of points of a curve
MAX_CAPTION = 140  # characters of a line of a caption
SLOW_CLOCK = 0.9  # points are reported if their clock rate, relative to the fastest, is lower


@dataclass(frozen=True)
class PointSummary:
    """Statistics over the repeats of one point; a value is None if it is unknown."""

    records: list[PointRecord]
    base: "PointSummary | None" = None
    """The smallest measured point of the curve that is not oversubscribed."""
    growth: float = 1.0  # ideal step time of the base divided by the ideal step time of the point

    @property
    def point(self) -> Point:
        """Factors of the point."""
        return self.records[0].point

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.records[0].layout.ranks

    @property
    def size(self) -> str:
        """Ranks and nodes as text."""
        ranks, nodes, _ = self.records[0].layout
        return f"{plural(ranks, 'rank')} on {plural(nodes, 'node')}"

    @property
    def oversubscribed(self) -> bool:
        """True if the point has more ranks than cores."""
        return any(each.oversubscribed for each in self.records)

    @cached_property
    def done(self) -> list[PointRecord]:
        """Records of the successful repeats."""
        return [each for each in self.records if each.is_done]

    @cached_property
    def times_s(self) -> list[float]:
        """Step time of each successful repeat."""
        return [each.mean_step_s for each in self.done]

    @cached_property
    def step_s(self) -> Estimate | None:
        """Step time: median over repeats of the mean step time of a repeat."""
        return self.median_of("mean_step_s")

    @cached_property
    def samples_per_s(self) -> Estimate | None:
        """Throughput: median over repeats of the samples per second."""
        return self.median_of("samples_per_s")

    @cached_property
    def efficiency(self) -> Estimate | None:
        """Parallel efficiency relative to the base point; None if oversubscribed."""
        if not self.times_s or self.base is None or self.oversubscribed:
            return None
        found = ratio(self.times_s, [each / self.growth for each in self.base.times_s])
        if self.records is not self.base.records:
            return found
        return replace(found, low=1.0, high=1.0, confidence=1.0)  # 1 by definition

    @cached_property
    def speed_up(self) -> Estimate | None:
        """Speed-up relative to the base point; None if oversubscribed."""
        found = self.efficiency
        if found is None or self.base is None:
            return None
        times = self.ranks / self.base.ranks
        low, high = (None if each is None else each * times for each in (found.low, found.high))
        return replace(found, value=found.value * times, low=low, high=high)

    @property
    def ideal_s(self) -> float | None:
        """Ideal step time: the step time if the point had the efficiency of the base point."""
        return median(self.base.times_s).value / self.growth if self.base else None

    def median_of(self, name: str) -> Estimate | None:
        """Return the median of a field over the repeats; a list is first replaced by its mean.

        The result is None if a repeat has no value in the field. For example, a median over only
        the repeats that reached a target would be too good.
        """
        values = [getattr(each, name) for each in self.done]
        if not values or None in values:
            return None
        return median([fmean(each) if isinstance(each, list) else each for each in values])


def summarize(records: Iterable[PointRecord], mode: str) -> list[PointSummary]:
    """Return a summary of each point, ordered by curve and then by number of ranks.

    Points of the same curve differ only in the factors of ``Placement``. Points with different
    values of the factor ``batch`` belong to different curves. In a weak study, ``batch`` is the
    batch of a rank; in a strong study, the batch of all ranks. A factor ``mode`` of a point
    replaces the argument ``mode``.
    """
    curves: dict[str, dict[str, list[PointRecord]]] = {}
    for record in records:
        curve = curves.setdefault(key_of(_curve_of(record.point)), {})
        curve.setdefault(key_of(record.point), []).append(record)
    found = []
    for curve in curves.values():
        points = sorted(map(PointSummary, curve.values()), key=lambda each: each.ranks)
        base = next((each for each in points if each.done and not each.oversubscribed), None)
        for each in points:
            is_strong = each.point.get("mode", mode) == "strong"
            growth = each.ranks / base.ranks if base and is_strong else 1.0
            found.append(replace(each, base=base, growth=growth))
    return found


def key_of(point: Point) -> str:
    """Return a text that identifies a point, for use as a key."""
    return repr(sorted(point.items()))


def _curve_of(point: Point) -> Point:
    return {name: value for name, value in point.items() if name not in Placement._fields}


@dataclass(frozen=True)
class StudyResults:
    """Configuration, environment and records of a study."""

    config: StudyConfig
    environment: Environment | None
    records: list[PointRecord]
    directory: Path = Path()
    bound: StepBound | None = None
    imported: list[PointRecord] = field(default_factory=list)  # records of other tools

    @classmethod
    def read(cls, directory: Path) -> "StudyResults":
        """Read the results of a study. Raises ``DataError`` if the directory contains no study."""
        folder = StudyFolder(directory)
        if not folder.file.exists():
            raise DataError(
                f"a study must contain {folder.file.name}, but {directory} does not; "
                f"hpctrain study run writes it"
            )
        environment = folder.read_environment()  # first, because it checks the format version
        config = load(folder.file)
        imported = read_imported(folder, config)
        return cls(config, environment, folder.read_points(), directory, imported=imported)

    @property
    def folder(self) -> StudyFolder:
        """Folder of the study."""
        return StudyFolder(self.directory)

    @cached_property
    def own(self) -> "StudyResults":
        """The results without imported points."""
        return replace(self, imported=[])

    @cached_property
    def summaries(self) -> list[PointSummary]:
        """Summaries of own and imported points, ordered by curve and then by number of ranks."""
        factors = _curve_of(self.config.factors).items()

        def place(summary: PointSummary) -> list[int]:
            pairs = [(summary.point.get(name), values) for name, values in factors]
            return [[*values, mine].index(mine) for mine, values in pairs]

        records = [*self.records, *self.imported]
        return sorted(summarize(records, self.config.study.mode), key=place)

    @cached_property
    def done(self) -> list[PointRecord]:
        """Records of successful repeats."""
        return [each for each in self.records if each.is_done]

    @cached_property
    def failed(self) -> list[PointRecord]:
        """Records of failed repeats."""
        return [each for each in self.records if not each.is_done]

    @property
    def modes(self) -> str:
        """Modes of the study as text."""
        return " and ".join(self.config.factors.get("mode", [self.config.study.mode]))

    @property
    def model(self) -> str:
        """Name of the model, or else the command."""
        return shown(self.config.study.model or self.config.command.run)

    @cached_property
    def gpu(self) -> str | None:
        """Name of the GPUs; None if the ranks have no GPU, or its counters cannot be read."""
        return next((each.gpu for each in self.done if each.gpu), None)

    @property
    def unit(self) -> str:
        """Unit of the cost of a rank: GPU-hours or core-hours."""
        return "GPU-hours" if self.gpu else "core-hours"

    @property
    def dates(self) -> str:
        """First and last day of the measurement."""
        days = sorted({each.started[:10] for each in self.records})
        return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "at an unknown time"

    @cached_property
    def remarks(self) -> list[str]:
        """Sentences about conditions that made the times of points too long; see ``_remarks``."""
        fastest = max((each.mhz or 0.0 for each in self.done), default=0.0)
        return [text for each in self.summaries for text in _remarks(each, fastest, self.label)]

    @cached_property
    def headline(self) -> str:
        """Summary of the study in one line."""
        host = f" on {shown(self.environment.get('host'))}" if self.environment else ""
        tools = dict.fromkeys(shown(each.point[TOOL]) for each in self.imported)
        return (
            f"{shown(self.config.study.name)}: {self.modes} scaling{host}, "
            f"{len(self.own.summaries)} points, {len(self.done)} repeats measured, "
            f"{len(self.failed)} failed"
            + ("" if not tools else f"; imported results of {', '.join(tools)}")
        )

    @cached_property
    def caption(self) -> str:
        """Lines above each figure: name, mode and model; batch; machine; versions and date."""
        table, about = self.config.study, self.environment or {}
        batches = sorted({each.batch for each in self.done})
        texts = [f"{each:.1f}".removesuffix(".0") for each in batches[:4]]
        whole = ", ".join(texts) + ", ..." * (len(batches) > 4)
        mean = "on average " * any(each != int(each) for each in batches)
        versions = about.get("versions") or {}
        where = [
            str(about.get("host") or "unknown host"),
            *([f"{self.gpu} for each rank"] if self.gpu else []),
            str(about.get("cpu") or "unknown processor"),
            table.describe_machine(about.get("cores")),
        ]
        software = [f"{name} {versions.get(name) or '?'}" for name in ("hpctrain", "torch")]
        software += [str(about.get("mpi") or "no MPI library recorded"), self.dates]
        lines = [
            f"{table.name}: {self.modes} scaling of {self.model}",
            f"{mean}{whole} samples in a step of all ranks",
            ", ".join(where),
            ", ".join(software),
        ]
        return "\n".join(shown(line, MAX_CAPTION) for line in lines)

    def with_bound(self, machine: Machine) -> "StudyResults":
        """Return the results, extended by a lower bound of the step times on a machine.

        The bound is the maximum of the ideal compute time and the time in which the links move the
        measured bytes; see ``hpctrain.cost.least_step_s``.
        """

        def least_s(point: Point) -> float:
            summary = next(each for each in self.summaries if each.point == point)
            _, nodes, each = summary.records[0].layout
            moved = (summary.median_of(name) for name in ("rail_bytes", "node_bytes"))
            between, inside = (found.value if found else 0.0 for found in moved)
            there = replace(machine, nodes=nodes, ranks_per_node=each)
            ideal_s = summary.ideal_s or 0.0
            return least_step_s(there, ideal_s, network_bytes=between, node_bytes=inside)

        return replace(self, bound=least_s)

    def learning_curve(self, record: PointRecord, name: str) -> list[tuple[float, float]]:
        """Return the learning curve of a repeat: pairs (seconds, value) that one rank recorded.

        ``name`` is the recorded value, such as ``loss``. Seconds count from the start of the first
        step, as in ``time_to_target_s``. The curve is empty if the files of the records were
        removed.
        """
        for path in sorted((self.directory / record.folder / RECORDS).glob("*.jsonl")):
            lines = read(path, key="at")
            curve = [(each["at"] - begin_of(lines), each[name]) for each in lines if name in each]
            if curve:
                every = len(curve) // MAX_POINTS + 1
                return curve[(len(curve) - 1) % every :: every]  # keeps the last point
        return []

    def label(self, point: Point) -> str:
        """Return the factors that distinguish a point, or all factors if none does, as text."""
        return label_of(self._distinct(point) or point)

    def curve(self, point: Point) -> str:
        """Return the factors that distinguish the curve of a point; empty for a single curve."""
        return label_of(self._distinct(_curve_of(point)))

    def _distinct(self, point: Point) -> Point:
        tool = {TOOL: self.config.study.name} if self.imported else {}
        return {n: value for n, value in {**tool, **point}.items() if n in self._varying}

    @cached_property
    def _varying(self) -> list[str]:
        points = [record.point for record in (*self.records, *self.imported)]
        names = dict.fromkeys(name for point in points for name in point)
        return [name for name in names if len({repr(p.get(name)) for p in points}) > 1]


def shown_batch(batch: float) -> str:
    """Return a batch size as text; if it is not an integer, the text states that it is a mean."""
    return f"{batch:g}" if batch == int(batch) else f"on average {batch:.1f}"


def label_of(point: Point) -> str:
    """Return the factors of a point as text."""
    texts = {name: f"{shown(name)} {shown(value)}" for name, value in point.items()}
    if "mode" in point:
        texts["mode"] = f"{point['mode']} scaling"
    return ", ".join(texts.values())


def _remarks(
    summary: PointSummary, fastest_mhz: float, label: Callable[[Point], str]
) -> Iterator[str]:
    """Yield one sentence with all conditions that made a point slow, or no sentence."""
    found, num = list[str](), len(summary.done)
    if disturbed := [each for each in summary.done if each.is_disturbed]:
        worst = max(disturbed, key=lambda each: each.other_cores or 0.0)
        found.append(
            f"other work disturbed {len(disturbed)} of {num} repeats and used up to "
            f"{worst.other_cores:.1f} of {worst.machine_cores} cores"
        )
    if throttled := [each for each in summary.done if each.num_throttled]:
        found.append(f"the processor was throttled in {len(throttled)} of {num} repeats")
    if (clock := summary.median_of("mhz")) and clock.value < SLOW_CLOCK * fastest_mhz:
        found.append(
            f"the processor ran at {clock.value:.0f} MHz, and at up to {fastest_mhz:.0f} MHz at "
            "other points"
        )
    if found:
        yield f"{label(summary.point)}: {'; '.join(found)}."
