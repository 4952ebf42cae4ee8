"""Measurements from the records of ranks, compared with manually computed values."""

import json
import subprocess
import sys

import pytest

from hpctrain.core.errors import DataError
from hpctrain.core.records import read
from hpctrain.studies.measurement import measure


def write(folder, *ranks):
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"host-{rank}.jsonl").write_text(text)


def steps(begin: float, *seconds: float, **values):
    """Return records of steps with these durations; the first has no known start."""
    at, found = begin, []
    for step, each in enumerate(seconds):
        at += each
        found.append({"step": step, "at": at, "samples": 4.0, "loss": 8.0 - step, **values})
    return found


def test_a_step_takes_as_long_as_on_the_slowest_rank_with_separate_clocks(tmp_path):
    write(tmp_path, steps(0, 9, 1, 2, 3), steps(5000, 9, 2, 1, 4))
    found = measure(tmp_path, 2, warm_up=1, target={})
    assert found["step_s"] == [2, 2, 4]
    assert (found["num_steps"], found["warm_up_steps"]) == (3, 1)
    assert (found["samples"], found["seconds"], found["loss"]) == (24, 8, 5)
    assert found["metric"] is None
    assert not {"compute_s", "rail_bytes"} & found.keys()


@pytest.mark.parametrize("warm_up", [0, 1])
def test_a_step_without_start_counts_only_with_its_own_duration(tmp_path, warm_up):
    write(tmp_path, steps(0, 9, 1, 2))
    assert measure(tmp_path, 1, warm_up=warm_up, target={})["step_s"] == [1, 2]
    write(tmp_path, steps(0, 9, 1, 2, seconds=0.5))
    found = measure(tmp_path, 1, warm_up=warm_up, target={})
    assert found["step_s"] == [0.5] * (3 - warm_up)


def test_parts_are_means_over_ranks_and_common_communication_time_is_no_idle_time(tmp_path):
    write(
        tmp_path,
        steps(0, 1, 1, compute_s=0.9, communication_s=0.1, input_s=0.0, node_bytes=10),
        steps(0, 1, 1, compute_s=0.5, communication_s=0.5, input_s=0.2, node_bytes=30),
    )
    found = measure(tmp_path, 2, warm_up=1, target={})
    assert found["compute_s"] == [pytest.approx(0.7)]
    assert found["communication_s"] == [pytest.approx(0.1)]
    assert found["idle_s"] == [pytest.approx(0.2)]
    assert found["input_s"] == [pytest.approx(0.1)]
    assert found["node_bytes"] == 40
    assert "rail_bytes" not in found


def test_a_test_is_not_a_step_and_its_time_is_excluded(tmp_path):
    lines = steps(0, 1, 1, 1)
    for line in lines[2:]:
        line["at"] += 60
    lines.insert(2, {"step": 1, "at": 62.0, "test_loss": 0.3, "accuracy": 0.9})
    write(tmp_path, lines)
    found = measure(tmp_path, 1, warm_up=0, target={})
    assert found["step_s"] == [1, 1]
    assert (found["metric_name"], found["metric"]) == ("accuracy", 0.9)


def test_the_target_is_reached_by_a_test_or_by_the_mean_of_ten_steps(tmp_path):
    lines = steps(0, *[1.0] * 40)
    lines.insert(20, {"step": 19, "at": 20.5, "accuracy": 0.97})
    write(tmp_path, lines)
    reached = measure(tmp_path, 1, warm_up=5, target={"accuracy": 0.95})
    assert (reached["steps_to_target"], reached["time_to_target_s"]) == (20, 19.5)
    reached = measure(tmp_path, 1, warm_up=5, target={"loss": 8 - 20.5})
    assert (reached["steps_to_target"], reached["time_to_target_s"]) == (26, 25)
    missed = measure(tmp_path, 1, warm_up=5, target={"accuracy": 0.98})
    assert "steps_to_target" not in missed


def test_missing_ranks_and_too_few_steps_are_errors(tmp_path):
    with pytest.raises(DataError, match="0 of 1 ranks did"):
        measure(tmp_path, 1, warm_up=0, target={})
    write(tmp_path, steps(0, 1, 1))
    with pytest.raises(DataError, match=r"1 of 2 ranks did; call hpctrain.record on every rank"):
        measure(tmp_path, 2, warm_up=0, target={})
    with pytest.raises(DataError, match="2 steps are common to all ranks, 9 of them dropped"):
        measure(tmp_path, 1, warm_up=9, target={})


