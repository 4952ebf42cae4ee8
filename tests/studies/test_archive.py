"""An archive contains what was measured, and gives the same conclusions elsewhere."""

import io
import os
import shutil
import tarfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath

import pytest
from typer.testing import CliRunner

from hpctrain.cli.study import app
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.units import MIB
from hpctrain.studies.reproduction import FAILS, HOLDS, Reproduction
from hpctrain.studies.study_archive import SUMS, export, files_of, read
from hpctrain.studies.study_file import load
from hpctrain.studies.study_results import StudyResults
from tests.studies import generated

STUDY = """
factors = { ranks = [1, 2] }
study = { name = "s", repeats = 4, warm_up = 0, cores = 4 }
[command]
launcher = ""
run = "python work.py {ranks} --config my.toml"
"""
WORK = """
import json, os, sys
from helper import step_s
for rank in range(int(sys.argv[1])):
    with open(f"{os.environ['HPCTRAIN_RECORDS']}/rank-{rank}.jsonl", "w") as file:
        line = {"at": 1, "samples": 8, "seconds": step_s(int(sys.argv[1]))}
        file.write(json.dumps({"step": 0, **line}) + "\\n")
"""
HELPER = "import os\n\ndef step_s(ranks):\n    return (1 + ord(os.urandom(1)) / 2560) / ranks\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    Path("study.toml").write_text(STUDY)
    Path("work.py").write_text(WORK)
    Path("helper.py").write_text(HELPER)
    Path("model.py").touch()
    Path("unused.py").touch()
    Path("my.toml").write_text('model.target = "model:build"\n')


