"""Measurement of one repeat: what the records of its ranks say together.

Each rank takes times on its own monotonic clock, and only differences are used: clocks of hosts
need not agree.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.core.errors import DataError
from hpctrain.core.records import read

SMOOTHED = 10  # steps whose mean loss is compared with a target
MOST_PART = 1.05  # of a step that a part of it may last: its clock may be another one

_OWN = ("step", "at", "samples", "loss", "seconds")
_PARTS = ("compute_s", "communication_s", "input_s")
_BYTES = ("node_bytes", "rail_bytes")

_Lines = Sequence[dict[str, Any]]  # records of a rank


def measure(
    folder: Path, ranks: int, *, warm_up: int, target: Mapping[str, float]
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
    steps = sorted(set.intersection(*(set(each) for each in of_ranks)))

    def told(name: str) -> npt.NDArray[np.float64]:
        """A row for each step, a column for each rank; NaN where nothing was told."""
        rows = [[rank[step].get(name) for rank in of_ranks] for step in steps]
        return np.array(rows, dtype=np.float64).reshape(-1, ranks)

    lengths, samples = told("seconds").max(axis=1), told("samples")
    # Nobody has told the begin of a first step, and with it its duration.
    dropped = max(warm_up, int(np.isnan(lengths).argmin()) if steps else 0)
    step_s, most = lengths[dropped:], max(map(len, of_ranks))
    if not len(step_s) or 2 * len(steps) < most:
        raise DataError(
            f"a repeat has steps of all ranks behind its warm-up, and this one has {len(steps)} "
            f"in all of which {dropped} are dropped, where a rank has told of {most}; train "
            f"longer, set study.warm_up lower, or let all ranks count their steps alike"
        )
    largest = max(step_s.max(), samples.max())
    if not (step_s.min() > 0 <= samples.min() and largest < math.inf):
        raise DataError(
            f"a step has a duration above 0 and a number of samples, got {step_s.min():g} to "
            f"{step_s.max():g} s, and {samples.sum():g} samples; mend what hpctrain.record is told"
        )
    parts = {name: told(name)[dropped:] for name in (*_PARTS, *_BYTES)}
    known = _known(parts, step_s.mean())
    weights = np.where(np.isnan(told("loss")), 0, samples)
    with np.errstate(invalid="ignore"):  # a step of which nobody told has no loss
        losses = np.nansum(told("loss") * weights, axis=1) / weights.sum(axis=1)
    name, metric = _metric(lines, target)
    return {
        "num_steps": len(step_s),
        "warm_up_steps": dropped,
        "step_s": step_s.tolist(),
        "samples": round(samples[dropped:].sum()),
        "seconds": math.fsum(step_s),
        "elapsed_s": max(each[-1]["at"] - begin_of(each) for each in lines),
        **_means(known),
        **{name: float(known[name].sum(axis=1).mean()) for name in _BYTES if name in known},
        "loss": None if np.isnan(losses[-1]) else float(losses[-1]),
        "metric": metric,
        "metric_name": name,
        **_reached(lines, steps, losses, target),
    }


def _known(
    parts: Mapping[str, npt.NDArray[np.float64]], mean_s: float
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the parts of which every rank has told. Raises ``DataError``: one cannot be."""
    known = {name: part for name, part in parts.items() if np.isfinite(part).all()}
    for name, part in known.items():
        means, longest = part.mean(axis=0), mean_s if name in _PARTS else math.inf
        if not 0 <= means.min() <= means.max() <= MOST_PART * longest:
            raise DataError(
                f"a part of a step is not below 0, and lasts no longer, got {name} of "
                f"{means.min():g} to {means.max():g} in steps of {mean_s:g} s; mend what "
                f"hpctrain.record is told"
            )
    return known


def _means(known: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, list[float]]:
    """Return what the ranks of each step have told of its parts, on average."""
    found = {name: known[name].mean(axis=1) for name in _PARTS if name in known}
    if (exposed := known.get("communication_s")) is not None:
        # The rank that came last has no wait for others in it: what others have more is idle.
        found["communication_s"] = exposed.min(axis=1)
        found["idle_s"] = exposed.mean(axis=1) - exposed.min(axis=1)
    return {name: means.tolist() for name, means in found.items()}


def _steps(lines: _Lines) -> dict[int, dict[str, Any]]:
    """Return the steps of a rank by their numbers; seconds of its first may be NaN."""
    found: dict[int, dict[str, Any]] = {}
    before = math.nan
    for line in lines:
        if "samples" in line:
            if found and line["step"] <= (last := next(reversed(found))):
                raise DataError(
                    f"a rank counts its steps over all epochs, and step {line['step']} came "
                    f"behind step {last}; pass hpctrain.record a number that only grows"
                )
            found[line["step"]] = {"seconds": line["at"] - before, **line}
        before = line["at"]
    return found


def _metric(
    lines: Iterable[_Lines], target: Mapping[str, float]
) -> tuple[str | None, float | None]:
    """Return name and last value of the target, else of what a test has told last."""
    wanted = next(iter(target), "loss")
    told = [
        (name, value)
        for line in chain.from_iterable(lines)
        for name, value in line.items()
        if name not in _OWN and (name == wanted if wanted != "loss" else "samples" not in line)
    ]
    return told[-1] if told else (None, None)


def begin_of(lines: _Lines) -> float:
    """Return when the first step of a rank began, or ended where it has no length."""
    first: float = lines[0]["at"] - (lines[0].get("seconds") or 0.0)
    return first


def _reached(
    lines: Sequence[_Lines],
    steps: Sequence[int],
    losses: npt.NDArray[np.float64],
    target: Mapping[str, float],
) -> dict[str, Any]:
    """Return time and steps to the target, from the begin of the first step, tests included."""
    for name, wanted in target.items():
        sign = -1 if name.endswith("loss") else 1
        if name == "loss":
            ends = range(SMOOTHED, len(steps) + 1)
            told = [steps[i - 1] for i in ends if losses[i - SMOOTHED : i].mean() <= wanted]
        else:
            every = [each for each in chain.from_iterable(lines) if each.get(name) is not None]
            told = [each["step"] for each in every if sign * each[name] >= sign * wanted]
        if told:
            step, what = min(told), "samples" if name == "loss" else name
            times = [
                line["at"] - begin_of(rank)
                for rank in lines
                for line in rank
                if line["step"] == step and what in line
            ]
            return {"time_to_target_s": max(times), "steps_to_target": bisect_right(steps, step)}
    return {}
