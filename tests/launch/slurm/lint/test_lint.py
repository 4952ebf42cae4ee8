"""Correct scripts have no finding; each fault is found in a script with only this fault."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.checkpoint.checkpoint_config import CheckpointConfig
from hpctrain.launch.slurm import batch_script
from hpctrain.launch.slurm.batch_script import BatchSettings
from hpctrain.launch.slurm.lint.lint import DEFAULT_EVERY, lint
from hpctrain.launch.slurm.lint.script import LintFacts
from hpctrain.launch.slurm.lint.shellcheck import shellcheck
from tests.launch.slurm.lint.scripts import HEALTHY, USERS

FACTS = LintFacts(needed_pmi="pmix", default_pmi="none", directory=Path())

RUN = "srun --mpi=pmix --kill-on-bad-exit=1 hpctrain train my.toml"


FILES = ("my.toml", "a.toml", "train.py", "prepare.py", "bench.py", "a.py", "venv/bin/activate")
"""Files that the scripts refer to."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def wrong(script, facts=FACTS):
    """Return the checks with findings, each with its level."""
    return {(found.check, found.level) for found in lint(script, facts=facts) if found.is_wrong}


@pytest.mark.parametrize("facts", [FACTS, None], ids=["machine", "nothing known"])
def test_a_correct_script_has_one_finding_of_level_ok(facts):
    (found,) = lint(HEALTHY, facts=facts)
    assert found.level == "ok"


@pytest.mark.parametrize("name", batch_script.names())
@pytest.mark.parametrize("environ", [{}, {"MPI_TYPE": "pmix", "CONFIG": "my.toml"}], ids=str)
def test_no_template_has_a_finding(name, environ):
    facts = LintFacts(needed_pmi="pmix", default_pmi="none", environ=environ)
    assert [found.level for found in lint(batch_script.text(name), facts=facts)] == ["ok"]


SETTINGS = [
    BatchSettings(
        nodes=2, ntasks_per_node=4, cpus_per_task=3, config="a.toml", directory="runs/a"
    ),
    BatchSettings(nodes=3, ntasks_per_node=4, gpus_per_node=4, requeue=True, array="0-3"),
    BatchSettings(time="00:20:00", requeue=False, overrides=("seed=$SLURM_ARRAY_TASK_ID",)),
]


@pytest.mark.parametrize("name", batch_script.names())
@pytest.mark.parametrize("settings", SETTINGS, ids=("cpus", "gpus", "overrides"))
def test_no_template_with_settings_has_a_finding(name, settings):
    if settings.requeue is False and "scontrol requeue" in batch_script.text(name):
        assert wrong(batch_script.script(name, settings)) == {("requeue", "warning")}
        return
    if name == "gpu" and settings.gpus_per_node is None:
        settings = replace(settings, gpus_per_node=settings.ntasks_per_node)
    assert wrong(batch_script.script(name, settings)) == set()


