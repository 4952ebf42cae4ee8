"""Check site profiles: the data files, their recognition, and their effect on a script."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli import site as command
from hpctrain.cli.submit import app as submit
from hpctrain.core.errors import ConfigError
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import batch_script
from hpctrain.launch.slurm.lint.lint import lint
from hpctrain.launch.slurm.lint.script import LintFacts

PROFILES = [sites.read(name) for name in sites.names()]

OWN = """\
name = "own"
recognize = ["CLUSTER=own"]
[job]
account = "PROJECT"
partition = "gpu"
options = ["--qos=high"]
modules = ["rccl"]
[job.variables]
CACHE = "/tmp/$USER"
[node]
cpus = 16
mem = "64G"
gpus = 2
gpu_cores = ["8-15", "0-7"]
"""


@pytest.fixture(autouse=True)
def unknown_machine(tmp_path, monkeypatch):
    """Start in an empty directory of a machine without Slurm that no profile recognizes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("NERSC_HOST", "CLUSTER_NAME", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").touch()


def printed(*words):
    """Return the script that ``hpctrain submit`` prints, and its notes."""
    result = CliRunner().invoke(submit, [*words, "--print", "--", "python", "train.py"])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("site", PROFILES, ids=lambda site: site.name)
def test_a_profile_names_its_file_and_dated_sources_and_has_consistent_numbers(site):
    assert site.name in sites.names()
    assert site.title
    assert site.sources
    assert all(re.search(r"\d{4}-\d\d-\d\d$|version \S+$", each) for each in site.sources)
    assert len(site.node.gpu_cores) in (0, site.node.gpus)
    assert site.node.network in ("slingshot", "infiniband")


@pytest.mark.parametrize("site", PROFILES, ids=lambda site: site.name)
@pytest.mark.parametrize("template", batch_script.names())
def test_the_script_of_a_profile_has_no_fault(site, template):
    words = ("--site", site.name, "--template", template, "--nodes", "2", "--account", "me")
    script, notes = printed(*words)
    assert site.title in notes
    findings = lint(script, facts=LintFacts(site=site))
    assert [each for each in findings if each.level != "ok"] == []


def test_ranks_on_lumi_have_the_masks_of_its_documentation():
    (lumi,) = (site for site in PROFILES if site.name == "lumi")
    # "Distribution and binding", for applications that select the GPU with their local rank.
    assert lumi.node.cpu_mask() == (
        "mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
    )


@pytest.mark.parametrize(
    ("environ", "host", "name"),
    [
        ({"NERSC_HOST": "perlmutter"}, "login07", "perlmutter"),
        ({"CLUSTER_NAME": "clariden"}, "nid005270", "alps"),
        ({}, "frontier00144", "frontier"),
        ({}, "login12.frontier.olcf.ornl.gov", "frontier"),
        ({}, "lumi-uan01", "lumi"),
        ({}, "login02-ext.leonardo.cineca.it", "leonardo"),
        ({}, "login02", None),
        ({"CLUSTER_NAME": ""}, "host=", None),
    ],
)
def test_a_machine_is_recognized_by_its_host_name_or_variables(environ, host, name):
    found = sites.find(environ=environ, host=host)
    assert (found and found.name) == name


def test_a_file_has_priority_over_the_recognized_machine_and_none_selects_no_profile():
    perlmutter = {"NERSC_HOST": "perlmutter"}
    Path("slurm").mkdir()
    sites.OWN.write_text(OWN)
    assert sites.find(environ=perlmutter).name == "own"
    assert sites.find("lumi", perlmutter).name == "lumi"
    assert sites.find(str(sites.OWN.absolute()), perlmutter).name == "own"
    assert sites.find(sites.NONE, perlmutter) is None


def test_a_submission_follows_the_profile():
    Path("own.toml").write_text(OWN)
    script, notes = printed("--site", "own.toml")
    for line in (
        *("--partition=gpu", "--qos=high", "--gpus-per-node=2", "--ntasks-per-node=2"),
        *("--cpus-per-task=8", "--mem=64G", "--account=PROJECT"),
    ):
        assert f"#SBATCH {line}\n" in script
    assert "--cpu-bind=mask_cpu:ff00,ff " in script
    assert "--cpu-bind=cores" not in script
    before, _, after = script.partition("# Modules and environment of your site")
    assert 'module is-loaded "rccl" || module load "rccl"\nexport CACHE="/tmp/$USER"\n' in before
    assert after
    assert "--cpus-per-task=8 --mem=64G for 2 ranks" in notes


@pytest.mark.parametrize(
    ("words", "present", "absent"),
    [
        (["--account", "me"], "--account=me", "PROJECT"),
        (["--option=--qos=low"], "--qos=low", "--qos=high"),
        (["--option=--qos=low"], "--gpus-per-node=2", "--qos=high"),
        (["--option=--constraint=cpu"], "--constraint=cpu", "--gpus-per-node"),
        (["--partition", "cpu"], "--partition=cpu", "--gpus-per-node"),
        (["--tasks", "1"], "--gpus-per-node=1", "--mem="),
        (["--tasks", "1"], "--cpus-per-task=8", "mask_cpu"),
        (["--cpus", "2"], "--cpus-per-task=2", "--mem="),
        (["--cpus", "2"], "--cpu-bind=cores", "mask_cpu"),  # a job with other cores of the node
        (["--partition", "cpu", "--gpus", "2", "--cpus", "8"], "--cpu-bind=cores", "mask_cpu"),
    ],
)
def test_options_have_priority_over_the_profile(words, present, absent):
    Path("own.toml").write_text(OWN)
    script, notes = printed("--site", "own.toml", *words)
    assert absent not in script + notes
    assert present in script + notes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "3"], "the 3 GPUs of the job, but has 2"),
        (["--cpus", "9"], r"the 18 CPUs of the job \(2 ranks with 9 CPUs\), but has 16"),
        (["--tasks", "17"], r"the 17 CPUs of the job \(17 ranks\), but has 16"),
        (["--mem", "65G"], "the memory of the job, --mem=65G, but has 64G"),
        (["--mem", "70000"], "--mem=70000, but has 64G"),
    ],
)
def test_a_request_that_exceeds_a_node_of_the_site_is_an_error(words, text):
    Path("own.toml").write_text(OWN)
    with pytest.raises(ConfigError, match=f"{text}, by the profile of own; request less, or"):
        CliRunner().invoke(
            submit,
            ["--site", "own.toml", *words, "--print", "--", "python", "train.py"],
            catch_exceptions=False,
        )
    printed("--site", "own.toml", "--partition", "cpu", *words)  # nodes of another kind


