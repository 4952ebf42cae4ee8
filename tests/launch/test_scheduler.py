"""Calls of Slurm's commands, with scripts that print the output of the real commands."""

import sys
import time

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm import scheduler
from hpctrain.launch.slurm.scheduler import (
    dependency,
    find_sbatch,
    in_queue,
    job_end,
    restart_count,
    sbatch_time,
    submit,
    time_limit_s,
    try_out,
)


@pytest.fixture
def command(tmp_path):
    """Function that writes a command to the only folder on PATH; returns the environment."""

    def write(name, body, **more):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}", "SLURM_JOB_ID": "17", **more}

    return write


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:07", 7),
        ("1:30", 90),
        ("90", 5400),
        ("2:03:04", 7384),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        *((text, None) for text in ("0", "UNLIMITED", "NOT_SET", "INVALID", "tomorrow", "")),
    ],
)
def test_time_limits_are_parsed_as_by_slurm(text, seconds):
    assert time_limit_s(text) == seconds


def test_durations_become_time_limits():
    assert [sbatch_time(text) for text in ("90min", "1h30min", "30s", "2d", "1-12", "90")] == [
        *("01:30:00", "01:30:00", "00:01:00", "48:00:00", "1-12", "90"),
    ]


def test_the_end_time_in_the_environment_avoids_a_call_of_squeue(command):
    assert job_end(command("squeue", "exit 1", SLURM_JOB_END_TIME="1234")) == 1234.0
    assert job_end({"PATH": "/nowhere"}) is None  # not in a job


@pytest.mark.parametrize("message", ["17 10:00", "18 3:00\n17 10:00\n19 1:00"])
def test_without_an_end_time_squeue_gives_the_remaining_time_of_this_job(
    command, tmp_path, message
):
    before = time.time()
    end = job_end(command("squeue", f"echo '{message}'; echo \"$@\" >{tmp_path}/asked"))
    assert before + 600 <= end <= time.time() + 600
    assert "-j 17 " in (tmp_path / "asked").read_text()
    assert job_end(command("squeue", "echo '17 UNLIMITED'")) is None


def test_an_error_of_slurm_is_raised_with_its_message(command, monkeypatch):
    message = "slurm_load_jobs error: Unable to contact"
    refuses = command("squeue", f"echo '{message}' >&2; exit 1")
    command("sbatch", "true")
    for ask in (job_end, lambda environ: in_queue([1], environ)):
        with pytest.raises(LaunchError, match="slurm_load_jobs error: Unable to contact"):
            ask(refuses)
    monkeypatch.setattr(scheduler, "ANSWER_S", 0.2)
    with pytest.raises(LaunchError, match="timed out after"):
        job_end(command("squeue", "exec /bin/sleep 20"))
    with pytest.raises(LaunchError, match="squeue must be in PATH"):
        job_end({"PATH": "/nowhere", "SLURM_JOB_ID": "17"})


def test_restarts_are_counted_from_zero():
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "3"}) == 3


@pytest.mark.parametrize(("name", "scheduler"), [("qsub", "PBS"), ("bsub", "LSF")])
def test_another_scheduler_is_an_error_with_the_command_that_works(command, name, scheduler):
    with pytest.raises(LaunchError, match=rf"{scheduler} \({name}\).*hpctrain launch -n"):
        find_sbatch(command(name, "true"))


def test_sbatch_is_preferred_to_commands_of_other_schedulers(command, tmp_path):
    command("qsub", "true")
    assert find_sbatch(command("sbatch", "true")) == str(tmp_path / "sbatch")


def test_a_missing_scheduler_is_an_error(tmp_path):
    with pytest.raises(LaunchError, match=r"must be in PATH.*--print shows.*hpctrain launch"):
        try_out("#!/bin/sh\n", {"PATH": str(tmp_path)})


def test_sbatch_tests_the_script_itself(command):
    environ = command(
        "sbatch",
        '[ "$*" = --test-only ] || exit 1; read -r line; [ "$line" = "#!/bin/sh" ] || exit 2\n'
        'echo "sbatch: Job 8 to start at 12:00 on nodes n[0-1]" >&2',
    )
    assert try_out("#!/bin/sh\n", environ) == "the job would start at 12:00 on nodes n[0-1]"


