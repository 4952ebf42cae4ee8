"""File of a study, ``STUDY.toml``: the command, and the factors that vary it."""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Number, Time, require, value_of
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import keys_of
from hpctrain.core.target import hint
from hpctrain.core.toml_values import TomlValues, flat, read_toml
from hpctrain.core.units import plural

LAUNCH = "hpctrain launch -n {ranks} --nodes {nodes} --"

MEASURED = "python examples/measured.py --batch {rank_batch} --steps 200"
"""Command of an example that needs no further package."""

_LAYOUT = ("ranks", "nodes", "ranks_per_node")
_ATTEMPT = ("folder", "repeat")
_MODES = ("strong", "weak")

_NAME = re.compile(r"(?<!\$)\{([a-z]\w*)\}")  # the shell expands ${x}

REQUIRED = 0.75
"""Efficiency that most computing centres require."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTable(CheckedFields):
    """Name, mode and limits of the measurement."""

    table: ClassVar = "study"
    name: str = "study"
    """Name of the study, and of its folder studies/NAME."""
    mode: Literal["strong", "weak"] = "strong"
    """strong: the same work on more ranks, and the factor batch is the batch of all ranks; weak:
    more work on more ranks, and the factor batch is the batch of each rank. A factor mode =
    ["strong", "weak"] measures both, interleaved."""
    model: str = ""
    """Name of the model, for titles of figures and reports; by default the command."""
    repeats: Number = 5
    """Measurements of each point: every repeat measures all points, in random order. To shorten a
    study, train fewer steps, or remove ranks or repeats: 3 repeats give intervals of 75 %."""
    seed: Count = 0
    """Seed of the random order."""
    warm_up: Count = 10
    """Number of first steps of each repeat that do not count. The very first step never counts if
    its record has no seconds, because its start is then unknown."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Target whose time is measured, such as { accuracy = 0.95 } or { loss = 0.1 }, with a name of
    hpctrain.record; loss is averaged over ten steps. A value whose name ends in loss must decrease
    to the target, other values must increase to the target."""
    timeout: Time = "1h"
    """Time limit of a repeat of a point."""
    cores: Count = 0
    """Cores of a host; 0 counts the cores of this machine."""
    hosts: Number = 1
    """Number of real hosts. Further nodes of a point are only declared, and share the cores of
    these hosts. A point with more ranks than cores is oversubscribed: measured, but without an
    efficiency."""

    def describe_machine(self, counted: int | None = None) -> str:
        """Return the numbers of hosts and cores as text; if ``cores`` is 0, use ``counted``."""
        cores, each = self.cores or counted, "each of " * (self.hosts > 1)
        count = plural(cores, "core") if cores else "? cores"
        return f"{count} on {each}{plural(self.hosts, 'host')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTable(CheckedFields):
    """The command. In every text {NAME} is replaced by the value of a factor.

    {ranks}, {nodes}, {ranks_per_node}, {global_batch} and {rank_batch} are replaced by values of
    the point, {folder} and {repeat} by values of the attempt.
    """

    table: ClassVar = "command"
    run: str = ""
    """Measured command: hpctrain train CONFIG.toml, or any program whose ranks call
    hpctrain.record(step=..., samples=...)."""
    launcher: str = LAUNCH
    """Launcher in front of the command; --slurm replaces this default by srun."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Keys of hpctrain train, appended to the command as --set KEY=VALUE."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig(CheckedFields):
    """A scaling study; hpctrain study run measures it."""

    factors: Mapping[str, Any] = field(default_factory=dict)
    """Factors, each with a list of values; each combination of values is a point. ranks, nodes and
    ranks_per_node are the size of a point, and each may be omitted; batch and any other name, such
    as codec or steps, are used in the texts of [command]."""
    study: StudyTable = field(default_factory=StudyTable)
    command: CommandTable = field(default_factory=CommandTable)

    def mode_of(self, point: Mapping[str, Any]) -> Literal["strong", "weak"]:
        """Return whether a point belongs to strong or to weak scaling."""
        return "weak" if point.get("mode", self.study.mode) == "weak" else "strong"

    def check(self) -> None:
        """Raise ``ConfigError`` if factors or texts are invalid."""
        for name, values in self.factors.items():
            is_list = isinstance(values, list) and 0 < len(values) == len(set(map(repr, values)))
            require(is_list, f"factors.{name} must be a list of different values", values)
            is_word = re.fullmatch(r"[a-z]\w*", name) is not None and name == name.lower()
            require(
                is_word and name not in _ATTEMPT,
                "names of factors must be words in lower case, other than folder and repeat",
                name,
            )
            is_size = all(type(value) is int and value > 0 for value in values)
            is_free = name not in (*_LAYOUT, "batch")
            require(is_free or is_size, f"factors.{name} must be integers above 0", values)
        for mode in self.factors.get("mode", []):
            require(mode in _MODES, f"factors.mode must contain only {' and '.join(_MODES)}", mode)
        for name, value in self.study.target.items():
            is_number = type(value) in (int, float) and math.isfinite(value)
            require(is_number, f"study.target.{name} must be a number", value)
        require(len(self.study.target) < 2, "study.target must have one name", self.study.target)
        if self.command.run:
            self._check_names()

    def _check_names(self) -> None:
        known = {*_LAYOUT, *_ATTEMPT, *self.factors}
        known |= {"global_batch", "rank_batch"} if "batch" in self.factors else set()
        used = {name for text in self._texts() for name in _NAME.findall(text)}
        for name in sorted(used - known):
            raise ConfigError(
                f"names in {{}} in [command] must be factors, got {{{name}}}{hint(name, known)}"
            )
        also = {name: {"ranks", "ranks_per_node"} for name in _LAYOUT}
        also["batch"] = also["mode"] = {"global_batch", "rank_batch"}
        for name in self.factors:
            require(
                bool(({name} | also.get(name, set())) & used),
                f"factors.{name} must be used: write {{{name}}} in a text of [command]",
                sorted(used),
            )

    def _texts(self) -> list[str]:
        command = self.command
        values = (*flat(command.set).values(), *command.environment.values())
        return [command.run, command.launcher, *map(_text, values)]

    def filled(self, names: Mapping[str, Any]) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the words of the launcher, the words of the command, and the variables.

        ``names`` maps each name that texts contain in braces to the value that replaces it.
        """

        def fill(value: Any) -> str:
            return _NAME.sub(lambda match: _text(names[match[1]]), _text(value))

        command = self.command
        launcher, run = (
            list(map(fill, shlex.split(text))) for text in (command.launcher, command.run)
        )
        for key, value in flat(command.set).items():
            run += ["--set", f"{key}={fill(value)}"]
        return launcher, run, {name: fill(value) for name, value in command.environment.items()}

    def uses(self, name: str) -> bool:
        """Return True if a text of [command] contains ``{name}``."""
        return any(name in _NAME.findall(text) for text in self._texts())

    def changes(self, other: "StudyConfig") -> list[str]:
        """Return the keys that determine the points and differ between this study and ``other``.

        Repeats, time limits and the size of the machine do not determine the points.
        """
        free = ("study.model", "study.repeats", "study.timeout", "study.cores", "study.hosts")
        keys = [name for name in keys_of(StudyConfig) if name not in free]
        return [name for name in keys if value_of(self, name) != value_of(other, name)]


def load(path: Path) -> StudyConfig:
    """Return the configuration of a study from its file.

    Raises:
        ConfigError: the file or a value is invalid.
    """
    values = TomlValues(StudyConfig)
    remedy = f"write a study file with hpctrain study init {path}"
    values.merge(read_toml(path, StudyConfig, remedy), f"file {path}")
    config = values.build()
    require(
        bool(config.command.run), f"file {path}: command.run must be the command to measure", ""
    )
    for text in (config.command.run, config.command.launcher):
        try:
            shlex.split(text)
        except ValueError as error:
            raise ConfigError(
                f"file {path}: [command] must be quoted as for a shell, got {text!r}: {error}"
            ) from None
    return config


def example(mode: Literal["strong", "weak", "both"], script: str = "") -> StudyConfig:
    """Return an example study of ``script``; by default of the handwritten digits."""
    factors: dict[str, Any] = {"ranks": [1, 2, 4], "batch": [16 if mode == "weak" else 64]}
    if mode == "both":
        factors["mode"] = [*_MODES]
    variables: dict[str, Any] = {"OMP_NUM_THREADS": 1}
    if script:
        name, run, target, settings = "script", script, {}, {}
        variables = ({} if "batch}" in script else {"BATCH": "{rank_batch}"}) | variables
    else:
        name, run, target = "digits", "hpctrain train examples/digits.toml", {"accuracy": 0.9}
        settings = {
            "output_dir": "{folder}/run",
            "seed": "{repeat}",
            "train.global_batch": "{global_batch}",
            "train.epochs": 8,
            "checkpoint.every": "none",
            "log.plots": False,
        }
    return StudyConfig(
        factors=factors,
        study=StudyTable(
            name=f"{name}-{mode}", mode="weak" if mode == "weak" else "strong", target=target
        ),
        command=CommandTable(run=run, set=settings, environment=variables),
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
