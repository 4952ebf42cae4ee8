"""Studies with real ranks, of ``hpctrain train`` and of a script."""

import os
import sys
from dataclasses import replace

import pytest

from hpctrain.core.keys import render
from hpctrain.core.records import read
from hpctrain.studies.point_records import StudyFolder
from hpctrain.studies.study_file import example
from tests.processes import ended
from tests.train.starting import ROOT, write_config

HEAD = """
factors = { ranks = [1, 2], batch = [16] }
study = { name = "s", repeats = 1, warm_up = 2, target = { TARGET = 0.0 } }
[command]
environment = { OMP_NUM_THREADS = 1, HPCTRAIN_PROBE = "off" }
"""

TRAIN = """
run = "hpctrain train small.toml"
set = { output_dir = "{folder}/run", "train.global_batch" = "{global_batch}" }
"""

SCRIPT = f"""
run = "python {ROOT}/examples/measured.py --batch {{rank_batch}} --steps 12"
"""


def measured(folder, text, num_points=2):
    (folder / "study.toml").write_text(text)
    done = ended(
        [sys.executable, "-m", "hpctrain", "study", "run", "study.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    study = StudyFolder(folder / "studies/s")
    records = sorted(study.read_points(), key=lambda record: record.point["ranks"])
    assert len(records) == num_points
    assert not any("torch" in line for line in done.stderr.splitlines())
    environment = study.read_environment()
    assert len(environment["plan"]) == num_points
    assert "MPI" in environment["mpi"]  # known from a point with several ranks
    for record in records:
        assert record.elapsed_s > record.seconds  # elapsed_s includes the warm-up
    return study, records


@pytest.mark.launches
@pytest.mark.limit(180)
def test_records_of_a_run_equal_its_metrics(tmp_path):
    write_config(tmp_path, "tests.train.problem:model", epochs=3)
    study, (_, two) = measured(tmp_path, HEAD.replace("TARGET", "test_loss") + TRAIN)
    metrics = read(study.path / two.folder / "run/metrics.jsonl")
    steps = [record for record in metrics if record["event"] == "step"][2:]
    assert two.num_steps == len(steps) == 10
    assert two.samples == 3 * 53 - 2 * 16
    assert two.loss == pytest.approx(steps[-1]["loss"])
    for part in ("compute_s", "input_s"):
        assert getattr(two, part) == pytest.approx([step[part] for step in steps])
    exposed = [sum(both) for both in zip(two.communication_s, two.idle_s, strict=True)]
    assert exposed == pytest.approx([step["communication_s"] for step in steps])
    mean_s = [sum(parts) for parts in zip(two.compute_s, two.input_s, exposed, strict=True)]
    assert all(slowest >= mean for slowest, mean in zip(two.step_s, mean_s, strict=True))
    assert two.node_bytes > 0
    last = metrics[-1]
    assert (two.metric_name, two.metric) == ("test_loss", last["loss"])
    assert two.steps_to_target is None


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(180)
def test_a_script_is_measured_with_two_calls(tmp_path):
    _, records = measured(tmp_path, HEAD.replace("TARGET", "accuracy") + SCRIPT)
    for record in records:
        assert (record.num_steps, record.samples) == (10, 160)
        assert record.metric_name == "accuracy"
        assert record.steps_to_target == 12
        assert record.time_to_target_s > record.seconds


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.requires("cluster")
@pytest.mark.limit(900)
@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_digits_study_runs_on_virtual_hosts(tmp_path, mode):
    made = example(mode)
    study = replace(made.study, name="s", repeats=1, hosts=4, cores=2)
    settings = {**made.command.set, "train.epochs": 2, "data.args.folder": f"{tmp_path}/data"}
    command = replace(
        made.command,
        run=f"hpctrain train {ROOT}/examples/digits.toml",
        launcher="python -m tests.studies.on_cluster {nodes} {ranks} --",
        set=settings,
    )
    factors = {**made.factors, "ranks_per_node": [2]}
    config = replace(made, factors=factors, study=study, command=command)
    _, records = measured(tmp_path, render(config), num_points=3)
    for record in records:
        assert not record.oversubscribed
        assert (record.rail_bytes > 0) == (record.point["ranks"] > 2)
        assert record.samples > 1293


COUNTED = """
import sys, time
from pathlib import Path
import hpctrain
from hpctrain.cluster import counters

counters.ROOT = Path(sys.argv[1])
energy = counters.ROOT / "sys/cray/pm_counters/energy"
hpctrain.init()
for step in range(40):
    time.sleep(0.05)
    if hpctrain.rank() == 0:  # 1000 W
        part = energy.with_name("part")
        part.write_text(f"{1000 * time.monotonic():.0f} J 0 us\\n")
        part.replace(energy)
    hpctrain.record(step=step, samples=4)
"""


@pytest.mark.launches
@pytest.mark.limit(180)
def test_simulated_counters_of_ranks_reach_the_report_of_a_proposal(tmp_path):
    root = tmp_path / "root"
    device = root / "sys/class/drm/card0/device"
    (root / "sys/cray/pm_counters").mkdir(parents=True)
    (root / "sys/cray/pm_counters/energy").write_text("0 J 0 us\n")
    device.mkdir(parents=True)
    (device / "gpu_busy_percent").write_text("75\n")
    (device / "mem_info_vram_used").write_text(f"{2**31}\n")
    (tmp_path / "counted.py").write_text(COUNTED)
    head = HEAD.replace(", target = { TARGET = 0.0 }", "").replace(", batch = [16]", "")
    _, records = measured(tmp_path, f'{head}run = "python counted.py {root}"\n')
    for record in records:
        assert record.power_w == pytest.approx(1000, rel=0.4)  # once, also with two ranks
        assert (record.power_source, record.gpu) == ("Cray pm_counters", "AMD GPU")
        assert (record.gpu_busy, record.gpu_memory_bytes) == (0.75, 2**31)
        assert record.other_cores is not None
    done = ended(
        [sys.executable, "-m", "hpctrain", "study", "report", "studies/s", "--for", "csc"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "studies/s/proposal.md").read_text()
    for shown in ("75%", "2.0 GiB", "energy, kWh", "GPU-hours", "by Cray pm_counters"):
        assert shown in text
