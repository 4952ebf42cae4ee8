"""A study resumes after a kill, measures each point once, and continues after a failed point."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.records import Records
from hpctrain.launch.lease import Times
from hpctrain.studies.attempt import OUTPUT, carry_out
from hpctrain.studies.point_records import StudyFolder
from hpctrain.studies.study_file import CommandTable, StudyConfig, StudyTable, load
from hpctrain.studies.study_run import Study
from tests.harness.pace import scaled
from tests.processes import wait_until

RANKS = [1, 2, 3]

# Simulates a program of {ranks} ranks: writes their records, then runs the code after it.
FAKE = """
i=0
while [ $i -lt {ranks} ]; do
  for at in 1 2 4; do echo '{"step": '$at', "at": '$at', "samples": 8}'; done \\
    > $HPCTRAIN_RECORDS/rank-$i.jsonl
  i=$((i + 1))
done
"""


def config(after: str = "", **table) -> StudyConfig:
    table = {"repeats": 2, "warm_up": 1, **table}
    text = (FAKE + after).replace("'", "'\\''")
    return StudyConfig(
        factors={"ranks": RANKS},
        study=StudyTable(**table),
        command=CommandTable(run=f"sh -c '{text}'", launcher=""),
    )


def points(folder: Path):
    return [(record.point["ranks"], record.repeat) for record in StudyFolder(folder).read_points()]


def left_over(folder: Path) -> list[int]:
    mark = f"HPCTRAIN_RECORDS={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(w.startswith(mark) for w in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
        except OSError:
            pass
    return found


def test_a_study_measures_every_point_in_every_repeat_once(tmp_path):
    study = Study(config(), tmp_path)
    study.prepare()
    heard = []
    study.measure(study.missing(), begun=heard.append, ended=heard.append)
    assert sorted(points(tmp_path)) == [(ranks, r) for ranks in RANKS for r in range(2)]
    assert [each.order for each in heard] == [order for i in range(6) for order in (i, i)]
    assert study.missing() == []
    [record, *_] = study.folder.read_points()
    assert (record.step_s, record.samples) == ([1, 2], 16 * record.point["ranks"])
    assert (tmp_path / record.folder / OUTPUT).exists()
    assert load(study.folder.file) == study.config
    assert study.folder.read_environment()["versions"]["hpctrain"]


def test_repeats_can_be_added_and_other_changes_are_rejected(tmp_path):
    for repeats in (1, 2):
        study = Study(config(repeats=repeats), tmp_path)
        study.prepare()
        assert len(study.missing()) == 3
        study.measure(study.missing())
    assert len(points(tmp_path)) == 6
    with pytest.raises(ConfigError, match=r"other values of study.seed, study.warm_up"):
        Study(config(seed=3, warm_up=0), tmp_path).prepare()


def test_a_study_resumed_in_another_environment_warns_of_the_difference(tmp_path, caplog):
    study = Study(config(), tmp_path)
    study.prepare()
    study.measure(study.missing()[:1])
    environment = study.folder.read_environment()
    study.folder.write(study.folder.environment, {**environment, "cores": 999})
    study.measure(study.missing()[:1])
    [message] = caplog.messages
    assert "one environment, but cores was 999" in message
    assert len(points(tmp_path)) == 2


def test_a_failed_point_is_recorded_with_its_error_and_the_study_continues(tmp_path):
    study = Study(config("echo out of memory >&2\n[ {ranks} != 2 ] || exit 3"), tmp_path)
    study.prepare()
    study.measure(study.missing())
    records = study.folder.read_points()
    assert len(records) == 6
    for record in records:
        assert record.status == ("failed" if record.point["ranks"] == 2 else "done")
        if record.status == "failed":
            assert record.error == "the command ended with exit code 3\n  out of memory"
    assert study.missing() == []
    assert [a.point["ranks"] for a in study.missing(failed=True)] == [2, 2]


def test_a_study_stops_at_an_error_that_no_point_causes(tmp_path):
    study = Study(config("echo rank {ranks}: no data >&2; exit 2", repeats=5), tmp_path)
    study.prepare()
    assert not study.measure(study.missing())
    assert len(points(tmp_path)) == 3
    assert len(study.missing()) == 12
    assert not study.measure(study.missing())  # the same command continues with the other points
    assert len(points(tmp_path)) == 6


def test_a_study_stops_if_points_fail_that_succeeded_before(tmp_path):
    study = Study(config(f"[ ! -e {tmp_path}/broken ]", repeats=3), tmp_path)
    study.prepare()
    assert study.measure(study.missing(repeat=0))
    (tmp_path / "broken").touch()
    assert not study.measure(study.missing())
    assert len(points(tmp_path)) == 6


def test_errors_of_some_points_do_not_stop_a_study(tmp_path):
    after = "echo out of memory >&2\n[ {ranks} = 3 ] || exit 3"
    study = Study(config(after, repeats=3), tmp_path)
    study.prepare()
    assert study.measure(study.missing())
    assert len(points(tmp_path)) == 9
    different = Study(config("mktemp -u XXXXXXXXXX; exit 1"), tmp_path / "different")
    different.prepare()
    assert different.measure(different.missing())


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("true {ranks}", r"0 of \d ranks did"),
        ("nowhere {ranks}", "got 'nowhere'"),
        ("sh -c 'sleep 600 & sleep 600; {ranks}'", "must end within study.timeout = 1s"),
    ],
)
def test_commands_that_record_nothing_or_hang_fail_and_leave_no_process(tmp_path, command, output):
    asked = StudyConfig(
        factors={"ranks": [1]},
        study=StudyTable(timeout="1s"),
        command=CommandTable(run=command, launcher=""),
    )
    [attempt, *_] = Study(asked, tmp_path).attempts
    record = carry_out(asked, attempt, StudyFolder(tmp_path))
    assert record.status == "failed"
    assert re.search(output, record.error)
    assert left_over(tmp_path) == []


def test_files_and_processes_of_an_interrupted_attempt_are_removed(tmp_path):
    study = Study(config(), tmp_path)
    study.prepare()
    records = tmp_path / "attempts/0003/records"
    records.mkdir(parents=True)
    (records / "rank-9.jsonl").write_text('{"step": 0, "at": 1, "samples": 8}\n')
    orphan = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "HPCTRAIN_RECORDS": str(records)}
    )
    study.measure(study.missing())
    assert orphan.poll() == -signal.SIGKILL
    assert [record.status for record in study.folder.read_points()] == ["done"] * 6


def test_a_repeat_is_measured_by_one_process_and_others_concurrently(tmp_path):
    times = Times(beat_s=0.02, wait_s=0.1, look_s=0.02, settle_s=0.05)
    study = Study(config(), tmp_path, times)
    study.prepare()

    def also(_attempt):
        for attempts in (study.missing(repeat=0), study.missing()):
            with pytest.raises(ConfigError, match=r"still writes.*run this command again"):
                Study(config(), tmp_path, times).measure(attempts)
        Study(config(), tmp_path, times).measure(study.missing(repeat=1))

    study.measure(study.missing(repeat=0)[:1], begun=also)
    assert sorted(record.repeat for record in study.folder.read_points()) == [0, 1, 1, 1]


def test_a_process_that_lost_its_repeat_writes_no_records(tmp_path):
    study = Study(config(), tmp_path)
    study.prepare()

    def take(_attempt):
        [lease] = (tmp_path / "leases").glob("*/lease.json")
        lease.write_text(lease.read_text().replace('"token": "', '"token": "a'))

    with pytest.raises(CheckpointError, match=r"has taken the lease.*run this command again"):
        study.measure(study.missing(), begun=take)
    assert study.folder.read_points() == []


def test_the_expected_time_is_extrapolated_from_measured_points(tmp_path):
    study = Study(config(), tmp_path)
    study.prepare()
    assert study.expected_s(study.missing()) is None
    study.measure(study.missing()[:1])
    [record] = study.folder.read_points()
    with Records(study.folder.points_file(0)) as records:
        failed = replace(record, order=1, status="failed", step_s=[], wall_s=3600.0)
        # failed attempts do not count: they end early or at the time limit
        records.append(asdict(failed))
    assert study.expected_s(study.missing()) == pytest.approx(4 * record.wall_s)


STUDY = """
[factors]
ranks = [1, 2, 3]
[study]
name = "killed"
repeats = 4
warm_up = 1
[command]
launcher = ""
run = "sh fake.sh {ranks}"
"""


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "study", "run", "study.toml"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )


@pytest.mark.launches
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_study_killed_at_random_times_resumes_to_the_same_points(tmp_path, how):
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "fake.sh").write_text(FAKE.replace("{ranks}", "$1") + "sleep 0.1\n")
    folder, moments = tmp_path / "studies/killed", random.Random(how)
    before = []
    for _ in range(3):
        process = start(tmp_path)
        while process.poll() is None and not len(points(folder)) > len(before):
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.2))
        process.send_signal(how)
        process.wait()
        if how == signal.SIGTERM:
            assert left_over(folder) == []
        assert points(folder)[: len(before)] == before
        before = points(folder)
    process = start(tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "12 of 12 measured, 0 failed" in output
    lines = [line for path in folder.glob("points-*.jsonl") for line in path.open()]
    found = Counter((line["point"]["ranks"], line["repeat"]) for line in map(json.loads, lines))
    assert found == Counter((ranks, repeat) for ranks in RANKS for repeat in range(4))
    assert left_over(folder) == []


@pytest.mark.launches
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_ends_a_point_that_ignores_signals_and_the_second_changes_nothing(
    tmp_path, how
):
    (tmp_path / "study.toml").write_text(STUDY)
    script, folder = tmp_path / "fake.sh", tmp_path / "studies/killed"
    records = FAKE.replace("{ranks}", "$1")
    script.write_text(f"trap '' INT TERM HUP\n{records} echo begun; sleep 600\n")
    process = start(tmp_path)
    assert wait_until(
        lambda: any(each.read_text() for each in folder.rglob(OUTPUT)), limit_s=60
    ), process.stderr.read()
    process.send_signal(signal.Signals[how])
    line = next(line for line in process.stderr if line.startswith("hpctrain: SIG"))
    assert process.poll() is None  # the line appears before the point has ended
    process.send_signal(signal.Signals[how])
    output, _ = process.communicate(timeout=scaled(30))
    assert process.returncode == 128 + signal.Signals[how]
    assert re.search(
        rf"{how} ends the study in ranks=\d repeat 0, after 0 of 12 repeats of points; the same "
        "command measures the others",
        line,
    )
    assert (output, points(folder), left_over(folder)) == ("", [], [])
    assert not [*folder.rglob("lease.json")]
    script.write_text(records)
    output, _ = start(tmp_path).communicate()
    assert "12 of 12 measured, 0 failed" in output
    assert not [*folder.rglob("lease.json")]


@pytest.mark.launches
def test_a_full_disk_ends_the_study_and_is_not_recorded_as_a_failure_of_the_point(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    script, folder = tmp_path / "fake.sh", tmp_path / "studies/killed"
    records = FAKE.replace("{ranks}", "$1")
    script.write_text('ln -s /dev/full "$HPCTRAIN_RECORDS/../space.part"; exit 1\n')
    process = start(tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "No space left on device; free space there, or choose another folder" in errors
    assert points(folder) == []
    script.write_text(records)
    output, _ = start(tmp_path).communicate()
    assert "12 of 12 measured, 0 failed" in output


def test_a_study_started_by_nohup_survives_a_hangup(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "fake.sh").write_text(FAKE.replace("{ranks}", "$1") + "kill -HUP $PPID\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    output, _ = process.communicate()
    lines = output.splitlines()
    assert re.search(r"samples/s.* \[1 of 12, .*s left\]$", lines[0])
    assert re.search(r" \[12 of 12\]$", lines[11])
    assert "12 of 12 measured, 0 failed" in output