def run(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def measured():
    assert run("run", "study.toml").exit_code == 0
    return StudyResults.read(Path("studies/s"))


def test_files_are_those_of_the_command_and_the_modules_that_they_name():
    names = ["helper.py", "model.py", "my.toml", "work.py"]
    assert list(files_of(load(Path("study.toml")))) == names
    Path("study.toml").write_text(STUDY.replace("work.py", f"{Path.cwd()}/../outside.py"))
    Path("../outside.py").touch()
    outside = str(Path("../outside.py").resolve())
    assert list(files_of(load(Path("study.toml")))) == sorted([outside, "model.py", "my.toml"])


@pytest.mark.launches
@pytest.mark.limit(300)
def test_a_study_exports_and_reproduces_in_another_folder(tmp_path, monkeypatch):
    results = measured()
    assert results.environment["files"].keys() == files_of(results.config).keys()
    assert "wrote s.tar.gz" in run("export", "studies/s").stdout
    export(results, Path("again.tar.gz"))
    assert read(Path("again.tar.gz")).keys() == read(Path("s.tar.gz")).keys()
    for part in (
        "study/STUDY.toml",
        "study/environment.json",
        "study/points-3.jsonl",
        "files/my.toml",
    ):
        assert part in read(Path("s.tar.gz"))
    assert "study/attempts/0000/records/rank-0.jsonl" in read(Path("s.tar.gz"))

    other = tmp_path / "other"
    other.mkdir()
    shutil.move("s.tar.gz", other)
    monkeypatch.chdir(other)
    result = run("reproduce", "s.tar.gz")
    assert result.exit_code == 0
    assert "2 of 2 conclusions of the study hold" in result.stdout
    assert (other / "s-reproduced/files/helper.py").exists()
    assert (
        "efficiency at ranks 2 at least 75%"
        in (other / "s-reproduced/reproduction.txt").read_text()
    )

    # The same command continues, here after a change of the reproduction by its user.
    monkeypatch.chdir(other)
    (other / "s-reproduced/files/helper.py").write_text(HELPER.replace("/ ranks", "* ranks"))
    shutil.rmtree(other / "s-reproduced/study")
    result = run("reproduce", "s.tar.gz")
    assert result.exit_code == 1
    assert "does not hold" in result.stdout
    assert "0 of 2 conclusions" in result.stdout


def write_study():
    """Return a study with generated results of the command of ``STUDY``."""
    config = load(Path("study.toml"))
    records = [
        replace(each, point={"ranks": each.point["ranks"]}) for each in generated.records(config)
    ]
    results = generated.complete(config=config, records=records)
    return StudyResults.read(generated.write(results, Path("studies/s")))


def test_equal_step_times_do_not_order_two_points():
    times = {"step_s": [0.5] * generated.NUM_STEPS}
    records = [replace(each, **times) for each in generated.records(load(Path("study.toml")))]
    results = generated.complete(config=load(Path("study.toml")), records=records)
    found = Reproduction(results, results)
    assert [each.text for each in found.conclusions] == ["efficiency at ranks 2 below 75%"]
    assert found.num_undecided == 1


def test_equal_studies_give_equal_archives():
    results = write_study()
    export(results, Path("a.tar.gz"))
    first = Path("a.tar.gz").read_bytes()
    os.utime("work.py", (0, 0))
    export(results, Path("a.tar.gz"))
    assert Path("a.tar.gz").read_bytes() == first


@pytest.mark.parametrize(
    ("name", "state"), [("helper.py", "was changed"), ("my.toml", "is missing")]
)
def test_scripts_that_differ_from_the_measured_ones_are_rejected(name, state):
    results = write_study()
    environment = {**results.environment, "files": dict(checks(results))}
    results = replace(results, environment=environment)
    export(results, Path("a.tar.gz"))
    if state == "was changed":
        Path(name).write_text("x = 1")
    else:
        Path(name).unlink()
    with pytest.raises(DataError, match=f"{name} {state}"):
        export(results, Path("a.tar.gz"))


def checks(results):
    export(results, Path("first.tar.gz"))
    lines = read(Path("first.tar.gz"))[SUMS].decode().splitlines()
    pairs = [line.split("  ") for line in lines]
    return [(name.partition("/")[2], data) for data, name in pairs if name.startswith("files/")]


def test_further_files_are_added_and_files_outside_are_rejected(tmp_path):
    results = write_study()
    Path("data").mkdir()
    Path("data/x.bin").write_bytes(b"x")
    export(results, Path("a.tar.gz"), [Path("data")])
    assert read(Path("a.tar.gz"))["files/data/x.bin"] == b"x"
    with pytest.raises(ConfigError, match="below the current directory"):
        export(results, Path("a.tar.gz"), [tmp_path])
    with pytest.raises(ConfigError, match="below the current directory"):
        export(results, Path("a.tar.gz"), [Path("absent")])


def test_a_changed_or_incomplete_archive_is_rejected(tmp_path):
    export(write_study(), Path("a.tar.gz"))
    whole = Path("a.tar.gz").read_bytes()
    Path("cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"complete archive of `hpctrain study export`"):
        read(Path("cut.tar.gz"))
    with tarfile.open("a.tar.gz") as file:
        file.extractall(tmp_path / "content", filter="data")
    (tmp_path / "content/s/files/work.py").write_text("print('other')")
    (tmp_path / "content/s/more").touch()
    with tarfile.open("b.tar.gz", "w:gz") as file:
        file.add(tmp_path / "content/s", "s")
    with pytest.raises(DataError, match="must contain the files of its SHA256SUMS, but"):
        read(Path("b.tar.gz"))
    with pytest.raises(DataError, match="complete archive"):
        run("reproduce", "study.toml")


@pytest.mark.parametrize("kind", ["absolute", "above", "symbolic link", "link", "huge"])
def test_an_unsafe_archive_is_rejected_and_writes_no_file(tmp_path, kind):
    member = tarfile.TarInfo("s/files/x")
    data, outside = b"", tmp_path / "outside"
    if kind == "absolute":
        member.name = str(outside)
    elif kind == "above":
        member.name = "s/../../outside"
    elif kind == "huge":
        data = bytes(65 * MIB)
    else:
        member.type = tarfile.SYMTYPE if "symbolic" in kind else tarfile.LNKTYPE
        member.linkname = str(outside)
    member.size = len(data)
    name = "/".join(PurePosixPath(member.name).parts[1:])
    sums = f"{sha256(data).hexdigest()}  {name}\n".encode()  # the checksums are right
    with tarfile.open("bad.tar.gz", "w:gz", compresslevel=1) as file:
        head = tarfile.TarInfo(f"s/{SUMS}")
        head.size = len(sums)
        file.addfile(head, io.BytesIO(sums))
        file.addfile(member, io.BytesIO(data))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"bad\.tar\.gz.*copy it again"):
        run("reproduce", "bad.tar.gz")
    assert sorted(tmp_path.rglob("*")) == before


def test_another_archive_needs_another_folder():
    export(write_study(), Path("a.tar.gz"))
    place = Path("a-reproduced/original")
    place.mkdir(parents=True)
    (place / SUMS).write_text("other")
    with pytest.raises(ConfigError, match="choose another directory with --out"):
        run("reproduce", "a.tar.gz")


def study(change=lambda record: record, **changes):
    config = generated.config({"ranks": [1, 2, 4], "codec": ["none", "bf16"]}, **changes)
    return generated.complete(config=config, records=list(map(change, generated.records(config))))


def results_of(first, again):
    return {each.text: each.result for each in Reproduction(first, again).conclusions}


def test_a_repeated_study_holds_and_a_slower_one_does_not():
    def slower(record):
        times = [each * record.point["ranks"] ** 2 for each in record.step_s]
        return replace(record, step_s=times)

    same = results_of(study(), study(lambda each: replace(each, repeat=each.repeat)))
    assert set(same.values()) == {HOLDS}
    assert any(text.startswith("efficiency at ranks 4") for text in same)
    assert any("reaches accuracy 0.95" in text for text in same)
    found = results_of(study(), study(slower))
    assert found["ranks 2, codec none has shorter steps than ranks 1, codec none"] == FAILS
    assert not Reproduction(study(), study(slower)).holds
    assert "longer steps" in "".join(results_of(study(slower), study(slower)))


def test_missing_points_and_too_few_repeats_are_no_failure():
    few = study(repeats=2)
    results = results_of(study(), few)
    assert {each for each in results.values() if each != HOLDS} == {
        "undecided: more repeats are needed"
    }
    assert results_of(few, study()).keys() == {
        text for text in results_of(study(), study()) if "reaches" in text
    }
    absent = study(lambda each: replace(each, oversubscribed=each.point["ranks"] == 4))
    found = results_of(study(), absent)
    assert any(each.startswith("not tested") for each in found.values())
    assert Reproduction(study(), absent).holds