def test_a_rejection_contains_each_message_of_slurm_once(command):
    message = (
        "sbatch: error: Invalid account\\nsbatch: error: Invalid account\\nallocation failure: x"
    )
    environ = command("sbatch", f"printf '{message}' >&2; exit 1")
    with pytest.raises(
        LaunchError, match=r"sbatch reports: Invalid account; allocation failure: x$"
    ):
        try_out("#!/bin/sh\n", environ)
    with pytest.raises(
        LaunchError, match=r"must accept a\.sbatch, but sbatch reports: Invalid account; all"
    ):
        submit("a.sbatch", environ)


@pytest.mark.parametrize("message", ["12", "12;cluster"])
def test_the_job_id_is_parsed(command, message):
    assert submit("a.sbatch", command("sbatch", f"echo '{message}'")) == 12


def test_a_job_finds_the_hpctrain_command_of_this_environment(command, tmp_path, monkeypatch):
    environ = command("sbatch", f'echo "$PATH" > {tmp_path}/path; echo 1')

    def path_of_job():
        submit("a.sbatch", environ)
        return (tmp_path / "path").read_text().strip()

    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert path_of_job() == str(tmp_path)  # no command in the folder, so PATH is not changed
    command("venv/bin/hpctrain", "true")
    assert path_of_job() == f"{folder}:{tmp_path}"
    environ = {"PATH": f"{folder}:{tmp_path}"}
    assert path_of_job() == f"{folder}:{tmp_path}"


def test_output_without_a_job_id_is_an_error(command):
    with pytest.raises(LaunchError, match="sbatch reports: fine"):
        submit("a.sbatch", command("sbatch", "echo fine"))


def test_pending_and_running_jobs_and_arrays_are_found(command):
    lines = (
        "12 12 RUNNING 2026-11-25T08:30:00 2026-11-25T09:00:00 None",
        "13 13 PENDING 2026-11-25T07:00:00 2026-11-25T10:00:00 Priority",
        "14 14 PENDING 2026-11-25T07:00:00 2026-11-25T10:00:00 Priority",
        "15 13 RUNNING 2026-11-25T07:00:00 2026-11-25T08:00:00 None",
        "16 16 PENDING 2026-11-25T06:00:00 N/A (Nodes are down, or reserved)",
    )
    command("squeue", "printf '" + "\\n".join(lines) + "\\n'")
    environ = command("sbatch", "true")
    waits = "PENDING, Priority, since 2026-11-25T07:00:00, expected to start 2026-11-25T10:00:00"
    assert in_queue([11, 12, 13, 14, 16], environ) == {
        12: "RUNNING, since 2026-11-25T09:00:00",
        13: "RUNNING, since 2026-11-25T08:00:00",
        14: waits,
        16: "PENDING, (Nodes are down, or reserved), since 2026-11-25T06:00:00",
    }


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("12", "afterok:12"),
        ("12,13", "afterok:12:13"),
        ("12_3", "afterok:12_3"),
        ("afterany:12", "afterany:12"),
        ("afterok:12:13?afterany:14", "afterok:12:13?afterany:14"),
        ("after:12+5", "after:12+5"),
        ("singleton", "singleton"),
        ("job", "job"),  # may be a condition of a newer Slurm, which sbatch checks
    ],
)
def test_a_job_id_means_afterok(text, condition):
    assert dependency(text) == condition


@pytest.mark.parametrize("text", ["", "12 13", "after ok:12", "-1"])
def test_invalid_conditions_are_rejected(text):
    with pytest.raises(LaunchError, match="--after must be"):
        dependency(text)


def test_a_job_on_another_cluster_than_its_commands_is_refused(command):
    environ = command("sbatch", "echo 12", SBATCH_CLUSTERS="b")
    with pytest.raises(LaunchError, match=r"got SBATCH_CLUSTERS=b, .*export SLURM_CLUSTERS=b"):
        submit("a.sbatch", environ)
    assert submit("a.sbatch", environ | {"SLURM_CLUSTERS": "b"}) == 12