def test_the_loss_is_the_sample_weighted_mean_over_ranks_that_recorded_one(tmp_path):
    one, other = steps(0, 1, 1, 1), steps(0, 1, 1, 1)
    one[2]["loss"], other[2]["loss"], other[2]["samples"] = 1.0, 5.0, 12.0
    write(tmp_path, one, other)
    assert measure(tmp_path, 2, warm_up=1, target={})["loss"] == 4
    del other[2]["loss"]
    write(tmp_path, one, other)
    assert measure(tmp_path, 2, warm_up=1, target={})["loss"] == 1
    del one[2]["loss"]
    write(tmp_path, one, other)
    found = measure(tmp_path, 2, warm_up=1, target={"loss": 9.0})
    assert found["loss"] is None
    assert "steps_to_target" not in found  # fewer than ten steps


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.0}, "a duration above 0.*got 0 to"),
        ({"seconds": -1.0}, "a duration above 0.*got -1 to"),
        ({"seconds": NAN}, "a duration above 0"),
        ({"samples": NAN}, "and samples, .*nan samples"),
        ({"samples": -4.0}, "and samples, got"),
        ({"step": 1}, "step 1 followed step 1; pass increasing"),
        ({"step": 0}, "step 0 followed step 1; pass increasing"),
        ({"step": 7}, r"1 steps are common.*recorded 3"),
    ],
)
def test_invalid_records_are_an_error_of_the_repeat(tmp_path, change, message):
    lines, good = steps(0, 1, 1, 1), steps(0, 1, 1, 1)
    if "step" in change and change["step"] == 7:
        lines[1]["step"] = 6
    lines[2] |= change
    write(tmp_path, lines, lines if "seconds" in change else good)
    with pytest.raises(DataError, match=message):
        measure(tmp_path, 2, warm_up=0, target={})


def test_null_values_are_ignored(tmp_path):
    lines = steps(0, 1, 1, 1, seconds=1.0, accuracy=None)
    lines[0]["seconds"], lines[2]["accuracy"] = None, 0.7
    write(tmp_path, lines)
    found = measure(tmp_path, 1, warm_up=0, target={"accuracy": 0.6})
    assert (found["step_s"], found["time_to_target_s"], found["metric"]) == ([1, 1], 2, 0.7)


def test_parts_that_are_not_finite_are_ignored(tmp_path):
    write(tmp_path, steps(0, 1, 1, 1, compute_s=NAN, input_s=0.5, node_bytes=NAN))
    found = measure(tmp_path, 1, warm_up=0, target={})
    assert found["input_s"] == [0.5, 0.5]
    assert not {"compute_s", "node_bytes"} & found.keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compute_s": 100.0}, "at most the step, got compute_s of 100 to 100 in steps of 1 s"),
        ({"input_s": -0.5}, "at least 0 .*got input_s of -0.5"),
        ({"rail_bytes": -8}, "at least 0 .*got rail_bytes of -8"),
    ],
)
def test_a_part_outside_its_step_is_ignored_on_one_rank_and_an_error_on_all(
    tmp_path, values, message
):
    write(tmp_path, steps(0, 1, 1, 1), steps(0, 1, 1, 1, **values))
    # wrong on one of two ranks
    assert not values.keys() & measure(tmp_path, 2, warm_up=1, target={}).keys()
    write(tmp_path, *2 * [steps(0, 1, 1, 1, **values)])
    with pytest.raises(DataError, match=message):
        measure(tmp_path, 2, warm_up=1, target={})


SCRIPT = """
import os, sys
import hpctrain
for step in range(3):
    hpctrain.record(step=step, samples=2, loss=0.5)
if os.fork() == 0:
    hpctrain.record(step=9, accuracy=0.5)
    sys.exit()
os.wait()
print("torch" in sys.modules, "mpi4py" in sys.modules)
"""


def test_record_writes_one_file_per_process_and_only_in_a_study(tmp_path):
    def run(**environ):
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
            cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path), **environ},
        ).stdout  # fmt: skip

    assert run() == "False False\n"
    assert list(tmp_path.iterdir()) == []
    run(HPCTRAIN_RECORDS="here")
    files = sorted((read(path, key="at") for path in (tmp_path / "here").iterdir()), key=len)
    assert [[line["step"] for line in lines] for lines in files] == [[9], [0, 1, 2]]
    assert files[1][0]["samples"] == 2
