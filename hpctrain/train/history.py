"""History of a run over all its starts and resumes, read from its files without MPI or torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import tomllib
from hpctrain.core.records import read
from hpctrain.core.toml_values import flat
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.report.figure import PARTS, shown
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.watch import RunView, RunWatch

Record = dict[str, Any]

LOSS = "loss"
SAVINGS = ("node_bytes", "rail_bytes", "ratio", "won_s")
"""Entries of step records about compression; values are per step, for all ranks together."""
TIMES = tuple(name for name in PARTS if name != "idle_s")


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """Configuration, records and state of a run."""

    label: str  # distinguishes runs that are displayed together
    path: Path
    view: RunView
    records: list[Record]
    configuration: dict[str, Any]  # values by dotted key
    environment: dict[str, Any]  # values by dotted name

    @classmethod
    def read(cls, path: Path, label: str = "") -> "RunHistory":
        """Read the files of the run in ``path``.

        Args:
            path: run directory.
            label: display name; default is the name of the directory.

        Raises:
            ConfigError: the directory has no records, or a file is damaged.
        """
        directory, view = RunDirectory(path), RunWatch(path).look()
        directory.check_format()
        if not directory.metrics.exists():
            raise ConfigError(
                f"{path} must have records, but its job has not started to train; wait until "
                f"hpctrain top shows the first step"
            )
        return cls(
            label=label or shown(path.resolve().name),
            path=path,
            view=view,
            records=read(directory.metrics),
            configuration=_parsed(directory.config, tomllib.loads),
            environment=_parsed(directory.environment, json.loads),
        )

    @property
    def title(self) -> str:
        """Label of the run, then in parentheses the key ``name`` if the label lacks this name."""
        name = shown(self.configuration.get("name", self.label))
        return self.label if name in self.label else f"{self.label} ({name})"

    @property
    def state(self) -> str:
        """State of the run, as ``hpctrain status`` reports it."""
        return self.view.status.state

    def of(self, event: str) -> list[Record]:
        """Return the records whose event is ``event``, oldest first."""
        return [record for record in self.records if record["event"] == event]

    def last(self, event: str) -> Record:
        """Return the last record whose event is ``event``; an empty record if there is none."""
        return next((each for each in reversed(self.records) if each["event"] == event), {})

    @cached_property
    def metric_name(self) -> str:
        """Name of the first metric in ``test.metric``."""
        metric = self.configuration.get("test.metric", LOSS)
        first = metric if isinstance(metric, str) else metric[0]
        return str(self.last("finished").get("metric_name", first.rpartition(":")[2]))

    def metrics_of(self, test: Mapping[str, Any]) -> dict[str, float | None]:
        """Return the metrics of a test record by name, without the loss."""
        found = test.get("metrics") or {self.metric_name: test.get("metric")}
        return {name: value for name, value in found.items() if name != LOSS}

    @property
    def tested(self) -> str:
        """Name of the samples that tests during training use: ``validation`` or ``test``."""
        usual = "validation" if self.configuration.get("data.validation") else "test"
        return next((record["tested"] for record in self.records if "tested" in record), usual)

    @property
    def test(self) -> Record:
        """Last result on the test set; an empty record if there is none."""
        return self.last("finished" if self.tested == "validation" else "test")

    @property
    def resumes(self) -> list[int]:
        """Steps after which the run was resumed."""
        return [record["step"] for record in self.of("resumed")]

    @property
    def gaps(self) -> list[int]:
        """Steps whose recorded loss is not finite."""
        return [record["step"] for record in self.of("step") if record.get(LOSS) is None]

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of a finished run, or of the last step record; None without steps."""
        last = self.last("finished") or self.last("step")
        return last.get("samples_per_s")

    @property
    def training_s(self) -> float:
        """Duration of all recorded steps, without tests and checkpoints."""
        return self.view.step * sum(self.mean_times.values())

    @cached_property
    def mean_times(self) -> dict[str, float]:
        """Seconds of each phase of a step, as means over all recorded steps."""
        before, sums = 0, dict.fromkeys(TIMES, 0.0)
        for record in self.of("step"):
            for name in TIMES:
                sums[name] += (record["step"] - before) * record[name]
            before = record["step"]
        return {name: seconds / max(before, 1) for name, seconds in sums.items()}

    @cached_property
    def savings(self) -> dict[str, float | None]:
        """Mean of each entry in ``SAVINGS`` over all step records; empty without compression."""
        found = [each for each in self.of("step") if "won_s" in each]
        columns = {name: [each[name] for each in found] for name in SAVINGS} if found else {}
        return {n: None if None in c else fmean(c) for n, c in columns.items()}

    @property
    def savings_text(self) -> str:
        """Message about the bytes and time that compression saves; empty without compression."""
        if not self.savings:
            return ""
        node, rail, ratio, won_s = (self.savings[name] or 0.0 for name in SAVINGS)
        description = (
            f"a step moves {format_bytes(node)} in nodes and {format_bytes(rail)} between nodes"
        )
        description += f" ({ratio:.3g} times less than without compression)"
        if self.savings["won_s"] is None:
            return f"{description}; the time saved is unknown, because the link was not measured"
        end = "saves" if won_s >= 0 else "loses"
        return f"{description}, and {end} about {format_seconds(abs(won_s))}"

    @property
    def headline(self) -> str:
        """State, ranks, steps and test results of the run in one line."""
        begun, test = self.view.begun, self.last("test")
        rate = self.configuration.get("optimizer.lr")
        ranks, nodes = begun.get("world_size", 1), begun.get("nodes", 1)
        description = [f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"]
        description += [f"learning rate {rate:g}"] if rate is not None else []
        description.append(f"{self.view.step} of {begun.get('num_steps', '?')} steps")
        metrics = {LOSS: test["loss"]} | self.metrics_of(test) if test else {}
        description += [f"{self.tested} {name} {number(value)}" for name, value in metrics.items()]
        if self.tested != "test" and self.test:
            description += [f"test {n} {number(v)}" for n, v in self.metrics_of(self.test).items()]
        if resumes := self.resumes:
            description.append(f"resumed after step {', '.join(map(str, resumes[-3:]))}")
        return f"{self.state}: {', '.join(description)}"

    @property
    def warning(self) -> str:
        """Message about losses that are not finite, and about a failure; empty without these."""
        gaps, description = self.gaps, []
        if gaps:
            many = f"{len(gaps)} of {len(self.of('step'))} records"
            description.append(f"the loss is not finite in {many}, first at step {gaps[0]}")
        if self.view.status.state == "failed":
            failed = self.last("failed")
            description.append(f"failed after step {failed['step']}: {shown(failed['reason'])}")
        return "; ".join(description)


def number(value: float | None) -> str:
    """Format a loss or a metric of a record; None means that the value was not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def histories(paths: Sequence[Path]) -> list[RunHistory]:
    """Read several runs; label each run with the shortest end of its path that is unique.

    Raises:
        ConfigError: as ``RunHistory.read``.
    """
    whole = [path.resolve().parts for path in paths]
    labels: list[str] = []
    for depth in range(1, max(map(len, whole)) + 1):
        labels = [shown("/".join(parts[-depth:])) for parts in whole]
        if len({*labels}) == len({*whole}):
            break
    return [RunHistory.read(path, label) for path, label in zip(paths, labels, strict=True)]


def labelled(runs: Sequence[RunHistory], name: str) -> list[str]:
    """Return the text attribute ``name`` of each run, without empty texts.

    With several runs, each text begins with the label of its run.
    """
    texts = [(run.label, getattr(run, name)) for run in runs]
    return [text if len(runs) == 1 else f"{label}: {text}" for label, text in texts if text]


def found_in(folder: Path) -> list[RunHistory]:
    """Return the runs in a folder, newest last; warn about unreadable runs.

    Raises:
        ConfigError: the folder contains no runs.
    """
    paths = sorted(file.parent for file in folder.glob("*/metrics.jsonl"))
    if not paths:
        raise ConfigError(
            f"{folder} must contain run directories, but has none; pass the folder that contains "
            f"output_dir, by default runs"
        )
    found = []
    for path in paths:
        try:
            found.append(RunHistory.read(path))
        except ConfigError as error:
            logger.warning(str(error))
    return sorted(found, key=lambda run: str(run.environment.get("started", "")))


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    try:
        return flat(parse(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; continuing the run with --resume may write the "
            f"file again"
        ) from None