def test_ranks_on_a_part_of_a_node_are_not_bound_next_to_their_gpus_with_a_note():
    Path("own.toml").write_text(OWN)
    script, notes = printed("--site", "own.toml", "--tasks", "1")
    assert "--cpu-bind=cores" in script
    assert (
        "note: Slurm binds ranks to cores, but not next to their GPUs; --tasks 2 --cpus 8" in notes
    )
    assert "next to their GPUs" not in printed("--site", "own.toml")[1]


def test_memory_of_a_node_and_hardware_threads_of_its_cores_follow_the_profile():
    script, _ = printed("--site", "alps")
    assert "#SBATCH --mem=450G\n" in script  # Clariden rejects --mem=0
    script, notes = printed("--site", "perlmutter")
    assert "#SBATCH --qos=regular\n" in script
    assert "#SBATCH --cpus-per-task=32\n" in script
    mask = ((1 << 16) - 1) << 48 | ((1 << 16) - 1) << 112  # cores 48-63 and their second threads
    assert f"--cpu-bind=mask_cpu:{mask:x}," in script
    assert "must name an account such as m1234_g; add --account" in notes


def test_a_job_on_jupiter_has_its_partition_and_a_socket_for_each_rank():
    script, notes = printed("--site", "jupiter")
    assert "#SBATCH --partition=booster\n" in script
    assert " --cpu-bind=sockets " in script
    assert "must name an account such as PROJECT; add --account" in notes


def test_a_printed_script_is_followed_by_its_profile_and_the_next_commands():
    _, notes = printed("--site", "lumi")
    assert "follows the profile of LUMI-G, CSC; --site none omits it\n" in notes
    assert notes.endswith(
        "note: nothing was checked or submitted; save the script as FILE, then `hpctrain doctor "
        "--lint FILE` and `sbatch FILE`\n"
    )


