"""Results of other tools, which the report of a study shows with its own points."""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError, DataError
from hpctrain.studies.point_records import PointRecord, StudyFolder
from hpctrain.studies.points import MOST_RANKS, Placement, Point, PointRepeat, layout_of
from hpctrain.studies.study_file import StudyConfig

TOOL = "tool"
"""Name of the factor that distinguishes imported points from the points of the study."""

_NEEDED = ("nodes", "ranks", "seconds")
SHORTEST_S, LONGEST_S = 1e-9, 1e9  # limits of a valid step time
_REMEDY = "correct the file, and import it again"


def import_file(folder: StudyFolder, config: StudyConfig, path: Path, tool: str) -> int:
    """Copy a CSV file of results into the folder of a study; return the number of its rows.

    Raises:
        ConfigError: the name of the tool is invalid.
        DataError: the file is invalid; nothing is copied.
    """
    if re.fullmatch(r"\w[\w. +-]*", tool) is None or tool == config.study.name:
        raise ConfigError(
            f"--name must contain only letters, digits, spaces and _ . + -, begin with a letter "
            f"or digit, and differ from the name of the study, got {tool!r}; use the name of the "
            f"tool, such as DDP"
        )
    records = _records_of(path, config, tool)
    folder.imported.mkdir(exist_ok=True)
    folder.write(folder.imported / f"{tool}.csv", _text_of(path))
    return len(records)


def read_imported(folder: StudyFolder, config: StudyConfig) -> list[PointRecord]:
    """Return the records of all imported files. Raises ``DataError`` if a file is invalid."""
    paths = sorted(folder.imported.glob("*.csv"))
    return [record for path in paths for record in _records_of(path, config, path.stem)]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"imported results must be a CSV file in UTF-8, but reading {path} failed: {error}; "
            f"write lines with {', '.join(_NEEDED)}"
        ) from None


def _records_of(path: Path, config: StudyConfig, tool: str) -> list[PointRecord]:
    rows = csv.DictReader(_text_of(path).splitlines(), skipinitialspace=True)
    heads = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = heads
    factors = {n: values for n, values in config.factors.items() if n not in Placement._fields}
    needed = [*_NEEDED, *(name for name, values in factors.items() if len(values) > 1)]
    optional = ["samples", *(name for name in factors if name not in needed)]
    if not {*needed} <= {*heads} <= {*needed, *optional} or len({*heads}) < len(heads):
        raise DataError(
            f"the first line of {path} must name {', '.join(needed)}, and may name "
            f"{', '.join(optional)}, each once and separated by commas, got "
            f"{', '.join(heads) or 'nothing'}; samples counts all ranks in a step and may be "
            f"omitted if the study has a factor batch"
        )
    found: list[PointRecord] = []
    repeats = Counter[str]()
    for row in rows:
        try:
            point = _point_of(row, config, tool)
            record = _record_of(row, point, config, repeats[repr(point)], len(found))
        except ValueError as error:
            raise DataError(f"{path}, line {rows.line_num}: {error}; {_REMEDY}") from None
        repeats[repr(point)] += 1
        found.append(record)
    if not found:
        raise DataError(f"{path} must have a row for each repeat of a point, got none; {_REMEDY}")
    return found


def _point_of(row: Mapping[Any, Any], config: StudyConfig, tool: str) -> Point:
    """Return the point of a row, with the factors that the study uses."""
    if None in row or None in row.values():  # too many or too few fields
        names = [name for name in row if name is not None]
        raise ValueError(f"a line must have {len(names)} fields, {', '.join(names)}")
    ranks, nodes = _number(row, "ranks"), _number(row, "nodes")
    if nodes > ranks:
        raise ValueError(f"nodes must be at most ranks, got {ranks} ranks on {nodes} nodes")
    layout = Placement(ranks, nodes, -(-ranks // nodes))
    of_study = {n: v for n, v in layout._asdict().items() if n in config.factors}
    is_whole = layout_of(of_study) == layout
    place = of_study if is_whole else {"ranks": ranks, "nodes": nodes}
    others = {
        name: _value_of(name, row.get(name, ""), values)
        for name, values in config.factors.items()
        if name not in Placement._fields
    }
    return {TOOL: tool, **place, **others}


def _number(row: Mapping[str, str], name: str) -> int:
    text = row[name].strip()
    if not (text.isascii() and text.isdecimal() and 1 <= float(text) <= MOST_RANKS):
        raise ValueError(f"{name} must be an integer from 1 to {MOST_RANKS}, got {text[:40]!r}")
    return int(text)


def _value_of(name: str, text: str, values: Sequence[Any]) -> Any:
    """Return the element of ``values`` that ``text`` represents; if there is none, ``text``.

    An empty text represents the only value of a factor. If the factor has several values, an empty
    text is invalid.
    """
    if not text.strip():
        if len(values) > 1:
            raise ValueError(f"{name} must have a value, such as {values[0]}, got an empty field")
        return values[0]
    if name == "mode" and text.strip() not in ("strong", "weak"):
        raise ValueError(f"mode must be strong or weak, got {text.strip()!r}")
    return next((each for each in values if str(each) == text.strip()), text.strip())


def _record_of(
    row: Mapping[str, str], point: Point, config: StudyConfig, repeat: int, order: int
) -> PointRecord:
    table, attempt = config.study, PointRepeat(point=point, repeat=repeat, order=order)
    try:
        seconds = float(row["seconds"])
    except ValueError:
        seconds = math.nan
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ValueError(
            f"seconds must be a time of a step from {SHORTEST_S:g} to {LONGEST_S:g}, got "
            f"{row['seconds']!r}"
        )
    if row.get("samples"):
        samples = _number(row, "samples")
    elif "batch" in point:
        is_weak = config.mode_of(point) == "weak"
        samples = int(point["batch"]) * (attempt.layout.ranks if is_weak else 1)
    else:
        raise ValueError("the study gives no batch, so column samples is required")
    return PointRecord(
        **asdict(attempt),
        status="done",
        oversubscribed=attempt.is_oversubscribed(table.cores, table.hosts),
        started="",
        folder="",
        num_steps=1,
        step_s=[seconds],
        samples=samples,
        seconds=seconds,
    )
