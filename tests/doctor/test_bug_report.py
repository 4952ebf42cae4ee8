"""Check that the report of ``hpctrain doctor --report`` contains facts, and no secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from hpctrain.doctor.host.bug_report import REMOVED, without_secrets
from tests.processes import ended

SECRET = "correct-horse"
OF_VARIABLES = {
    "WANDB_API_KEY": f"{SECRET}-1",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "SLURM_JWT": f"{SECRET}.eyJ.2",
    "PIP_INDEX_URL": f"https://me:{SECRET}-3@packages.example/simple",
    "DATABASE": f"postgres://me:{SECRET}-4@db.example/runs",
    "HPCTRAIN_PASSWORD": f"{SECRET}-5",
    "HPCTRAIN_TIMEOUT": "AKIA0123456789ABCDEF",  # the message of the check repeats the value
    "UCX_NET_DEVICES": f"token={SECRET}-6",  # tunes MPI, so a check reports the variable
}
FILES = {
    "my.toml": f'[data.args]\npassword = "{SECRET}-7"\n',
    ".netrc": f"machine packages.example login me password {SECRET}-8\n",
    ".config/pip/pip.conf": f"[global]\nindex-url = https://me:{SECRET}-9@packages.example\n",
    "slurm/site.sh": f"export WANDB_API_KEY={SECRET}-10\n",
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
    ],
)
def test_words_that_may_be_secrets_are_removed(given, expected):
    assert without_secrets(given, {"MY_TOKEN": "xyzzy-1"}) == expected


def test_ordinary_text_is_unchanged():
    text = (
        "Linux-6.1.0-18-x86_64-with-glibc2.36 torch 2.13.0+cpu /opt/venv/lib/libmpi.so.40\n"
        "threads: 2 for each rank; tokens of the embedding; OMPI_MCA_btl_tcp_if_include eth0\n"
        "horovod 0.28.1+torch2.13.0.cpu.openmpi5.0.11, compiled sums with vectors of 64 bytes\n"
    )
    assert without_secrets(text, {"MY_TOKEN": "2", "MY_KEY": ""}) == text


def test_a_file_that_cannot_be_written_is_an_error():
    words = [sys.executable, "-m", "hpctrain", "doctor", "--report", "/nowhere/report.txt"]
    done = ended(words)
    assert done.returncode == 2
    assert "report.txt cannot be written: No such file or directory; name another" in done.stderr
