"""What a person sees of a benchmark: a line per size as soon as it is measured, and a file."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpctrain import __version__
from hpctrain.core.atomic import publishing
from hpctrain.core.errors import ConfigError
from hpctrain.doctor.benchmarks.measure import Row
from hpctrain.runtime.world import World

_HEAD = (
    f"{'bytes':>12} {'elements':>11} {'dtype':>15} {'op':>7} "
    f"{'min us':>10} {'avg us':>10} {'max us':>10} {'alg GB/s':>9} {'bus GB/s':>9} {'wrong':>6}"
)
_PEER_HEAD = f" {'MPI us':>10} {'MPI/ours':>8}"


def head(*, peers: bool) -> str:
    """Return the names of the columns."""
    return _HEAD + _PEER_HEAD if peers else _HEAD


def line(row: Row, dtype: str, op: str) -> str:
    """Return the line of one size; ``op`` is empty for operations that combine nothing."""
    wrong = "-" if row.num_wrong is None else str(row.num_wrong)
    text = f"{row.num_bytes:>12} {row.numel:>11} {dtype:>15} {op:>7} "
    text += " ".join(f"{us:>10.2f}" for us in (row.min_us, row.avg_us, row.max_us))
    text += f" {row.algorithm_gbs:>9.3f} {row.bus_gbs:>9.3f} {wrong:>6}"
    if row.library_us is not None and row.library_ratio is not None:
        text += f" {row.library_us:>10.2f} {row.library_ratio:>8.2f}"
    return text


def facts(here: World) -> list[tuple[str, str]]:
    """Return name and text of each line above the table: the machine, then the plan."""
    plan = [*here.plan.describe(), ("plan chosen by", here.plan_origin)]
    return [*here.topology.describe(), *plan]


def check_writable(path: Path) -> None:
    """Refuse a file before anything is measured; called by one rank.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another") from None


def write_json(path: Path, here: World, rows: Sequence[Row], description: dict[str, Any]) -> None:
    """Write all that was measured, and where; called by one rank."""
    contents = {
        **description,
        "hpctrain": __version__,
        "torch": torch.__version__,
        "system": platform.platform(),
        "topology": dict(here.topology.describe()),
        "plan": here.plan.as_dict(),
        "rows": [asdict(row) for row in rows],
    }
    with publishing(path) as part:
        part.write_text(json.dumps(contents, indent=1, default=str) + "\n", encoding="utf-8")
