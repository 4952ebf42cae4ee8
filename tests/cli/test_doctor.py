"""Check that ``hpctrain doctor`` reports real faults, and none on a healthy machine."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.doctor import show, summary
from hpctrain.cli.main import app
from hpctrain.core.finding import Finding
from hpctrain.launch.pmi import needed_pmi
from tests.harness import preload
from tests.processes import ended

ROOT = Path(__file__).parents[2]
REFUSE = ROOT / "tests/doctor/refuse.py"
MPICH = ROOT / ".venv-mpich/lib"

CPU_S = 3.0  # limit on a login node


def clean_environ():
    """Return the environment of a user without variables that the doctor judges."""
    starts = ("OMP_", "MKL_", "OPENBLAS_", "SLURM_", "CUDA_", "LD_", "MPI4PY_", "HPCTRAIN_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(starts)}
    return environ | {"PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"}


def doctor(*words, before=(), environ=None):
    """Run the doctor below the command ``before``; return exit code and findings."""
    done = ended(
        [*before, sys.executable, "-m", "hpctrain", "doctor", "--json", *words],
        cwd=ROOT,
        env=clean_environ() | (environ or {}),
    )
    assert done.stdout, done.stderr
    found = [Finding(**each) for each in json.loads(done.stdout)]
    return done.returncode, {(each.check, each.level): each for each in found}


def wrong(found):
    """Return the faults except the load of the machine, which changes while other tests run."""
    faults = {check for check, level in found if level in ("warning", "error")}
    return faults - {"load"}


@pytest.fixture(scope="module")
def healthy():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, found = doctor()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_healthy_machine_has_no_fault_and_the_check_is_short(healthy):
    code, found, cpu_s = healthy
    assert cpu_s < CPU_S
    assert wrong(found) <= {"memory"}  # the machine that runs the tests may lack memory
    assert code == bool(wrong(found) or ("load", "warning") in found)


def test_faults_of_the_environment_are_named_together(healthy):
    one_core = next(iter(os.sched_getaffinity(0)))
    code, found = doctor(
        *("--site", "lumi"),
        before=["taskset", "-c", str(one_core)],
        environ={
            "OMP_NUM_THREADS": "64",
            "CUDA_VISIBLE_DEVICES": "0,0",
            "HPCTRAIN_TIMEOUTS": "7",
            "MPI4PY_LIBMPI": "/nowhere/libmpi.so",
        },
    )
    planted = {"threads", "GPUs", "settings", "MPI library"}
    if (os.cpu_count() or 1) > 1:
        planted.add("cores")
    assert code == 1
    assert wrong(found) == planted | wrong(healthy[1])
    assert "/nowhere/libmpi.so" in found["MPI library", "error"].what
    assert "not compared with the profile of LUMI-G" in found["site", "note"].what


@pytest.mark.requires("mpich")
def test_two_mpi_libraries_in_reach_are_named(healthy):
    code, found = doctor(environ={"LD_LIBRARY_PATH": str(MPICH)})
    if needed_pmi() == "pmi2":  # these tests run with that MPI
        assert wrong(found) == wrong(healthy[1])
        return
    assert code == 1
    text = found["MPI library", "warning"].what
    assert str(MPICH / "libmpi.so.12") in text
    assert f"export MPI4PY_LIBMPI={MPICH}" in found["MPI library", "warning"].do


PLANT = """
mount -t tmpfs -o size=12m tmpfs /dev/shm
mount --bind -o ro "$0" "$0" && mount -o remount,bind,ro "$0"
exec "$@"
"""


@pytest.mark.requires("root")
def test_faults_of_memory_and_directories_are_named_together(tmp_path):
    """In a separate mount namespace: no other process sees the small /dev/shm."""
    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"}
    code, found = doctor(
        "--dir",
        str(tmp_path),
        "--dir",
        str(tmp_path / "none"),
        before=["unshare", "-m", "sh", "-c", PLANT, str(tmp_path)],
        environ=job,
    )
    assert code == 1
    assert "12.0 MiB" in found["node memory", "warning"].what
    assert "4 ranks" in found["node memory", "warning"].what
    assert "Read-only file system" in found["directory", "warning"].what
    assert "cannot be read" in found["directory", "error"].what


@pytest.mark.parametrize(
    ("call", "check", "text"),
    [
        ("memfd_create", "node memory", "anonymous shared memory is not available"),
        ("process_vm_readv", "copies between ranks", "process_vm_readv, but refuses it"),
    ],
)
def test_operations_forbidden_in_a_container_are_reported(call, check, text):
    code, found = doctor(before=[sys.executable, REFUSE, call, "EPERM"])
    assert code == 1
    assert text in found[check, "warning"].what
    assert "Operation not permitted" in found[check, "warning"].what


def test_the_interface_that_srun_needs_is_all_that_is_printed():
    result = CliRunner().invoke(app, ["doctor", "--pmi"])
    assert (result.exit_code, result.output) == (0, needed_pmi() + "\n")


def test_a_job_script_is_judged_alone(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\nsrun python train.py\n")
    result = CliRunner().invoke(app, ["doctor", "--lint", str(script)])
    assert result.exit_code == 1
    assert "--kill-on-bad-exit=1" in result.output
    assert "MPI library" not in result.output


def test_a_script_for_a_site_with_slingshot_needs_no_option_of_this_mpi(tmp_path, monkeypatch):
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH -C gpu -q regular -A m1234_g\n"
        "#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4\n"
        "srun --kill-on-bad-exit=1 python train.py\n"
    )
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("hpctrain.launch.slurm.lint.lint.needed_pmi", lambda: "pmix")
    result = CliRunner().invoke(app, ["doctor", "--lint", str(script), "--site", "none"])
    assert "srun --mpi=pmix" in result.stdout
    result = CliRunner().invoke(app, ["doctor", "--lint", str(script), "--site", "perlmutter"])
    assert result.exit_code == 0, result.output
    assert "--mpi=pmix" not in result.stdout


def test_a_script_that_shellcheck_cannot_read_is_an_error_and_an_unreachable_slurm_is_not(
    tmp_path, monkeypatch
):
    message = (
        "fetch_config: DNS SRV lookup failed; fatal: Could not establish a configuration source"
    )
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=1\nhostname\n")
    result = CliRunner().invoke(app, ["doctor", "--lint", str(script)])
    assert (result.exit_code, "Slurm does not answer" in result.output) == (0, True), result.output
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=1\necho 'open\nhostname\n")
    result = CliRunner().invoke(app, ["doctor", "--lint", str(script)])
    assert result.exit_code == 1
    assert "shellcheck: line 3: Couldn't parse this single quoted string" in result.output


@pytest.mark.parametrize("words", [["--lint", "/nowhere/job.sbatch"], ["--jsn"]])
def test_a_mistake_in_the_command_is_exit_code_2(words):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "doctor", *words], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr


@pytest.mark.launches
@pytest.mark.limit(120)
def test_rank_0_prints_the_findings_of_all_ranks():
    launch = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--", *preload.python()]
    done = ended(
        [*launch, "-m", "hpctrain", "doctor", "--json"],
        env=clean_environ() | {"HPCTRAIN_TIMEOUTS": "7", "HPCTRAIN_PROBE": "off"},
    )
    found = {(each["check"], each["level"]) for each in json.loads(done.stdout)}
    assert ("settings", "warning") in found
    assert ("world", "ok") in found
    assert done.returncode == 1


BAD = Finding("a check", "error", "what is " + "very " * 40 + "bad", "the command that mends it")


def test_a_pipe_gets_whole_lines_the_worst_first(capsys, monkeypatch):
    findings = [Finding("b", "ok", "fine"), Finding("c", "note", "so [so]"), BAD]
    lines = [
        f"error    a check: {BAD.what}",
        "         do: the command that mends it",
        "note     c: so [so]",
        "3 checks, 1 error, 1 note",
    ]
    show(findings, verbose=False)
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(findings, verbose=False)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines() == lines


def test_checks_without_faults_are_shown_with_verbose(capsys):
    show([Finding("b", "ok", "fine")], verbose=True)
    assert capsys.readouterr().out == "ok       b: fine\nnothing wrong: 1 check\n"
    show([Finding("b", "ok", "fine")], verbose=False)
    assert capsys.readouterr().out == "nothing wrong: 1 check\n"


def test_the_last_line_counts():
    findings = [BAD, BAD, Finding("b", "warning", "w", "d"), Finding("c", "ok", "")]
    assert summary(findings) == "3 checks, 2 errors, 1 warning"
    assert summary([Finding("c", "note", "")]) == "nothing wrong: 1 check, 1 note"
