"""Measurement of one repeat: what the records of its ranks say together.

Each rank takes times on its own monotonic clock, and only differences are used: clocks of hosts
need not agree.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.records import read

SMOOTHED = 10  # steps whose mean loss is compared with a target

_OWN = ("step", "at", "samples", "loss", "seconds")
_PARTS = ("compute_s", "communication_s", "input_s")
_BYTES = ("node_bytes", "rail_bytes")

_Line = dict[str, Any]  # a record of a rank
_Step = list[_Line]  # of each rank one


def measure(
    folder: Path, ranks: int, *, warm_up: int, target: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return fields of a ``PointRecord`` from the files of all ranks in ``folder``.

    Raises ``DataError``: ranks are missing, what they tell cannot be, or no step counts.
    """
    lines = [read(path, key="at") for path in sorted(folder.glob("*.jsonl"))]
    if len(lines) != ranks:
        raise DataError(
            f"each rank tells of its steps by hpctrain.record(step=..., samples=...), and of "
            f"{ranks} ranks {len(lines)} did; call it on every rank, and start it so that "
            f"HPCTRAIN_RECORDS reaches them"
        )
    of_ranks = [_steps(each) for each in lines]
    numbers = sorted(set.intersection(*(set(each) for each in of_ranks)))
    steps = [[each[number] for each in of_ranks] for number in numbers]
    # Nobody has told the begin of a first step, and with it its duration.
    timed = next((i for i, step in enumerate(steps) if not math.isnan(_longest(step))), len(steps))
    dropped = max(warm_up, timed)
    counted, told = steps[dropped:], max(map(len, of_ranks))
    if not counted or 2 * len(steps) < told:
        raise DataError(
            f"a repeat has steps of all ranks behind its warm-up, and this one has {len(steps)} "
            f"in all of which {dropped} are dropped, where a rank has told of {told}; train "
            f"longer, set study.warm_up lower, or let all ranks count their steps alike"
        )
    step_s = [_longest(step) for step in counted]
    samples = math.fsum(line["samples"] for step in counted for line in step)
    if not (all(0 < each < math.inf for each in step_s) and 0 <= samples < math.inf):
        raise DataError(
            f"a step has a duration above 0 and a number of samples, got {min(step_s):g} to "
            f"{max(step_s):g} s, and {samples:g} samples; mend what hpctrain.record is told"
        )
    name, metric = _metric(lines, target)
    return {
        "num_steps": len(counted),
        "warm_up_steps": dropped,
        "step_s": step_s,
        "samples": round(samples),
        "seconds": math.fsum(step_s),
        **_parts(counted),
        **{key: _bytes(counted, key) for key in _BYTES},
        "loss": _loss(counted[-1]),
        "metric": metric,
        "metric_name": name,
        **_reached(lines, steps, numbers, target),
    }


def _steps(lines: Iterable[_Line]) -> dict[int, _Line]:
    """Return the steps of a rank by their numbers; seconds of its first may be NaN.

    Raises ``DataError``: a number comes again.
    """
    found: dict[int, _Line] = {}
    before = math.nan
    for line in lines:
        if "samples" in line:
            if line["step"] in found:
                raise DataError(
                    f"a rank counts its steps over all epochs, and step {line['step']} came "
                    f"twice; pass hpctrain.record a number that only grows"
                )
            found[line["step"]] = {"seconds": line["at"] - before, **line}
        before = line["at"]
    return found


def _longest(step: Iterable[_Line]) -> float:
    times = [line["seconds"] for line in step]
    return math.nan if any(map(math.isnan, times)) else max(times)


def _parts(steps: Sequence[_Step]) -> dict[str, list[float] | None]:
    """Return the parts of each step, where all ranks have told them.

    Exposed communication of the rank that came last has no wait for others in it: what others
    have more is idle.
    """
    found: dict[str, list[float] | None] = dict.fromkeys((*_PARTS, "idle_s"))
    for part in _PARTS:
        if _is_told(steps, part):
            found[part] = [fmean(line[part] for line in step) for step in steps]
    if (mean := found["communication_s"]) is not None:
        least = [min(line["communication_s"] for line in step) for step in steps]
        found["communication_s"] = least
        found["idle_s"] = [a - b for a, b in zip(mean, least, strict=True)]
    return found


def _bytes(steps: Sequence[_Step], key: str) -> float | None:
    if not _is_told(steps, key):
        return None
    return fmean(sum(line[key] for line in step) for step in steps)


def _is_told(steps: Sequence[_Step], key: str) -> bool:
    return all(math.isfinite(line.get(key, math.nan)) for step in steps for line in step)


def _loss(step: _Step) -> float | None:
    told = [line for line in step if line.get("loss") is not None and line["samples"]]
    weight = sum(line["samples"] for line in told)
    return sum(line["loss"] * line["samples"] for line in told) / weight if weight else None


def _metric(
    lines: Sequence[Sequence[_Line]], target: Mapping[str, float] | None
) -> tuple[str | None, float | None]:
    """Return name and last value of the target, else of what a test has told last."""
    wanted = next(iter(target or ()), "loss")
    found: tuple[str | None, float | None] = None, None
    for line in (line for rank in lines for line in rank):
        for name, value in line.items():
            is_told = name == wanted if wanted != "loss" else "samples" not in line
            if is_told and name not in _OWN:
                found = name, value
    return found


def _reached(
    lines: Sequence[Sequence[_Line]],
    steps: Sequence[_Step],
    numbers: Sequence[int],
    target: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return time and steps to the target, from the begin of the first step, tests included."""
    if not target:
        return {}
    [(name, wanted)] = target.items()
    sign = -1 if name.endswith("loss") else 1
    if name == "loss":
        losses = [math.nan if (loss := _loss(each)) is None else loss for each in steps]
        means = [fmean(losses[i : i + SMOOTHED]) for i in range(len(losses) - SMOOTHED + 1)]
        told = [numbers[i + SMOOTHED - 1] for i, mean in enumerate(means) if mean <= wanted]
    else:
        told = [
            line["step"]
            for rank in lines
            for line in rank
            if line.get(name) is not None and sign * line[name] >= sign * wanted
        ]
    if not told:
        return {}
    step, what = min(told), "samples" if name == "loss" else name
    begins = [rank[0]["at"] - rank[0].get("seconds", 0.0) for rank in lines]
    times = [
        line["at"] - begin
        for rank, begin in zip(lines, begins, strict=True)
        for line in rank
        if line["step"] == step and what in line
    ]
    return {"time_to_target_s": max(times), "steps_to_target": bisect_right(numbers, step)}