FAULTS = [
    ("kill on bad exit", "warning", " --kill-on-bad-exit=1", ""),
    ("kill on bad exit", "warning", " --kill-on-bad-exit=1 hpctrain", " $(which hpctrain)"),
    (
        "kill on bad exit",
        "warning",
        "srun --mpi=pmix --kill-on-bad-exit=1",
        "if ! srun --mpi=pmix",
    ),
    ("srun --mpi", "error", "--mpi=pmix", "--mpi=pmi2"),
    ("srun --mpi", "error", "--mpi=pmix ", ""),  # the default of the site is "none"
    ("srun --mpi", "error", "srun --mpi=pmix", "SLURM_MPI_TYPE=none srun"),
    ("nested launchers", "error", "hpctrain train", "mpirun -n 16 hpctrain train"),
    ("nested launchers", "error", "hpctrain train", "hpctrain launch -n 16 hpctrain train"),
    ("nested launchers", "error", RUN, "mpirun -n 16 srun hpctrain train my.toml"),
    ("nested launchers", "error", RUN, f"bash -c 'srun -K --mpi=pmix mpirun {RUN[-22:]}'"),
    ("cores of a task", "warning", "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", ""),
    ("tasks per node", "warning", "--ntasks-per-node=4", "--ntasks=16"),
    ("tasks and GPUs", "warning", "--gpus-per-node=4", "--gpus-per-node=2"),
    ("tasks and GPUs", "warning", "--gpus-per-node=4", "--gres=gpu:a100:8"),
    ("tasks and GPUs", "warning", "--ntasks-per-node=4", "--ntasks-per-node=1"),
    ("tasks and GPUs", "warning", "--gpus-per-node=4", "--gpus=8"),
    ("tasks and GPUs", "warning", "srun ", "srun -n 8 "),
    ("GPUs of a rank", "warning", "--gpus-per-node=4", "--gpus-per-task=1"),
    ("GPUs of a rank", "warning", "srun ", "srun --gpu-bind=closest "),
    ("signal", "warning", "#SBATCH --signal=USR1@120\n", ""),
    ("signal", "warning", "--signal=USR1@120", "--signal=B:USR1@120"),
    ("output", "warning", "#SBATCH --open-mode=append\n", ""),
    ("output", "warning", "--open-mode=append", "--open-mode=truncate"),
    ("requeue", "warning", ' && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]', ""),
    ("requeue", "warning", "--requeue", "--no-requeue"),
    ("script", "warning", "set -euo pipefail", "set -euo pipefail\n#SBATCH --mem=0"),
    ("script", "warning", "--job-name=big", "--job-name=$USER"),
    ("time limit", "warning", "my.toml ||", "my.toml --set checkpoint.every=3h ||"),
    ("start of the ranks", "error", "srun --mpi=pmix --kill-on-bad-exit=1 ", ""),
    ("start of the ranks", "error", RUN, "python -u train.py --lr 0.1"),
    ("start of the ranks", "error", RUN, "torchrun --nproc-per-node 4 a.py"),
    ("background", "error", " || code=$?", " &"),
    ("background", "error", f"{RUN} || code=$?", "mpirun -n 16 ./a.out &"),
    ("nested launchers", "error", "hpctrain train my.toml", "torchrun --nproc-per-node 4 a.py"),
    ("rendezvous", "warning", "|| code=$?", "|| code=$?\nexport MASTER_ADDR=$(hostname)"),
    ("output", "error", "--job-name=big", "--output=logs/%x.txt"),
    ("units", "warning", "--job-name=big", "--mem=100"),
    ("units", "warning", "--time=02:00:00", "--time=24"),
    ("threads", "warning", "set -euo pipefail", "export OMP_NUM_THREADS=64"),
    ("rendezvous", "warning", "set -euo pipefail", "export MASTER_ADDR=localhost"),
    ("rendezvous", "error", "set -euo pipefail", "export RANK=$SLURM_PROCID"),
    ("tasks of a step", "error", "srun ", "srun -n 32 --ntasks-per-node=4 "),
    ("tasks per node", "warning", "--ntasks-per-node=4", "--ntasks=3"),
    ("files", "warning", "hpctrain train my.toml", "hpctrain train my.tml.toml"),
    ("files", "warning", "hpctrain train my.toml", "python trian.py"),
    ("files", "warning", "set -euo pipefail", "source ~/env/bin/activate"),
]


@pytest.mark.parametrize(("check", "level", "old", "new"), FAULTS)
def test_each_fault_gives_exactly_one_finding(check, level, old, new):
    assert HEALTHY.count(old) == 1
    assert wrong(HEALTHY.replace(old, new)) == {(check, level)}


@pytest.mark.parametrize(
    ("gpus", "per_node"),
    [
        *((text, 4) for text in ("--gpus=16", "-G 16", "--gpus=a100:8,h100:8")),
        ("--gres=gpu:a100:2,gpu:h100:2", 4),
        ("--gpus-per-node=a:3,b", 4),
        ("--gpus=18", None),  # cannot be divided equally over the nodes
        ("--gpus=8", 2),
        ("-G 32", 8),
        ("--gpus=a100:4,h100:4", 2),
        ("--gres=gpu:a100:2,gpu:h100", 3),
        ("--gpus-per-node=a100:1,h100:1", 2),
    ],
)
def test_gpus_are_counted_in_every_notation(gpus, per_node):
    """The script has 4 nodes with 4 tasks each."""
    found = lint(HEALTHY.replace("--gpus-per-node=4", gpus), facts=FACTS)
    if per_node in (4, None):
        assert [each.level for each in found] == ["ok"]
        return
    (fault,) = found
    assert fault.check == "tasks and GPUs"
    assert f"#SBATCH --ntasks-per-node={per_node}" in fault.do
    counted = f"{abs(4 - per_node)} would be idle" if per_node > 4 else f"share {per_node} GPU"
    assert counted in fault.what


