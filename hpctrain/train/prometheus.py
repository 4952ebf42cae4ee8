"""Logger that writes metrics for Prometheus, read by the textfile collector of node_exporter."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import publishing
from hpctrain.train.run_directory import RunDirectory

_Sample = tuple[str, Mapping[str, object], float | None]
"""Name, labels and value; a value of None was not finite."""

_HELP = {
    "step": "Finished steps of the run",
    "epoch": "Epoch of the last record",
    "train_loss": "Mean training loss since the previous record",
    "learning_rate": "Learning rate",
    "samples_per_second": "Samples per second over all ranks",
    "step_seconds": "Parts of the time of a step, mean over all ranks",
    "rank_seconds": "Parts of the time of a step on each rank",
    "rank_slow_records": "Number of the last ten records in which other ranks waited for the rank",
    "test_metric": "Metrics of the last test",
    "left_out_steps": "Steps that were skipped in this part of the run",
    "spikes": "Spikes of the loss in this part of the run",
    "checkpoint_step": "Step of the last checkpoint that was started",
    "finished": "Whether the run is finished",
}
_PARTS = ("compute", "communication", "input", "checkpoint")


class PrometheusLogger:
    """Replaces the file metrics.prom atomically at each record.

    To export the metrics, create a link to the file in the directory that the option
    ``--collector.textfile.directory`` of node_exporter names.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._path, self._ranks = folder / "metrics.prom", RunDirectory(folder).ranks
        self._run = str(config.get("name", folder.name))
        self._hosts: dict[int, str] = {}
        self._last: dict[str, Mapping[str, Any]] = {}  # records, by event
        self._num_skipped = self._num_spikes = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record, and write all metrics."""
        event = record["event"]
        self._last[event] = record
        if event in ("started", "resumed"):
            hosts = record.get("hosts", {})
            self._hosts = {rank: host for host, ranks in hosts.items() for rank in ranks}
        self._num_skipped += record.get("skipped", 0) if event == "step" else 0
        self._num_spikes += event == "spike"
        with publishing(self._path) as part:
            part.write_text(text(self._run, self._samples()), encoding="utf-8")

    def close(self) -> None:
        """No-op: no file stays open."""

    def _samples(self) -> Iterator[_Sample]:
        step, test = self._last.get("step"), self._last.get("test")
        if step is not None:
            yield "step", {}, step["step"]
            yield "epoch", {}, step["epoch"]
            yield "train_loss", {}, step["loss"]
            yield "learning_rate", {}, step["lr"]
            yield "samples_per_second", {}, step["samples_per_s"]
            for part in _PARTS[:3]:
                yield "step_seconds", {"part": part}, step[f"{part}_s"]
            yield from self._of_ranks()
        if test is not None:
            yield "test_metric", {"metric": "loss"}, test["loss"]
            for name, value in test.get("metrics", {}).items():
                if name != "loss":
                    yield "test_metric", {"metric": name}, value
        if saved := self._last.get("checkpoint"):
            yield "checkpoint_step", {}, saved["step"]
        yield "left_out_steps", {}, self._num_skipped
        yield "spikes", {}, self._num_spikes
        yield "finished", {}, "finished" in self._last

    def _of_ranks(self) -> Iterator[_Sample]:
        try:
            found = json.loads(self._ranks.read_bytes())
        except OSError:  # the file does not exist before the first step record
            return
        for part in _PARTS:
            for rank, seconds in enumerate(found[f"{part}_s"]):
                labels = {"rank": rank, "host": self._hosts.get(rank, ""), "part": part}
                yield "rank_seconds", labels, seconds
        for rank, count in enumerate(found["slow"]):
            labels = {"rank": rank, "host": self._hosts.get(rank, "")}
            yield "rank_slow_records", labels, count


def text(run: str, samples: Iterable[_Sample]) -> str:
    """Return samples in the Prometheus text format, with one HELP and TYPE line per name."""
    lines, before = list[str](), ""
    for name, labels, value in samples:
        if name != before:
            lines.append(f"# HELP hpctrain_{name} {_HELP[name]}.")
            lines.append(f"# TYPE hpctrain_{name} gauge")
            before = name
        shown = ",".join(f'{k}="{_escaped(str(v))}"' for k, v in {"run": run, **labels}.items())
        number = math.nan if value is None else float(value)
        lines.append(f"hpctrain_{name}{{{shown}}} {str(number).replace('nan', 'NaN')}")
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
