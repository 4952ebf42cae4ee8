"""Check batch scripts that break the rules of a site, by the profile of the site."""

import re
from dataclasses import replace

import pytest

from hpctrain.launch import site as sites
from hpctrain.launch.slurm.lint.lint import lint
from hpctrain.launch.slurm.lint.script import LintFacts

LUMI = sites.read("lumi")
MASK = LUMI.node.cpu_mask()
PERLMUTTER = sites.read("perlmutter")

GOOD = f"""\
#!/bin/bash
#SBATCH --account=project_1 --partition=standard-g --nodes=2
#SBATCH --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 --time=1:00:00
export SRUN_CPUS_PER_TASK=7
{"".join(f"export {name}=1; " for name in LUMI.job.variables)}
srun --kill-on-bad-exit=1 --cpu-bind={MASK} python train.py
"""


def found(script, site=LUMI, environ=()):
    findings = lint(script, facts=LintFacts(site=site, environ=dict(environ)))
    return [f"{each.level}: {each.what}; {each.do}" for each in findings if each.level != "ok"]


def test_a_script_that_follows_the_profile_has_no_finding():
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "--account=project_1 ",
            "",
            "warning: jobs on LUMI-G, CSC must name an account such as project_<id>, but",
        ),
        (
            "--partition=standard-g ",
            "",
            "warning: jobs on LUMI-G.* a partition, .*; #SBATCH --partition=standard-g",
        ),
        ("--cpus-per-task=7", "--cpus-per-task=8", "error: a node must have the 64 CPUs"),
        (
            "=8 --time",
            "=4 --time",
            "note: a node of LUMI-G, CSC has 8 GPUs, but the job requests 4",
        ),
        (MASK, "cores", f"note: line 6: srun must bind .*; srun --cpu-bind={MASK}"),
        ("export CXI_FORK_SAFE=1; ", "", "note: LUMI-G, CSC documents variables .*CXI_FORK_SAFE"),
    ],
)
def test_a_rule_of_the_site_that_a_script_breaks_is_found(old, new, text):
    assert old in GOOD
    findings = found(GOOD.replace(old, new))
    assert any(re.match(text, each) for each in findings), findings


def test_more_gpus_than_a_node_has_are_an_error():
    findings = found(GOOD.replace("=8", "=16"))
    assert any("must have the 16 GPUs of the job, but has 8" in each for each in findings)


def test_short_options_and_variables_of_sbatch_count():
    script = GOOD.replace("--account=project_1 --partition=standard-g", "-p standard-g")
    assert found(script, environ={"SBATCH_ACCOUNT": "project_1"}) == []


def test_jobs_in_another_partition_or_with_another_constraint_have_other_nodes():
    many = GOOD.replace("--cpus-per-task=7", "--cpus-per-task=16")
    assert found(many.replace("standard-g", "standard")) == []
    cpu = "#!/bin/bash\n#SBATCH -C cpu -q regular -A m1 --ntasks-per-node=2 --cpus-per-task=128\n"
    assert found(cpu, PERLMUTTER) == []


def test_an_option_that_all_jobs_of_a_site_need_is_found():
    script = "#!/bin/bash\n#SBATCH --constraint=gpu -A m1_g --nodes=1\n"
    (text,) = found(script, PERLMUTTER)
    assert "must have --qos=regular, but --qos is missing; #SBATCH --qos=regular" in text


def test_options_of_srun_modules_and_the_account_of_a_file_are_found():
    job = replace(LUMI.job, account="mine", srun=["--network=single_node_vni"], modules=["rocm/6"])
    own = replace(LUMI, job=job)
    whole = found(GOOD.replace("--account=project_1 ", ""), own)
    assert [each.partition("; ")[2] for each in whole] == [
        "#SBATCH --account=mine",
        "srun --network=single_node_vni ...",
        "module load rocm/6",
    ]
    good = GOOD.replace("srun ", "module load rocm/7\nsrun --network=single_node_vni ")
    assert found(good, own) == []
