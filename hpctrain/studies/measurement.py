"""Computation of the result of one repeat from the records of its ranks.

Each rank measures times on its own monotonic clock. The functions only subtract times of the same
rank, so the clocks of hosts need not be synchronized.
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
from hpctrain.studies.resources import RankSamples, resources_of

SMOOTHED = 10  # number of steps whose mean loss is compared with a target
MOST_PART = 1.05  # maximum ratio of a part to its step; not 1, because their clocks may differ

_OWN = ("step", "at", "samples", "loss", "seconds")
_PARTS = ("compute_s", "communication_s", "input_s")
_BYTES = ("node_bytes", "rail_bytes")

_Lines = Sequence[dict[str, Any]]  # records of a rank


def measure(
    folder: Path, ranks: int, *, warm_up: int, target: Mapping[str, float]
) -> dict[str, Any]:
    """Return the measured fields of a ``PointRecord`` from the files of all ranks in ``folder``.

    Raises:
        DataError: ranks are missing, a record is impossible, or no step remains after the warm-up.
    """
    paths = sorted(folder.glob("*.jsonl"))
    lines = [read(path, key="at") for path in paths]
    if len(lines) != ranks:
        raise DataError(
            f"every rank must call hpctrain.record(step=..., samples=...), but {len(lines)} of "
            f"{ranks} ranks did; call hpctrain.record on every rank, and pass HPCTRAIN_RECORDS to "
            f"all ranks"
        )
    of_ranks = [_steps(each) for each in lines]
    steps = sorted(set.intersection(*(set(each) for each in of_ranks)))

    def column(name: str) -> npt.NDArray[np.float64]:
        """Return an array of shape (steps, ranks); NaN for missing values."""
        rows = [[rank[step].get(name) for rank in of_ranks] for step in steps]
        return np.array(rows, dtype=np.float64).reshape(-1, ranks)

    lengths, samples = column("seconds").max(axis=1), column("samples")
    # The duration of a first step is unknown, because its start was not recorded.
    dropped = max(warm_up, int(np.isnan(lengths).argmin()) if steps else 0)
    step_s, most = lengths[dropped:], max(map(len, of_ranks))
    if not len(step_s) or 2 * len(steps) < most:
        raise DataError(
            f"a repeat must have steps of all ranks after its warm-up, but {len(steps)} steps are "
            f"common to all ranks, {dropped} of them dropped, and a rank recorded {most}; train "
            f"longer, lower study.warm_up, or number the steps identically on all ranks"
        )
    largest = max(step_s.max(), samples.max())
    has_samples = samples.min() >= 0 and samples.sum(axis=1).min() > 0
    if not (step_s.min() > 0 and has_samples and largest < math.inf):
        raise DataError(
            f"a step must have a duration above 0 and samples, got {step_s.min():g} to "
            f"{step_s.max():g} s, and {samples.sum():g} samples; correct the arguments of "
            "hpctrain.record"
        )
    parts = {name: column(name)[dropped:] for name in (*_PARTS, *_BYTES)}
    known = _known(parts, step_s.mean())
    weights = np.where(np.isnan(column("loss")), 0, samples)
    with np.errstate(invalid="ignore"):  # a step may have no recorded loss
        losses = np.nansum(column("loss") * weights, axis=1) / weights.sum(axis=1)
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
        **resources_of(_samples(paths, of_ranks, steps[dropped:]), float(step_s.mean())),
    }


def _samples(
    paths: Iterable[Path], of_ranks: Iterable[dict[int, dict[str, Any]]], counted: Sequence[int]
) -> list[RankSamples]:
    """Return, for each rank, the samples of counters that cover the counted steps."""
    first, last = counted[0], counted[-1]
    return [
        RankSamples.read(path, rank[first]["at"] - rank[first]["seconds"], rank[last]["at"])
        for path, rank in zip(paths, of_ranks, strict=True)
    ]


def _known(
    parts: Mapping[str, npt.NDArray[np.float64]], mean_s: float
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the parts of steps that every rank recorded.

    Raises:
        DataError: a part is negative, or longer than the step.
    """
    known = {name: part for name, part in parts.items() if np.isfinite(part).all()}
    for name, part in known.items():
        means, longest = part.mean(axis=0), mean_s if name in _PARTS else math.inf
        if not 0 <= means.min() <= means.max() <= MOST_PART * longest:
            raise DataError(
                f"a part of a step must be at least 0 and at most the step, got {name} of "
                f"{means.min():g} to {means.max():g} in steps of {mean_s:g} s; correct the "
                "arguments of hpctrain.record"
            )
    return known


def _means(known: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, list[float]]:
    """Return, for each part, its mean over ranks in each step."""
    found = {name: known[name].mean(axis=1) for name in _PARTS if name in known}
    if (exposed := known.get("communication_s")) is not None:
        # The last rank to arrive waits for no other rank: the excess of other ranks is idle time.
        found["communication_s"] = exposed.min(axis=1)
        found["idle_s"] = exposed.mean(axis=1) - exposed.min(axis=1)
    return {name: means.tolist() for name, means in found.items()}


def _steps(lines: _Lines) -> dict[int, dict[str, Any]]:
    """Return the records of a rank by step; the duration of the first step may be NaN."""
    found: dict[int, dict[str, Any]] = {}
    before = math.nan
    for line in lines:
        if "samples" in line:
            if found and line["step"] <= (last := next(reversed(found))):
                raise DataError(
                    "the step numbers of a rank must increase over all epochs, but step "
                    f"{line['step']} followed step {last}; pass increasing step numbers to "
                    "hpctrain.record"
                )
            found[line["step"]] = {"seconds": line["at"] - before, **line}
        before = line["at"]
    return found


def _metric(
    lines: Iterable[_Lines], target: Mapping[str, float]
) -> tuple[str | None, float | None]:
    """Return the name and the last value of the target's metric.

    If the target is the loss, or if there is no target, use the metric that was recorded last.
    """
    wanted = next(iter(target), "loss")
    found = [
        (name, value)
        for line in chain.from_iterable(lines)
        for name, value in line.items()
        if name not in _OWN and (name == wanted if wanted != "loss" else "samples" not in line)
    ]
    return found[-1] if found else (None, None)


def begin_of(lines: _Lines) -> float:
    """Return when the first step of a rank started; if unknown, when the first step ended."""
    first: float = lines[0]["at"] - (lines[0].get("seconds") or 0.0)
    return first


def _reached(
    lines: Sequence[_Lines],
    steps: Sequence[int],
    losses: npt.NDArray[np.float64],
    target: Mapping[str, float],
) -> dict[str, Any]:
    """Return ``time_to_target_s`` and ``steps_to_target``; empty if the target was not reached.

    The seconds count from the start of the first step, and include tests of the model.
    """
    for name, wanted in target.items():
        sign = -1 if name.endswith("loss") else 1
        if name == "loss":
            ends = range(SMOOTHED, len(steps) + 1)
            found = [steps[i - 1] for i in ends if losses[i - SMOOTHED : i].mean() <= wanted]
        else:
            every = [each for each in chain.from_iterable(lines) if each.get(name) is not None]
            found = [each["step"] for each in every if sign * each[name] >= sign * wanted]
        if found:
            step, what = min(found), "samples" if name == "loss" else name
            times = [
                line["at"] - begin_of(rank)
                for rank in lines
                for line in rank
                if line["step"] == step and what in line
            ]
            return {"time_to_target_s": max(times), "steps_to_target": bisect_right(steps, step)}
    return {}