def test_unknown_numbers_of_gpus_give_no_finding():
    script = HEALTHY.replace("--gpus-per-node=4", "--gpus-per-node=$GPUS")
    assert wrong(script) == {("script", "warning")}  # a warning about the variable only
    script = HEALTHY.replace("--gpus-per-node=4", "--gpus=8")
    assert wrong(script.replace("#SBATCH --nodes=4\n", "")) == set()


def test_ranks_that_see_all_gpus_of_their_node_have_no_finding():
    script = HEALTHY.replace("--gpus-per-node=4", "--gpus-per-task=1")
    assert wrong(script.replace("srun ", "srun --gpu-bind=none ")) == set()
    (found,) = lint(script, facts=FACTS)
    assert "with --gpus-per-task=1 a rank sees its own GPU only" in found.what
    assert "srun --gpu-bind=none" in found.do


def test_each_finding_names_its_line_and_a_remedy():
    script = HEALTHY.replace(" --kill-on-bad-exit=1", "") + "srun --mpi=pmix ./other\n"
    found = lint(script, facts=FACTS)
    assert [each.what[:9] for each in found] == ["line 15: ", "line 19: "]
    assert "--kill-on-bad-exit=1" in found[0].do


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("facts", [FACTS, None], ids=["machine", "nothing known"])
def test_typical_scripts_of_users_have_no_finding(name, facts):
    assert [found for found in lint(USERS[name], facts=facts) if found.level != "ok"] == []


def test_an_option_commented_out_by_a_space_is_a_note():
    (found,) = lint(HEALTHY.replace("#SBATCH --job", "# SBATCH --job"), facts=FACTS)
    assert (found.check, found.level) == ("script", "note")
    assert lint(HEALTHY.replace("#SBATCH --job", "##SBATCH --job"), facts=FACTS)[0].level == "ok"


def test_a_site_with_an_unknown_default_is_a_note():
    script = HEALTHY.replace("--mpi=pmix ", "")
    (found,) = lint(script, facts=LintFacts(needed_pmi="pmix"))
    assert (found.check, found.level) == ("srun --mpi", "note")
    assert "--mpi=pmix" in found.do


OF_CRAY = HEALTHY.replace("--mpi=pmix ", "").replace(
    "set -euo pipefail", "module load PrgEnv-gnu cray-mpich python"
)


def test_a_packaged_mpi_is_ignored_if_the_job_loads_the_mpi_of_the_site():
    facts = LintFacts(needed_pmi="pmix", has_mpi_package=True, default_pmi="cray_shasta")
    for script in (OF_CRAY, OF_CRAY.replace("srun ", "srun --mpi=cray_shasta ")):
        assert [found for found in lint(script, facts=facts) if found.check == "srun --mpi"] == []
    on_cray = replace(facts, environ={"CRAY_MPICH_VERSION": "8.1.30"})
    script = HEALTHY.replace("--mpi=pmix ", "")
    assert [found for found in lint(script, facts=on_cray) if found.check == "srun --mpi"] == []
    (found,) = [found for found in lint(script, facts=facts) if found.check == "srun --mpi"]
    assert "to use the MPI of the site, install hpctrain without an extra" in found.do
    of_site = replace(facts, has_mpi_package=False)
    (found,) = [found for found in lint(OF_CRAY, facts=of_site) if found.check == "srun --mpi"]
    assert found.do == "srun --mpi=pmix ..."


