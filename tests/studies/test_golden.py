"""Check that studies of version 1.0, and their archives, stay readable.

``hpctrain study run`` wrote ``golden`` on two ranks, without its attempts; names of the host and
of its processor were replaced. ``hpctrain study export`` wrote ``golden.tar.gz`` from it. The
files must not be rewritten.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import DataError
from hpctrain.core.formats import stamp
from hpctrain.studies import point_records, study_archive
from hpctrain.studies.study_results import StudyResults

GOLDEN = Path(__file__).parent / "golden"
FILES = {
    "STUDY.toml": "03951f86d903501f",
    "environment.json": "da36c87da025a3f2",
    "points-0.jsonl": "9b792e2b761305bb",
    "points-1.jsonl": "158ebcac19db8c60",
}


def test_the_golden_study_has_the_current_version_and_is_unchanged():
    assert (
        json.loads((GOLDEN / "environment.json").read_text())["version"] == point_records.VERSION
    )
    digests = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()[:16] for each in GOLDEN.iterdir()
    }
    assert digests == FILES


def test_the_golden_study_is_read_and_reported(tmp_path):
    study = StudyResults.read(GOLDEN)
    assert (study.config.study.name, study.config.factors["ranks"]) == ("golden", [1, 2])
    assert study.environment["versions"]["hpctrain"] == "1.0.0rc1"
    assert [(each.point["ranks"], each.repeat, each.status) for each in study.records] == [
        (2, 0, "done"),
        (1, 0, "done"),
        (2, 1, "done"),
        (1, 1, "done"),
    ]
    folder = shutil.copytree(GOLDEN, tmp_path / "study")
    result = CliRunner().invoke(app, ["study", "report", str(folder)])
    assert result.exit_code == 0, result.output


def test_the_golden_archive_contains_the_golden_study():
    archive = GOLDEN.with_suffix(".tar.gz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest()[:16] == "1a77b55d60c3c94c"
    contents = study_archive.read(archive)
    assert contents.keys() == {"README.md", "SHA256SUMS", *(f"study/{name}" for name in FILES)}
    assert all(contents[f"study/{name}"] == (GOLDEN / name).read_bytes() for name in FILES)


def test_a_newer_study_is_refused_with_the_version_that_reads_it(tmp_path):
    folder = shutil.copytree(GOLDEN, tmp_path / "study")
    file = folder / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stamp(2, "1.7")))
    (folder / "STUDY.toml").write_text("new_key = 1")
    refused = "cannot be read: its format version must be at most 1, got 2; install hpctrain 1.7"
    with pytest.raises(DataError, match=f"the study {folder} {refused} or later"):
        StudyResults.read(folder)
