"""Check that saved files are on disk before their names, and that old files remain until then."""

import pytest
import torch

from hpctrain import checkpoint
from hpctrain.checkpoint.export import export
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core import atomic
from tests.checkpoint.managed import managed, state, steps_in
from tests.checkpoint.test_export import FILES
from tests.comm.conftest import PATHS, connected

PRIVATE = {"random": torch.arange(5)}


@pytest.mark.ranks(1, 2)
def test_checkpoint_and_parent_directories_are_on_disk_after_a_save(disk, comm, root):
    for value in (1, 2):  # a new checkpoint, then its replacement
        checkpoint.save(root / "step-00000001", state(value), comm, step=1, private=PRIVATE)
        assert not disk.lost()
        comm.barrier()


@pytest.mark.ranks(2, 3)
def test_file_of_a_node_is_on_disk_after_a_save(disk, root):
    with connected(PATHS["one node"]) as made:
        for value in (1, 2):
            private = {"rank": made.comm.rank}
            values = state(value, numel=700_000)
            checkpoint.save(root / "a", values, made.comm, step=1, private=private)
            assert [path.name for path in root.glob("a/rank-*")] == ["rank-00000.safetensors"]
            assert not disk.lost()
            made.comm.barrier()


def test_checkpoint_is_on_disk_without_exchange_of_names(disk, monkeypatch):
    monkeypatch.setattr(atomic, "exchange_names", lambda *_: False)
    for value in (1, 2):
        checkpoint.save(disk.root / "a", state(value), SerialCommunicator(), step=1)
        assert not disk.lost()


@FILES
def test_exported_file_is_on_disk(disk, name):
    for value in (1, 2):
        tensors = {"w": state(value)["w"]}
        export(tensors, disk.root / "new" / "folder" / name, overwrite=True)
        assert not disk.lost()


@pytest.mark.ranks(1, 2)
def test_old_checkpoints_are_removed_after_the_new_one_is_on_disk(disk, comm, root):
    with managed(root, comm, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step, wait=True)
            assert not disk.lost()
    assert steps_in(root) == [3]
    with managed(root, comm, keep=1) as manager:  # resumed before the newest
        manager.save(state(2), 2, wait=True)
        assert not disk.lost()
    assert {path.name for path in root.iterdir()} == {"step-00000002", "step-00000003.aside"}
