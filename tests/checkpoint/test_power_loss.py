"""What was saved is on disk when its name is, and nothing goes before what takes its place."""

import pytest
import torch

from hpctrain import checkpoint
from hpctrain.checkpoint.export import export
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core import atomic
from tests.checkpoint.managed import managed, state, steps_in
from tests.checkpoint.test_export import FILES

PRIVATE = {"random": torch.arange(5)}


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_and_its_parents_are_on_disk_when_it_is_saved(disk, comm, root):
    for value in (1, 2):  # a new one, then in its place
        checkpoint.save(root / "step-00000001", state(value), comm, step=1, private=PRIVATE)
        assert not disk.lost()
        comm.barrier()


def test_where_names_cannot_be_exchanged_it_is_on_disk_too(disk, monkeypatch):
    monkeypatch.setattr(atomic, "exchange_names", lambda *_: False)
    for value in (1, 2):
        checkpoint.save(disk.root / "a", state(value), SerialCommunicator(), step=1)
        assert not disk.lost()


@FILES
def test_what_is_exported_is_on_disk(disk, name):
    for value in (1, 2):
        tensors = {"w": state(value)["w"]}
        export(tensors, disk.root / "new" / "folder" / name, overwrite=True)
        assert not disk.lost()


@pytest.mark.ranks(1, 2)
def test_old_checkpoints_go_when_the_new_one_and_their_new_names_are_on_disk(disk, comm, root):
    with managed(root, comm, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step, wait=True)
            assert not disk.lost()
    assert steps_in(root) == [3]
    with managed(root, comm, keep=1) as manager:  # a run that went back behind the newest
        manager.save(state(2), 2, wait=True)
        assert not disk.lost()
    assert {path.name for path in root.iterdir()} == {"step-00000002", "step-00000003.aside"}
