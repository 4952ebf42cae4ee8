"""Check the folder of a job on a node: its place, its lock, and its removal."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.data import node_folder
from hpctrain.data.node_folder import LOCK, MEMORY, PREFIX, NodeFolder, sites, sweep

TMPFS, XFS, NFS = 0x01021994, 0x58465342, 0x6969  # types of statfs(2)

JOB = """
import os, sys
from pathlib import Path
from hpctrain.data.node_folder import NodeFolder, sweep
held = NodeFolder.create(Path(sys.argv[1]), "test")
(held.path / "file").write_text("content")
if not os.fork():
    sys.exit()  # with all exit handlers
os.wait()
print(held.path, (held.path / "file").exists(), flush=True)
if sys.stdin.readline().strip() == "exception":
    raise ValueError("bad luck")
"""

SWEEP = """
import sys
from pathlib import Path
from hpctrain.data.node_folder import sweep
print(*sweep(Path(sys.argv[1])))
"""

# Locks of NFS: exclusive ones need a descriptor open for writing, shared ones one open for
# reading.
NFS = """
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int file, int operation) {
    int mode = fcntl(file, F_GETFL) & O_ACCMODE;
    int refused = operation & LOCK_EX ? O_RDONLY : operation & LOCK_SH ? O_WRONLY : -1;
    if (mode == refused) { errno = EBADF; return -1; }
    return syscall(SYS_flock, file, operation);
}
"""


@pytest.fixture(params=["disk", pytest.param("nfs", marks=pytest.mark.requires("compiler"))])
def environ(request, tmp_path_factory):
    """Return the environment of processes, with file locks as on a disk, or as on NFS."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if request.param == "nfs":
        folder = tmp_path_factory.mktemp("nfs")
        (folder / "nfs.c").write_text(NFS)
        library = str(folder / "nfs.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "nfs.c"], check=True)
        environ["LD_PRELOAD"] = library
    return environ


@contextlib.contextmanager
def job(parent, environ):
    """Run a process that holds a separate folder below ``parent``."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        path, survives_fork = process.stdout.readline().split()
        assert survives_fork == "True"
        yield process, Path(path)
    finally:
        process.kill()
        process.communicate()


def test_folder_is_removed_with_the_process_or_by_the_next_job(tmp_path, environ):
    def swept():
        line = [sys.executable, "-c", SWEEP, str(tmp_path)]
        return subprocess.check_output(line, env=environ, text=True).split()

    with job(tmp_path, environ) as (process, path), job(tmp_path, environ) as (other, own):
        assert swept() == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        assert swept() == [str(path)]
        assert not path.exists()
        other.communicate("exception\n")
        assert other.returncode == 1
        assert not own.exists()
    assert not list(tmp_path.iterdir())


def test_other_folders_are_not_removed(tmp_path):
    for name in (f"{PREFIX}mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / LOCK).touch()
    (tmp_path / f"{PREFIX}file").touch()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
    assert sweep(tmp_path / "nowhere") == []


def test_the_last_user_removes_the_folder_and_a_folder_without_locks_leaves_nothing(
    tmp_path, monkeypatch
):
    first = NodeFolder.create(tmp_path, "test")
    second = NodeFolder.join(first.path)
    first.close()
    first.close()
    assert second.path.exists()
    assert sweep(tmp_path) == []
    del second
    assert not list(tmp_path.iterdir())

    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(node_folder.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        NodeFolder.create(tmp_path, "test")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Provide a node; the name of a folder determines its file system, such as ``memory``."""
    for name in ("SLURM_TMPDIR", "TMPDIR", "HPCTRAIN_STAGE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    def magic(descriptor):
        kind = Path(f"/proc/self/fd/{descriptor}").readlink().name.partition("-")[0]
        return {"memory": TMPFS, "disk": XFS}.get(kind, NFS)

    monkeypatch.setattr(node_folder, "file_system_magic", magic)
    monkeypatch.setattr(node_folder, "MEMORY", make("memory"))
    monkeypatch.setattr(node_folder, "available_bytes", lambda: 1000)
    return make


@pytest.fixture
def source():
    """Return a directory on another device than temporary files of tests."""
    return MEMORY


def test_the_jobs_folders_come_before_memory_if_they_are_the_nodes_own(node, source, monkeypatch):
    slurm, temporary, far = node("disk-a"), node("disk-b"), node("far")
    monkeypatch.setenv("SLURM_TMPDIR", str(slurm))
    monkeypatch.setenv("TMPDIR", str(temporary))
    memory = node_folder.MEMORY
    assert [site.folder for site in sites("auto", source)] == [slurm, temporary, memory]
    assert sites("auto", temporary) == []  # all on the device of the data set
    monkeypatch.setenv("SLURM_TMPDIR", str(far))
    monkeypatch.setenv("TMPDIR", str(slurm / "missing"))
    assert [site.folder for site in sites("auto", source)] == [memory]
    # The folder that the user names is used unchanged, and created.
    monkeypatch.setenv("HPCTRAIN_STAGE_DIR", str(far / "made"))
    assert [site.folder for site in sites("auto", source)] == [far / "made", memory]
    assert (far / "made").is_dir()
    assert [site.folder for site in sites(far / "other", source)] == [far / "other"]


def test_room_is_the_free_space_and_half_of_it_in_memory_that_was_not_chosen(
    node, source, monkeypatch
):
    disk = node("disk")
    monkeypatch.setenv("TMPDIR", str(disk))
    on_disk, in_memory = sites("auto", source)
    status = os.statvfs(disk)
    free_bytes = status.f_bavail * status.f_frsize
    assert 0.8 * free_bytes < on_disk.room_bytes < free_bytes
    assert in_memory.room_bytes == 500
    (chosen,) = sites(node_folder.MEMORY, source)
    assert chosen.room_bytes == 950
