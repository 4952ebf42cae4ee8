"""Check that faults in the checkpoints of a run are found and reported."""

import shutil

import pytest
import torch

from hpctrain import checkpoint
from hpctrain.checkpoint import inspection
from hpctrain.checkpoint.format.manifest import step_of
from hpctrain.checkpoint.inspection import checkpoints_in, describe, lines_of, verify
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import flip


def write(run, step, comm=None, **facts):
    state = {
        "model": {"w": torch.arange(1000.0) + step, "b": torch.zeros(3).half()},
        "n": torch.tensor(step),
    }
    comm = comm or SerialCommunicator()
    checkpoint.save(
        run / "checkpoints" / f"step-{step:08d}",
        state,
        comm,
        step=step,
        private={"random": torch.zeros(100)},
        facts=facts,
    )


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path / "run", step, score={1: 0.9, 2: 0.5, 3: 0.7, 4: 0.1}[step])
    return tmp_path / "run"


def file_of(run, step, name="rank-00000.safetensors"):
    return run / "checkpoints" / f"step-{step:08d}" / name


def names(paths):
    return [int(path.name.removeprefix("step-")) for path in paths]


def output_by(run):
    """Return each step that verify reports, and whether it is complete."""
    return [(step_of(place.name), not faults) for place, faults in verify(run)]


def test_directory_with_the_name_of_another_step_is_rejected_everywhere(run, caplog):
    folder = run / "checkpoints"
    (folder / "step-00000003").rename(folder / "step-00000009")
    assert output_by(run) == [(1, True), (2, True), (4, True), (9, False)]
    message = "step-00000009 is used for the checkpoint of step 3; use the name step-00000003"
    for refused in (describe, lambda path: checkpoint.load(path, SerialCommunicator())):
        with pytest.raises(CheckpointError, match=message):
            refused(folder / "step-00000009")
    with pytest.raises(CheckpointError, match="use the name step-00000005"):
        checkpoint.save(folder / "step-00000006", {}, SerialCommunicator(), step=5)
    manager = checkpoint.Manager(folder, SerialCommunicator())
    assert manager.load_latest().step == 4
    assert caplog.text.count(message) == 1
    manager.close()
    (folder / "step-00000009").rename(folder / "kept")
    assert checkpoint.load(folder / "kept", SerialCommunicator()).step == 3


def test_whole_checkpoints_are_verified(run):
    assert output_by(run) == output_by(run / "checkpoints") == [(n, True) for n in (1, 2, 3, 4)]
    assert output_by(run / "checkpoints" / "step-00000002") == [(2, True)]


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def garble(path):
    path.write_text('{"crc32": "00000000",\n')


@pytest.mark.parametrize("harm", [flip, cut, lambda path: path.unlink(), garble])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_every_fault_is_reported_with_its_file(run, harm, name):
    harm(file_of(run, 3, name))
    found = dict(verify(run))
    (fault,) = found.pop(run / "checkpoints" / "step-00000003")
    assert not any(found.values())
    assert name in fault
    assert "\n" not in fault


def test_checkpoint_removed_or_replaced_during_verification_is_not_reported(run, monkeypatch):
    found = verify(run)
    assert next(found)[0].name.endswith("1")
    shutil.rmtree(file_of(run, 2).parent)
    check = inspection.check

    def check_later(directory):
        """Let another job replace the checkpoint of step 3 during the check."""
        if directory.name.endswith("3") and flip(file_of(run, 3)) is None:
            faults = check(directory)
            write(run, 3)
            return faults
        return check(directory)

    monkeypatch.setattr(inspection, "check", check_later)
    assert [(place.name[-1], faults) for place, faults in found] == [("4", [])]
    assert output_by(file_of(run, 2).parent) == [(2, False)]


def test_directory_without_checkpoints_raises(run, tmp_path):
    with pytest.raises(CheckpointError, match="must contain a complete checkpoint"):
        list(verify(tmp_path))
    with pytest.raises(CheckpointError, match="but has none; pass a run directory"):
        list(verify(tmp_path / "none"))
    shutil.rmtree(file_of(run, 3).parent)
    (run / "checkpoints" / "step-00000003.part").mkdir()
    assert names(checkpoints_in(run)) == [1, 2, 4]


@pytest.mark.ranks(1, 2, 3, 4)
def test_description_includes_the_files_of_all_ranks(world, tmp_path):
    run = world.bcast(tmp_path)
    write(run, 5, MpiCommunicator(world), why="test")
    world.barrier()
    output = describe(run / "checkpoints" / "step-00000005", num_largest=2)
    assert (output["step"], output["world"], output["facts"]) == (5, world.size, {"why": "test"})
    assert (output["num_tensors"], output["num_elements"]) == (3, 1004)
    assert output["state_bytes"] == 1000 * 4 + 3 * 2 + 8
    assert output["private_bytes"] >= world.size * 400
    assert [held["path"] for held in output["largest"]] == ["model/w", "n"]
    assert len(output["files"]) == world.size
    assert all(file["num_bytes"] for file in output["files"])
    assert "missing" not in "\n".join(lines_of(output))
    assert output_by(run) == [(5, True)]


def test_missing_file_is_reported(run):
    file_of(run, 4).unlink()
    assert "missing: rank-00000" in "\n".join(lines_of(describe(file_of(run, 4).parent)))
