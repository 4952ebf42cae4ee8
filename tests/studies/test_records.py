"""The files of a study return the written records, also after a kill."""

import math
from dataclasses import asdict

import pytest

from hpctrain.core.errors import DataError
from hpctrain.core.records import Records
from hpctrain.studies.point_records import PointRecord, StudyFolder


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
            file.append(asdict(each))


def test_written_records_are_read_back(tmp_path):
    folder = StudyFolder(tmp_path)
    assert folder.read_environment() is None
    environment = {"versions": {"torch": "2"}, "cores": 2, "commit": None, "pinning": [0, 1]}
    folder.write(folder.environment, environment)
    append(folder.points_file(0), record(1), record(0, loss=0.5))
    assert folder.read_environment() == environment
    assert folder.read_points() == [record(0, loss=0.5), record(1)]
    assert record(0).samples_per_s == 16


def test_files_of_several_jobs_form_one_study_and_a_repeat_counts_once(tmp_path):
    folder = StudyFolder(tmp_path)
    append(folder.points_file(0), record(1, status="failed", error="out of memory"), record(1))
    append(folder.points_file(1), record(0))
    assert folder.read_points() == [record(0), record(1)]


def test_a_truncated_line_is_ignored_and_the_next_record_is_read(tmp_path):
    folder = StudyFolder(tmp_path)
    append(folder.points_file(0), record(0))
    with folder.points_file(0).open("ab") as file:
        file.write(b'{"point": {"ranks": 2}, "status": "do')
    append(folder.points_file(0), record(2, loss=math.nan))
    assert folder.read_points() == [record(0), record(2, loss=None)]


def test_files_of_another_version_are_an_error_with_the_field(tmp_path):
    folder = StudyFolder(tmp_path)
    folder.points_file(0).write_text('{"status": "done", "size": 3}\n')
    with pytest.raises(DataError, match=r"this version.*size"):
        folder.read_points()
