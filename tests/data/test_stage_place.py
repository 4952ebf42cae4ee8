"""Where a data set is staged: what the user says, then what the job has, then memory."""

import os

import pytest

from hpctrain.data.io.staging import place as stage_place
from hpctrain.data.io.staging.place import MEMORY, filesystem_of, sites

MOUNTS = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /home rw - nfs4 server:/home rw
23 22 0:21 / /home/me/fast rw - xfs /dev/nvme0n1 rw
24 21 0:22 / /with\\040space rw - lustre mds@o2ib:/scratch rw
25 21 0:23 / /scratch rw - ext4 /dev/sdb rw
26 21 0:24 / /scratch rw - beegfs beegfs_nodev rw
"""


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Give a node whose folders are on the file systems that their names say."""
    kinds = {}

    def make(name, kind):
        (tmp_path / name).mkdir()
        kinds[tmp_path / name] = kind
        return tmp_path / name

    for name in ("SLURM_TMPDIR", "TMPDIR", "HPCTRAIN_STAGE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stage_place, "filesystem_of", lambda path: kinds.get(path, "ext4"))
    monkeypatch.setattr(stage_place, "MEMORY", make("memory", "tmpfs"))
    monkeypatch.setattr(stage_place, "available_bytes", lambda: 1000)
    return make


@pytest.fixture
def source():
    """Give a directory on another device than temporary files of tests."""
    return MEMORY


def test_the_longest_mount_point_counts_and_the_last_one_on_it(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    for path, kind in {
        "/var": "ext4",
        "/homes": "ext4",
        "/home/me": "nfs4",
        "/home/me/fast/a": "xfs",
        "/with space/a": "lustre",
        "/scratch/a": "beegfs",
    }.items():
        assert filesystem_of(stage_place.Path(path), mounts) == kind
    assert filesystem_of(tmp_path, tmp_path / "missing") == ""


def test_the_jobs_folders_come_before_memory_if_they_are_the_nodes_own(node, source, monkeypatch):
    slurm, temporary, chosen = node("a", "xfs"), node("b", "ext4"), node("c", "nfs4")
    monkeypatch.setenv("SLURM_TMPDIR", str(slurm))
    monkeypatch.setenv("TMPDIR", str(temporary))
    memory = stage_place.MEMORY
    assert [site.folder for site in sites("auto", source)] == [slurm, temporary, memory]
    monkeypatch.setenv("TMPDIR", str(node("d", "nfs4")))
    monkeypatch.setenv("SLURM_TMPDIR", str(node("e", "some-network-file-system")))
    assert [site.folder for site in sites("auto", source)] == [memory]
    # What the user names is taken as it is, and made.
    monkeypatch.setenv("HPCTRAIN_STAGE_DIR", str(chosen / "made"))
    assert [site.folder for site in sites("auto", source)] == [chosen / "made", memory]
    assert (chosen / "made").is_dir()
    assert [site.folder for site in sites(chosen / "other", source)] == [chosen / "other"]


def test_a_folder_beside_the_data_set_wins_nothing(node, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(node("a", "ext4")))
    assert sites("auto", tmp_path) == []


@pytest.mark.usefixtures("node")
def test_memory_that_nobody_chose_is_taken_up_to_half(source):
    (site,) = sites("auto", source)
    assert site.room_bytes == 500
    (chosen,) = sites(stage_place.MEMORY, source)
    assert chosen.room_bytes == 950


def test_a_disk_is_taken_as_far_as_it_is_free(node, source, monkeypatch):
    disk = node("a", "ext4")
    monkeypatch.setenv("TMPDIR", str(disk))
    status = os.statvfs(disk)
    free_bytes = status.f_bavail * status.f_frsize
    assert 0.8 * free_bytes < sites("auto", source)[0].room_bytes < free_bytes