def test_without_slurm_and_profile_a_submission_reports_that_the_node_is_unknown():
    script, notes = printed("--tasks", "4")
    assert "#SBATCH --cpus-per-task=1\n" in script
    assert "neither Slurm nor a site profile describes the nodes" in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 1", r"nodes is not a key; did you mean \[node\]"),
        ("[node]\ngpus = '4'", "node.gpus must be an integer, got '4'"),
        ("[node]\ngpus = true", "node.gpus must be an integer, got True"),
        ("[node]\ncpus = -4", "node.cpus must be at least 0, got -4"),
        ("[node]\nmem = 'much'", "node.mem must be a size in the format of Slurm.* got 'much'"),
        ("[node]\nnetwork = 'tcp'", "node.network must be one of slingshot, infiniband, .*'tcp'"),
        ("[job]\nmodules = 'rocm'", "job.modules must be a list, got 'rocm'"),
        ("[job]\nmodules = [1]", "job.modules must be a list, each item text"),
        ("[job.variables]\nA = 1", "job.variables must be names with texts.* got 'A = 1'"),
        ("node = 1", r"node is a table; write \[node\]"),
        ("name =", "own.toml cannot be read as TOML"),
        *(
            (f'[node]\ngpu_cores = ["{cores}"]', f"gpu_cores must be cores .* got '{cores}'")
            for cores in ("x", "48", "15-0", "0-7,x", "0-7;32-39")
        ),
        ('[job]\nvariables = {B = "a\'b\\"c"}', "variables must be names with texts"),
        ('[job]\nvariables = {B = "$(touch x)"}', "variables must be names with texts"),
        ('[job]\nvariables = {"NCCL X" = "1"}', "variables must be names with texts"),
        ('[job]\ncpu_bind = "cores; echo hi"', "cpu_bind must not contain commands of a shell"),
        ('[job]\nsrun = ["--label; echo hi"]', "srun must not contain commands of a shell"),
        ('name = "a\\nrm"', "name must not contain commands of a shell"),
    ],
)
def test_a_wrong_profile_is_an_error_that_names_the_key(text, words):
    Path("own.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        sites.find("own.toml")


def test_a_profile_of_a_newer_format_is_refused_with_the_version_that_reads_it():
    Path("own.toml").write_text('version = 2\nreader = "1.7"\nnew_key = 1\n')
    refused = "profile own.toml cannot be read: its format version must be at most 1, got 2; inst"
    with pytest.raises(ConfigError, match=f"{refused}all hpctrain 1.7 or later"):
        sites.find("own.toml")


def test_an_unknown_profile_is_an_error_with_all_names():
    with pytest.raises(ConfigError, match=r"alps, .*perlmutter, got 'x'; `hpctrain site init"):
        sites.find("x")
    with pytest.raises(ConfigError, match=r"there is no file x.toml; `hpctrain site init x.toml"):
        sites.find("x.toml")


def test_site_lists_shows_and_writes_profiles(tmp_path, monkeypatch):
    for folder in ("cxi/cxi0", "cxi/cxi1", "../devices/system/node/node0"):
        (tmp_path / "sys/class" / folder).mkdir(parents=True)
    for gpu in range(4):
        (tmp_path / f"nvidia{gpu}").touch()
    for name, text in (
        ("sinfo", 'case "$*" in *X*) echo "gpu* 2 32 2" ;; *) echo "cpu gpu*" ;; esac'),
        ("scontrol", "echo 'ClusterName             = deep'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setattr(command, "SYS", tmp_path / "sys")
    monkeypatch.setattr(command, "DEVICES", tmp_path)
    run = CliRunner().invoke
    assert "lumi            LUMI-G, CSC\n" in run(command.app, ["list"]).stdout
    assert run(command.app, ["show", "lumi"]).stdout == sites.text("lumi")
    monkeypatch.delenv("WORK", raising=False)
    assert run(command.app, ["init"]).stdout == (
        "slurm/site.toml is written\n"
        'found: job.partition = "gpu", job.scratch = ["$SCRATCH"], node.cpus = 128, '
        'node.gpus = 4, node.numa_domains = 1, node.adapters = 2, node.network = "slingshot"\n'
        "next: complete the file; hpctrain submit and hpctrain doctor use it\n"
    )
    assert sites.OWN.read_text().startswith('version = 1\nreader = "1.0"\n# Profile of')
    found = sites.find()
    assert (found.name, found.job.partition) == ("deep", "gpu")
    node = found.node
    assert (node.cpus, node.gpus, node.adapters, node.network) == (128, 4, 2, "slingshot")
    assert node.numa_domains == 1
    assert "must not exist" in str(run(command.app, ["init"]).exception)


def test_init_without_slurm_names_the_facts_that_it_has_not_found(tmp_path, monkeypatch):
    for name in ("SCRATCH", "PSCRATCH", "WORK", "LOCAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "SYS", tmp_path / "sys")
    monkeypatch.setattr(command, "DEVICES", tmp_path)
    done = CliRunner().invoke(command.app, ["init", "mine.toml"])
    assert done.stdout == (
        "mine.toml is written\nfound: nothing\n"
        "not found: job.partition, job.scratch, node.cpus, node.gpus, node.numa_domains, "
        "node.adapters, node.network; the command finds these on a compute node of a cluster with "
        "Slurm, and your site documents them\n"
        "next: complete the file; hpctrain submit --site mine.toml and hpctrain doctor --site "
        "mine.toml use it\n"
    )
    assert printed("--site", "mine.toml")[1].startswith("note: neither Slurm nor a site profile")
