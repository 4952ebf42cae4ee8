"""A resumed run keeps its plan if the launcher reports the same nodes."""

from types import SimpleNamespace

import pytest

from hpctrain.core.keys import render
from hpctrain.train.resume import plan_to_keep
from hpctrain.train.run_config import CommConfig, RunConfig
from hpctrain.train.run_directory import RunDirectory

OURS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_STEP_ID")


def mpirun(size: int, ranks: int) -> dict[str, str]:
    """Return the environment of rank 0 under mpirun, with ``ranks`` ranks on its host."""
    values = {"RANK": 0, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def srun(size: int, nodes: str) -> dict[str, str]:
    """Return the environment of rank 0 in a Slurm step."""
    values = {"STEP_ID": 0, "PROCID": 0, "NTASKS": size, "STEP_TASKS_PER_NODE": nodes}
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


def stored(nodes: tuple[int, ...]) -> SimpleNamespace:
    """Return the content of a plan file."""
    return SimpleNamespace(nodes=nodes, plan=SimpleNamespace(engine="hpctrain"))


@pytest.mark.parametrize(
    ("nodes", "per_node", "environ", "kept"),
    [
        ((1,), 0, {}, True), ((2,), 0, {}, False), ((2, 2), 2, mpirun(4, 4), True),
        ((2, 1, 1), 2, mpirun(4, 4), False), ((4,), 0, mpirun(4, 4), True),
        ((2, 2), 0, mpirun(4, 2), True), ((3, 1), 0, mpirun(4, 2), False),
        ((2, 2, 1), 0, srun(5, "2(x2),1"), True), ((2, 1, 2), 0, srun(5, "2(x2),1"), False),
        ((1, 1, 1, 1, 1), 1, srun(5, "2(x2),1"), True), ((2, 2, 1), 0, srun(5, "2(x2)"), False),
        ((2, 2, 1), 0, srun(5, "2(y2),1"), False),
    ],
)  # fmt: skip
def test_the_plan_is_kept_with_the_same_nodes_settings_and_engine(
    tmp_path, monkeypatch, nodes, per_node, environ, kept
):
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hpctrain.train.resume.StoredPlan.read", lambda _: stored(nodes))
    config = RunConfig(comm=CommConfig(ranks_per_node=per_node))
    directory = RunDirectory(tmp_path)
    directory.config.write_text(render(config))
    assert plan_to_keep(directory, config, "hpctrain") == (directory.plan if kept else None)
    assert plan_to_keep(directory, config, "horovod") is None
    late = RunConfig(comm=CommConfig(ranks_per_node=per_node, overlap="end"))
    assert plan_to_keep(directory, late, "hpctrain") is None
