"""Loggers, which receive the records of a run on rank 0, in addition to ``metrics.jsonl``."""

import csv
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import publishing
from hpctrain.core.errors import ConfigError
from hpctrain.core.lazy import imported
from hpctrain.core.logs import logger
from hpctrain.core.records import read
from hpctrain.core.target import hint, resolve
from hpctrain.core.toml_values import flat
from hpctrain.train.prometheus import PrometheusLogger
from hpctrain.train.run_directory import RunDirectory

Record = Mapping[str, Any]

_VALUES = {"step": "train", "test": "test"}
"""Events whose values are logged, each with the prefix of the names of its values."""
_NO_VALUES = ("event", "step", "epoch")


Factory = Callable[[Path, Mapping[str, Any]], Any]
"""Makes a logger, an object with ``write`` and ``close``, from run directory and configuration."""


class Loggers:
    """Writes records to several loggers.

    A logger that raises is disabled with one warning, and the run continues. Loggers do not
    affect the run, so their errors are local to rank 0.

    Args:
        names: values of ``log.to``.
        folder: run directory.
        config: configuration of the run.
    """

    def __init__(self, names: Iterable[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Any] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._begin(name, folder, config))  # type: ignore[misc]

    def _begin(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._open[name] = factory(name)(folder, config)

    def write(self, record: Record) -> None:
        """Write a record to all enabled loggers."""
        for name, each in list(self._open.items()):
            self._attempt(name, lambda each=each: each.write(record))  # type: ignore[misc]

    def close(self) -> None:
        """Close all enabled loggers."""
        for name, each in list(self._open.items()):
            self._attempt(name, each.close)
        self._open.clear()

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            logger.warning(
                f'log.to = "{name}" is disabled, and the run continues: '
                f"{type(error).__name__}: {error}"
            )


def factory(name: str) -> Factory:
    """Return the factory of the logger ``name``, an element of ``log.to``.

    Raises:
        ConfigError: there is no such logger, or its package is not installed.
    """
    if ":" in name:
        try:
            made: Factory = resolve(name, "log.to")
        except ConfigError:
            raise
        except Exception as error:  # the module is code of the user
            raise ConfigError(f'log.to = "{name}" cannot be imported: {error!r}') from error
        return made
    if name not in _FACTORIES:
        raise ConfigError(f'log.to must name a logger, got "{name}"{hint(name, _FACTORIES)}')
    if name in _PACKAGES and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f'the package {name} must be installed for log.to = "{name}", but it is not; run '
            f"pip install 'hpctrain[{name}]', or leave {name} out of log.to"
        )
    return _FACTORIES[name]


def check(names: Iterable[str]) -> None:
    """Raise an error unless all loggers of ``log.to`` exist.

    Raises:
        ConfigError: as ``factory``.
    """
    for name in names:
        factory(name)


class CsvLogger:
    """Writes csv/step.csv and csv/test.csv, with a column for each entry of the records."""

    def __init__(self, folder: Path, _config: Mapping[str, Any]) -> None:
        self._records, self._folder = RunDirectory(folder).metrics, folder / "csv"
        self._columns: dict[str, list[str]] = {}

    def write(self, record: Record) -> None:
        """Append a row; rewrite the file if a run starts or resumes, or for new columns."""
        event = record["event"]
        if event in ("started", "resumed"):
            self._folder.mkdir(exist_ok=True)
            for each in _VALUES:
                self._write_all(each)
        elif event in _VALUES:
            row = _row(record)
            if not row.keys() <= {*self._columns[event]}:
                self._write_all(event)
                return
            with self._path(event).open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns[event]).writerow(row)

    def close(self) -> None:
        """No-op: no file stays open."""

    def _path(self, event: str) -> Path:
        return self._folder / f"{event}.csv"

    def _write_all(self, event: str) -> None:
        rows = [_row(record) for record in read(self._records) if record["event"] == event]
        self._columns[event] = list(dict.fromkeys(name for row in rows for name in row))
        with (
            publishing(self._path(event)) as part,
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            table = csv.DictWriter(file, self._columns[event])
            table.writeheader()
            table.writerows(rows)


class TensorBoardLogger:
    """Writes event files into the folder ``tensorboard`` of a run.

    The first record creates the folder.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder / "tensorboard", config
        self._writer: Any = None

    def write(self, record: Record) -> None:
        """Write each value of a record as a scalar."""
        if self._writer is None:
            # A resumed run repeats the steps after its checkpoint; purge their old values.
            first = record.get("step", 0) + 1
            make = imported("torch.utils.tensorboard:SummaryWriter")
            self._writer = make(str(self._folder), purge_step=first)
            text = json.dumps(self._config, indent=2, default=str)
            self._writer.add_text("configuration", f"```\n{text}\n```", global_step=first)
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Writes to Weights & Biases; a resumed run continues its W&B run.

    Environment variables of wandb select the project, owner and mode: WANDB_PROJECT, WANDB_ENTITY,
    WANDB_MODE.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        begun = json.loads(RunDirectory(folder).environment.read_bytes())["started"]
        self._run = wandb.init(
            name=folder.resolve().name,
            id=sha256(f"{folder.resolve()} {begun}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )
        self.close = self._run.finish

    def write(self, record: Record) -> None:
        """Write the values of a record."""
        if values := scalars(record):
            self._run.log(values, step=record["step"])


_FACTORIES: dict[str, Factory] = {
    "csv": CsvLogger,
    "prometheus": PrometheusLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}
_PACKAGES = ("tensorboard", "wandb")


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record, with names such as ``train/loss`` and ``test/accuracy``."""
    if record["event"] not in _VALUES:
        return {}
    found = {f"{_VALUES[record['event']]}/{n}": v for n, v in _row(record).items()}
    return {
        name: float(value)
        for name, value in found.items()
        if name.partition("/")[2] not in _NO_VALUES and type(value) in (int, float)
    }


def _row(record: Record) -> dict[str, Any]:
    return {name: value for name, value in flat(record).items() if name != "event"}
