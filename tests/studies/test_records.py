"""The files of a study say again what was written, also after a kill."""

import math

import pytest

from hpctrain.core.errors import DataError
from hpctrain.core.records import Records
from hpctrain.studies.records import Environment, PointRecord, StudyFacts, StudyFolder

FACTS = StudyFacts(
    name="digits",
    mode="strong",
    repeats=5,
    seed=1,
    warm_up="the first 10 steps",
    target={"accuracy": 0.95},
    factors={"ranks": [1, 2]},
    command="python x.py",
    launcher="",
    cores=2,
)


def record(order: int, **values) -> PointRecord:
    return PointRecord(
        **{
            "point": {"ranks": 1},
            "repeat": 0,
            "order": order,
            "status": "done",
            "oversubscribed": False,
            "started": "2026-01-01T00:00:00Z",
            "folder": f"attempts/{order}",
            "step_s": [0.5, 0.25],
            "samples": 12,
            "seconds": 0.75,
            **values,
        }
    )


def append(path, *records: PointRecord) -> None:
    with Records(path) as file:
        for each in records:
            file.append(each.as_dict())


def test_what_was_written_is_read_again(tmp_path):
    folder = StudyFolder(tmp_path)
    environment = Environment(
        versions={"torch": "2"}, cpu="c", cores=2, host="h", commit=None, topology=None,
        plan=None, slurm_job=None, pinning={"cores": [0, 1]},
    )  # fmt: skip
    folder.write(folder.study, FACTS)
    folder.write(folder.environment, environment)
    append(folder.points_file(), record(1), record(0, loss=0.5))
    assert folder.read_study() == FACTS
    assert folder.read_environment() == environment
    assert folder.read_points() == [record(0, loss=0.5), record(1)]
    assert record(0).samples_per_s == 16


def test_shares_of_jobs_are_one_study_and_a_repeat_counts_once(tmp_path):
    folder = StudyFolder(tmp_path)
    append(folder.points_file(0), record(1, status="failed", error="out of memory"), record(1))
    append(folder.points_file(1), record(0))
    assert folder.read_points() == [record(0), record(1)]


def test_a_line_cut_short_by_a_kill_is_no_record_and_the_next_is_one(tmp_path):
    folder = StudyFolder(tmp_path)
    append(folder.points_file(), record(0))
    with folder.points_file().open("ab") as file:
        file.write(b'{"point": {"ranks": 2}, "status": "do')
    append(folder.points_file(), record(2, loss=math.nan))
    assert folder.read_points() == [record(0), record(2, loss=None)]


def test_files_of_another_version_are_an_error_that_names_the_field(tmp_path):
    folder = StudyFolder(tmp_path)
    with pytest.raises(DataError, match="hpctrain study run"):
        folder.read_study()
    folder.study.write_text('{"name": "x", "size": 3}')
    with pytest.raises(DataError, match="size"):
        folder.read_study()
