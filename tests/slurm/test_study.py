"""A scaling study on a running Slurm: a job for each repeat, and a resubmission."""

import re

import pytest

from hpctrain.studies.point_records import StudyFolder
from tests.train.starting import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.conformance]

STUDY = f"""
factors = {{ ranks = [2, 4], ranks_per_node = [2] }}
study = {{ name = "s", repeats = 2, warm_up = 2 }}
[command]
run = "python {ROOT}/examples/measured.py --steps 8"
environment = {{ OMP_NUM_THREADS = 1, HPCTRAIN_PROBE = "off" }}
"""


@pytest.mark.limit(600)
def test_an_array_measures_a_study_and_a_resubmission_measures_lost_points(slurm, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)

    def submit():
        done = slurm.run(
            ["hpctrain", "study", "run", "study.toml", "--slurm", "--time", "10min"], cwd=tmp_path
        )
        numbers = re.findall(r"^job (\d+):", done.stdout, re.MULTILINE)
        return [slurm.job(int(number)) for number in numbers]

    study = StudyFolder(tmp_path / "studies/s")
    array, report = submit()
    for task in array.tasks():
        assert task.wait(240) == "COMPLETED", task.output()
    records = study.read_points()
    assert [record.order for record in records] == [0, 1, 2, 3]
    for record in records:
        assert record.status == "done", record.error
        assert record.samples == 6 * 64 * record.point["ranks"]
        assert not record.oversubscribed
    environment = study.read_environment()
    assert environment["slurm_job"] is not None
    assert environment["topology"]["ranks=4 ranks_per_node=2"]["ranks"].startswith("4 on 2 nodes")
    report.wait(60)

    # as if the job of the second repeat had ended before its last point
    share = study.points_file(1)
    share.write_text(share.read_text().splitlines()[0] + "\n")
    array, report = submit()
    [task] = array.tasks()
    assert task.wait(240) == "COMPLETED", task.output()
    assert [record.order for record in study.read_points()] == [0, 1, 2, 3]
    assert len(share.read_text().splitlines()) == 2
    report.wait(60)
    assert "4 repeats measured, 0 failed" in report.output()
    # the measuring jobs print this, not the report
    assert "4 of 4 measured" not in report.output()


ONE_TO_FOUR = f"""
factors = {{ nodes = [1, 2, 3, 4], batch = [24] }}
study = {{ name = "s", repeats = 1, warm_up = 2 }}
[command]
run = "python {ROOT}/examples/measured.py --batch {{rank_batch}} --steps 8"
environment = {{ OMP_NUM_THREADS = 1, HPCTRAIN_PROBE = "off" }}
"""


@pytest.mark.limit(900)
def test_a_study_on_one_to_four_nodes_gives_the_report_of_a_proposal(slurm, tmp_path):
    (tmp_path / "study.toml").write_text(ONE_TO_FOUR)
    done = slurm.run(["hpctrain", "study", "run", "study.toml", "--slurm"], cwd=tmp_path)
    array, report = (
        slurm.job(int(n)) for n in re.findall(r"^job (\d+):", done.stdout, re.MULTILINE)
    )
    [task] = array.tasks()
    assert task.wait(400) == "COMPLETED", task.output()
    report.wait(100)
    slurm.run(["hpctrain", "study", "report", "studies/s", "--for", "eurohpc"], cwd=tmp_path)
    text = (tmp_path / "studies/s/proposal.md").read_text()
    for size in range(1, 5):
        assert f"\n| {size} | {size} | 24 | " in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "Base of speed-up and efficiency: 1 rank on 1 node" in text
    assert (tmp_path / "studies/s/proposal.pdf").stat().st_size > 10_000
