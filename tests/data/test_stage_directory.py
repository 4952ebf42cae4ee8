"""The folder of a job on a node: there while a process holds it, gone after any end of all."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.data.io.staging import staging_directory as stage_directory
from hpctrain.data.io.staging.staging_directory import LOCK, PREFIX, StageDirectory, sweep
from tests.runtime.victims import wait_until

LIMIT_S = 20.0

JOB = """
import os, sys, time
from pathlib import Path
from hpctrain.data.io.staging import staging_directory
def refuse(path):
    raise OSError
if sys.argv[2] == "alone":
    staging_directory._keep = refuse
held = staging_directory.StageDirectory.create(Path(sys.argv[1]), "test")
(held.path / "file").write_text("content")
if not os.fork():
    sys.exit()  # with all exit handlers
os.wait()
print(held.path, (held.path / "file").exists(), flush=True)
end = sys.stdin.readline().strip()
if end == "exception":
    raise ValueError("bad luck")
if end == "held":
    time.sleep(1e9)
"""


# The locks of NFS: exclusive ones are for descriptors that may be written to, shared ones for
# those that may be read.
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


@pytest.fixture(scope="module")
def nfs(tmp_path_factory):
    """Give the environment of a process whose files are locked as on NFS."""
    folder = tmp_path_factory.mktemp("nfs")
    (folder / "nfs.c").write_text(NFS)
    library = folder / "nfs.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "nfs.c"], check=True)
    return {"LD_PRELOAD": str(library)}


@contextlib.contextmanager
def job(parent, kept="kept", environ=()):
    """Run a process that holds a directory of its own below ``parent``."""
    script = [sys.executable, "-c", JOB, str(parent), kept]
    process = subprocess.Popen(
        script,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **dict(environ),
        },
    )
    try:
        path, survives_fork = process.stdout.readline().split()
        assert survives_fork == "True"
        yield process, Path(path)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ["", "exception"])
def test_it_goes_with_the_process(tmp_path, end):
    with job(tmp_path) as (process, path):
        process.communicate(end + "\n")
        assert process.returncode == bool(end)
        assert not path.exists()


def test_it_goes_when_the_process_is_killed(tmp_path):
    with job(tmp_path) as (process, path):
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not path.exists(), LIMIT_S)
    assert not list(tmp_path.iterdir())


@pytest.mark.requires("compiler")
def test_it_goes_with_the_process_on_nfs(tmp_path, nfs):
    with job(tmp_path, environ=nfs) as (process, path):
        process.communicate("\n")
        assert process.returncode == 0
        assert not path.exists()
    with job(tmp_path, environ=nfs) as (process, path):
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not path.exists(), LIMIT_S)


@pytest.mark.requires("compiler")
def test_what_a_killed_job_leaves_on_nfs_is_swept(tmp_path, nfs):
    code = "from hpctrain.data.io.staging.staging_directory import sweep; import sys, pathlib"
    code += "; print(*sweep(pathlib.Path(sys.argv[1])))"

    def swept():
        line = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.check_output(line, env={**os.environ, **nfs}, text=True).split()

    with job(tmp_path, "alone", nfs) as (process, path):
        assert swept() == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert swept() == [str(path)]
    assert not path.exists()


def test_what_a_killed_job_leaves_is_swept_and_what_is_held_is_not(tmp_path):
    with job(tmp_path, "alone") as (process, path), job(tmp_path) as (_, other):
        assert sweep(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        assert sweep(tmp_path) == [path]
        assert other.exists()
        assert not path.exists()


def test_nothing_else_is_swept(tmp_path):
    for name in (f"{PREFIX}mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / LOCK).touch()
    (tmp_path / f"{PREFIX}file").touch()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
    assert sweep(tmp_path / "nowhere") == []


def test_a_directory_that_was_never_locked_goes_when_it_is_old(tmp_path, monkeypatch):
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    (young / f"{LOCK}.part").touch()
    assert sweep(tmp_path) == []
    monkeypatch.setattr(stage_directory, "YOUNG_S", -1.0)
    assert sweep(tmp_path) == [young]


def test_the_last_one_who_lets_go_removes_it(tmp_path):
    first = StageDirectory.create(tmp_path, "test")
    second = StageDirectory.join(first.path)
    first.close()
    first.close()
    assert second.path.exists()
    assert sweep(tmp_path) == []
    del second
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_locked_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(stage_directory.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        StageDirectory.create(tmp_path, "test")
    assert not list(tmp_path.iterdir())
