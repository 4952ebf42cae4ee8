"""Check that the report of ``hpctrain doctor --report`` contains facts, and no secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from hpctrain.doctor.host.bug_report import REMOVED, without_secrets
from tests.processes import ended

SECRET, PROBE = "correct-horse", "HPCTRAIN_PROBE"
OF_VARIABLES = {
    "WANDB_API_KEY": f"{SECRET}-1",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "SLURM_JWT": f"{SECRET}.eyJ.2",
    "PIP_INDEX_URL": f"https://me:{SECRET}-3@packages.example/simple",
    "DATABASE": f"postgres://me:{SECRET}-4@db.example/runs",
    "HPCTRAIN_PASSWORD": f"{SECRET}-5",
    "HPCTRAIN_TIMEOUT": "AKIA0123456789ABCDEF",  # the message of the check repeats the value
    "UCX_NET_DEVICES": f"token={SECRET}-6",  # tunes MPI, so a check reports the variable
    "MYSQL_PWD": f"{SECRET}-14",
    "SENTRY_DSN": f"https://{SECRET}-15@errors.example/3",
    "AZURE_STORAGE_SAS": f"sv=2022&sig={SECRET}-16",
    "SLURM_JOB_COMMENT": f"--token={SECRET}-17",
    "PBS_VARIABLE_LIST": f"WANDB_API_KEY={SECRET}-18",
    "GIT_CONFIG_VALUE_0": f"https://me:{SECRET}-19@git.example/x",
}
SECRET_NAMES = """
    AWS_SECRET_ACCESS_KEY api_key OPENAI_APIKEY GitHub_Token GITHUB_PAT PAT DB_PASS PGPASSWORD
    SSHPASS KEYSTORE_PW MYSQL_PWD CREDENTIALS HTTP_COOKIE BW_SESSION SENTRY_DSN SLACK_WEBHOOK
    AZURE_STORAGE_SAS SLURM_JWT PROXY_AUTH BEARER X_SIGNATURE
"""
FILES = {
    "my.toml": f'[data.args]\npassword = "{SECRET}-7"\n',
    ".netrc": f"machine packages.example login me password {SECRET}-8\n",
    ".config/pip/pip.conf": f"[global]\nindex-url = https://me:{SECRET}-9@packages.example\n",
    "slurm/site.sh": f"export WANDB_API_KEY={SECRET}-10\n",
    ".git/config": f'[remote "origin"]\n\turl = https://me:{SECRET}-20@git.example/x\n',
}


def report_of(folder: Path, *before: str) -> str:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    file = folder / "report.txt"
    environ = os.environ | OF_VARIABLES | {"HOME": str(folder)}
    words = (sys.executable, "-m", "hpctrain", "doctor", "--report", file)
    done = ended([*before, *words], cwd=folder, env=environ)
    assert done.returncode == 1, done.stderr  # HPCTRAIN_TIMEOUT is wrong
    return file.read_text()


def test_the_report_has_no_secret_of_variables_command_lines_and_configurations(tmp_path):
    wait = [sys.executable, "-c", "input()", f"--token={SECRET}-11", "--password", f"{SECRET}-12"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as other:
        text = report_of(tmp_path, "bash", "-c", '"$@"', f"--token={SECRET}-13")
        other.communicate(b"\n")
    for secret in (SECRET, OF_VARIABLES["HF_TOKEN"], OF_VARIABLES["HPCTRAIN_TIMEOUT"]):
        assert secret not in text
    assert f"HPCTRAIN_TIMEOUT must be a number, got '{REMOVED}'" in text
    for fact in (f"hpctrain: {hpctrain.__version__}", "torch: ", "MPI library: ", "numpy "):
        assert f"\n{fact}" in text or f" {fact}" in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://me:hunter2@h.example/x", f"https://{REMOVED}@h.example/x"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {REMOVED}"),
        ("--password hunter22 --lr 0.1", f"--password{REMOVED} --lr 0.1"),
        ('api_key = "hunter22"', f'api_key{REMOVED}"'),
        ("0f8fad5b-d9cb-469f-a165-70867728950e", REMOVED),
        ("key " + "a1" * 20, f"key {REMOVED}"),
        ("the value xyzzy-1 of a variable", f"the value {REMOVED} of a variable"),
        ("the value 'xy\\\\zzy' of a variable", f"the value '{REMOVED}' of a variable"),
        (
            "HPCTRAIN_PROBE must be auto, got 'not-a-mode'",
            f"{PROBE} must be auto, got '{REMOVED}'",
        ),
        ("Authorization: Basic bWU6aHVudGVyMg==", f"Authorization: Basic {REMOVED}"),
        ("Server=db;Pwd=hunter22;", f"Server=db;Pwd{REMOVED};"),
        ("https://h.example/x?sig=a%2Fb%3D1&v=2", f"https://h.example/x?sig{REMOVED}&v=2"),
        ("glpat-Ab3-dEfGhIjKlMn_pQrS", REMOVED),
        ("eyJhbGciOi.eyJzdWIiOiIx.SflKxwRJSM", REMOVED),
        ("xoxb-2411111111-3011111111-AbCdEf", REMOVED),
        ("a wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY b", f"a {REMOVED} b"),
    ],
)
def test_words_that_may_be_secrets_are_removed(given, expected):
    environ = {"MY_TOKEN": "xyzzy-1", "DB_PWD": "xy\\zzy", PROBE: "not-a-mode"}
    assert without_secrets(given, environ) == expected


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_values_of_variables_with_secret_names_are_removed(name):
    assert without_secrets("got hunter2", {name: "hunter2"}) == f"got {REMOVED}"


def test_ordinary_text_is_unchanged():
    text = (
        "Linux-6.1.0-18-x86_64-with-glibc2.36 torch 2.13.0+cpu /opt/venv/lib/libmpi.so.40\n"
        "threads: 2 for each rank; tokens of the embedding; OMPI_MCA_btl_tcp_if_include eth0\n"
        "horovod 0.28.1+torch2.13.0.cpu.openmpi5.0.11, compiled sums with vectors of 64 bytes\n"
        "hf_transfer 0.1.9; from HPCTRAIN_PROBE; /scratch/project_465/me, free; UCX mlx5_0:1\n"
    )
    environ = {"MY_TOKEN": "2", "MY_KEY": "", PROBE: "always", "PWD": "/scratch/project_465/me"}
    assert without_secrets(text, environ) == text


def test_a_file_that_cannot_be_written_is_an_error():
    words = [sys.executable, "-m", "hpctrain", "doctor", "--report", "/nowhere/report.txt"]
    done = ended(words)
    assert done.returncode == 2
    assert "/nowhere/report.txt cannot be written: No such file or directory; name" in done.stderr
