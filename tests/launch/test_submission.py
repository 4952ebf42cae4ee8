"""The door to sbatch, with a stand-in that says what Slurm says."""

import sys

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm.scheduler import dependency, find_sbatch, still_there, submit, try_out


@pytest.fixture
def command(tmp_path):
    """Write a command into a folder that is all of PATH; return the environment."""

    def write(name, body):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}"}

    return write


def test_sbatch_is_that_of_path(command, tmp_path):
    assert find_sbatch(command("sbatch", "true")) == str(tmp_path / "sbatch")


@pytest.mark.parametrize(("name", "scheduler"), [("qsub", "PBS"), ("bsub", "LSF")])
def test_another_scheduler_is_told_what_works_there(command, name, scheduler):
    with pytest.raises(LaunchError, match=rf"{scheduler} \({name}\).*hpctrain launch -n"):
        find_sbatch(command(name, "true"))


def test_sbatch_is_preferred_to_slurms_imitation_of_other_schedulers(command):
    command("qsub", "true")
    assert find_sbatch(command("sbatch", "true")).endswith("sbatch")


def test_no_scheduler_is_a_clear_error(tmp_path):
    with pytest.raises(LaunchError, match=r"needs sbatch.*login node"):
        try_out("#!/bin/sh\n", {"PATH": str(tmp_path)})


def test_slurm_is_asked_about_the_script_itself(command):
    environ = command(
        "sbatch",
        '[ "$*" = --test-only ] || exit 1; read -r line; [ "$line" = "#!/bin/sh" ] || exit 2\n'
        'echo "sbatch: Job 8 to start at 12:00 on nodes n[0-1]" >&2',
    )
    assert try_out("#!/bin/sh\n", environ) == "the job would start at 12:00 on nodes n[0-1]"


def test_a_refusal_holds_slurms_own_words_once(command):
    said = (
        "sbatch: error: Invalid account\\nsbatch: error: Invalid account\\nallocation failure: x"
    )
    environ = command("sbatch", f"printf '{said}' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"it says: Invalid account; allocation failure: x$"):
        try_out("#!/bin/sh\n", environ)
    with pytest.raises(LaunchError, match=r"not taken a\.sbatch; it says: Invalid account; all"):
        submit("a.sbatch", environ)


@pytest.mark.parametrize("said", ["12", "12;cluster"])
def test_the_number_of_the_job_is_read(command, said):
    assert submit("a.sbatch", command("sbatch", f"echo '{said}'")) == 12


def test_a_job_finds_the_hpctrain_of_this_environment(command, tmp_path, monkeypatch):
    environ = command("sbatch", f'echo "$PATH" > {tmp_path}/path; echo 1')

    def path_of_job():
        submit("a.sbatch", environ)
        return (tmp_path / "path").read_text().strip()

    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert path_of_job() == str(tmp_path)  # no command there: as the user has it
    command("venv/bin/hpctrain", "true")
    assert path_of_job() == f"{folder}:{tmp_path}"
    environ = {"PATH": f"{folder}:{tmp_path}"}
    assert path_of_job() == f"{folder}:{tmp_path}"


def test_words_without_a_number_are_an_error(command):
    with pytest.raises(LaunchError, match="it says: fine"):
        submit("a.sbatch", command("sbatch", "echo fine"))


def test_jobs_that_wait_or_run_are_found_and_so_are_arrays(command):
    command("squeue", "printf '12 12\\n14 13\\n'")
    environ = command("sbatch", "true")
    assert still_there([11, 12, 13], environ) == [12, 13]


def test_a_controller_that_does_not_answer_is_an_error(command):
    command("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="Unable to contact slurm controller"):
        still_there([1], command("sbatch", "true"))


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
    ],
)
def test_a_job_number_stands_for_its_good_end(text, condition):
    assert dependency(text) == condition


@pytest.mark.parametrize("text", ["", "job", "12 13", "after ok:12", "-1"])
def test_other_conditions_are_refused(text):
    if text == "job":  # could be a condition of a newer Slurm: sbatch decides
        assert dependency(text) == text
        return
    with pytest.raises(LaunchError, match="a job starts after"):
        dependency(text)