def test_a_module_load_turns_the_mpi_error_into_a_warning():
    script = HEALTHY.replace("--mpi=pmix", "--mpi=pmi2")
    script = script.replace("set -euo pipefail", "module load mpich")
    assert wrong(script) == {("srun --mpi", "warning")}


def test_a_variable_with_two_possible_values_is_unknown():
    script = HEALTHY.replace("--mpi=pmix", "--mpi=$mpi").replace("code=0\n", "code=0\nmpi=pmi2\n")
    assert wrong(script) == {("srun --mpi", "error")}
    assert wrong(script.replace("mpi=pmi2\n", "mpi=pmix\n[ -e x ] && mpi=pmi2\n")) == set()


@pytest.mark.parametrize("script", ["", "\x00", "#!/bin/bash\n$(", "#!/bin/bash\n'\"`${a", "(("])
def test_text_that_is_no_script_is_linted_without_error(script):
    assert lint(script)


def test_a_truncated_script_is_linted_without_error():
    for number, name in enumerate(("restart", "chain")):
        text = batch_script.text(name)
        for end in range(number, len(text), 31):
            lint(text[:end], facts=FACTS)


@pytest.mark.parametrize(
    ("limit", "every", "levels"),
    [
        ("02:00:00", "every = '3h'", ["warning"]),
        ("20", "every = '20min 1s'", ["warning"]),
        ("20", "every = '20min'", ["ok"]),
        ("20", "every = 500", ["ok"]),
        ("20", "every = 'none'", ["ok"]),
        ("5", "", ["note"]),  # the default of ten minutes is only a note
        ("10", "", ["ok"]),
        ("UNLIMITED", "every = '3h'", ["ok"]),
        ("20", "every = 'never'", ["ok"]),  # the run itself rejects this value
        ("20", "nothing that TOML knows", ["ok"]),
    ],
)
def test_the_checkpoint_interval_must_fit_into_the_time_limit(tmp_path, limit, every, levels):
    (tmp_path / "my.toml").write_text(f"[checkpoint]\n{every}\n" if every else "name = 'x'\n")
    script = HEALTHY.replace("--time=02:00:00", f"--time={limit}")
    facts = LintFacts(needed_pmi="pmix", directory=tmp_path)
    assert [found.level for found in lint(script, facts=facts)] == levels
    overridden = script.replace("my.toml", "my.toml --set checkpoint.every=1min")
    assert [found.level for found in lint(overridden, facts=facts)] == ["ok"]


def test_the_configuration_of_a_submitted_template_is_read(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text("[checkpoint]\nevery = '3h'\n")
    facts = LintFacts(needed_pmi="pmix", directory=Path("/"))
    named = replace(facts, environ={"CONFIG": str(path)})
    script = batch_script.script("requeue", BatchSettings(config=str(path)))
    (found,) = lint(script, facts=facts)
    assert lint(batch_script.text("requeue"), facts=named)[0].check == found.check
    assert (found.check, found.level) == ("time limit", "warning")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "#SBATCH hetjob\n#SBATCH --nodes=1",
            "line 4: the ranks of a job must be in one component",
        ),
        ("#SBATCH --clusters=a,b", "got --clusters=a,b, which only sbatch reads"),
        ("#SBATCH -M a", "got --clusters=a, which only sbatch reads"),
    ],
)
def test_heterogeneous_jobs_and_jobs_of_other_clusters_are_found(line, words):
    script = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --mem=2G\n{line}\nhpctrain doctor\n"
    (found,) = lint(script)
    assert (found.level, words in found.what) == ("warning", True), found


def test_the_default_checkpoint_interval_is_that_of_the_configuration():
    assert CheckpointConfig().every == DEFAULT_EVERY


def test_shellcheck_reports_syntax_errors_and_nothing_in_correct_scripts():
    for script in (HEALTHY, *USERS.values(), *map(batch_script.text, batch_script.names())):
        assert shellcheck(script, "job.sbatch") == []
    for old, new in (("; then\n", "\n"), ('"$code"', '"$code'), ("\n", "\r\n")):
        found = shellcheck(HEALTHY.replace(old, new), "job.sbatch")
        assert {each.level for each in found} == {"error"}
        assert found[0].do == "shellcheck job.sbatch"
