"""The study file: files written by init can be read, and mistakes are reported."""

from pathlib import Path

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import render
from hpctrain.studies.points import attempts_of, on_slurm
from hpctrain.studies.study_file import example, load

GOOD = """
[study]
mode = "weak"
[factors]
ranks = [1, 2]
codec = ["none", "bf16"]
[command]
run = "python x.py '{codec} y' ${HOME}"
set = { a.b = "{codec}", "c.d" = true }
environment = { RANKS = "{ranks}" }
"""


def read(folder: Path, text: str):
    path = folder / "study.toml"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize("mode", ["strong", "weak", "both"])
@pytest.mark.parametrize("script", ["", "python train.py"])
def test_a_file_written_by_init_is_read_back(tmp_path, mode, script):
    made = example(mode, script)
    text = render(made)
    assert read(tmp_path, text) == made
    assert max(map(len, text.splitlines())) <= 99
    assert len(attempts_of(made)) == 3 * 5 * (1 + (mode == "both"))


def test_placeholders_are_replaced_in_commands_settings_and_variables(tmp_path):
    config = read(tmp_path, GOOD)
    launcher, run, variables = config.filled({"ranks": 2, "nodes": 1, "codec": "bf16"})
    assert launcher == ["hpctrain", "launch", "-n", "2", "--nodes", "1", "--"]
    settings = ["--set", "a.b=bf16", "--set", "c.d=true"]
    assert run == ["python", "x.py", "bf16 y", "${HOME}", *settings]
    assert variables == {"RANKS": "2"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mode", "modus", r"study.modus is not a key; did you mean study.mode"),
        ('"weak"', '"weaker"', "study.mode must be one of strong, weak"),
        ("[1, 2]", "[1, 1]", "factors.ranks must be a list of different values"),
        ("[1, 2]", "3", "factors.ranks must be a list of different values"),
        ("[1, 2]", "[0]", "factors.ranks must be integers above 0"),
        ("{codec} y", "{codek} y", "{codek}; did you mean codec"),
        ("codec = [", "depth = [2]\ncodec = [", "factors.depth must be used: write {depth}"),
        ("codec = [", "repeat = [2]\ncodec = [", "other than folder and repeat"),
        ("codec = [", "aB = [2]\ncodec = [", "must be words in lower case, .* got 'aB'"),
        ("[factors]", "target = { loss = '1' }\n[factors]", "study.target.loss must be a number"),
        ("[factors]", "target = { loss = nan }\n[factors]", "study.target.loss must be a number"),
        ("y'", "y", r"must be quoted as for a shell, got .*: No closing quotation"),
        ("run =", "#", "command.run must be the command to measure"),
    ],
)
def test_a_mistake_is_reported_with_a_remedy(tmp_path, old, new, message):
    assert GOOD.count(old) >= 1
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        read(tmp_path, GOOD.replace(old, new, 1))


def test_on_slurm_the_default_launcher_is_srun_and_hosts_are_counted(tmp_path):
    nodes = GOOD.replace("[1, 2]", "[1, 8]\nranks_per_node = [2]")
    config = on_slurm(read(tmp_path, nodes))
    assert config.command.launcher.startswith("srun --nodes={nodes}")
    assert config.study.hosts == 4
    own = on_slurm(read(tmp_path, GOOD.replace("run =", 'launcher = "my {ranks}"\nrun =')))
    assert own.command.launcher == "my {ranks}"
