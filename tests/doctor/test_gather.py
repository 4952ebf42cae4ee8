"""Facts are gathered from a machine as it is."""

import os
import subprocess
import sys
import time

import pytest

from hpctrain.doctor.checks.facts import Reached
from hpctrain.doctor.host.gather import gather, libraries_in, reached, srun_types_of
from hpctrain.doctor.host.leftovers import leftovers


def test_gathering_lightly_leaves_out_what_is_the_same_for_a_node():
    facts = gather({"CUDA_VISIBLE_DEVICES": "0, 3"}, lightly=True)
    assert facts.mpi.library is None
    assert facts.memory.leftovers == ()
    assert facts.cores.mask
    assert facts.visible == ("0", "3")
    assert facts.network.copy_error == ""


@pytest.mark.parametrize(
    "text",
    [
        "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix (pmix_v4)\n",
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugins: pmix_v4\n",
        "srun: MPI types are...\nnone\npmi2\npmix\npmix_v4\n",
    ],
)
def test_what_srun_offers_is_read_from_old_and_new_slurm(text):
    assert {"none", "pmi2", "pmix"} <= set(srun_types_of(text))
    assert "types" not in srun_types_of(text)


def tree(root, version="40.30.6"):
    """An MPI as it is installed: a file with links to it, the linker's text, and its mpirun."""
    (root / "lib").mkdir(parents=True)
    (root / "bin").mkdir()
    library = root / "lib" / f"libmpi.so.{version}"
    library.write_bytes(b"")
    (root / "lib" / f"libmpi.so.{version.partition('.')[0]}").symlink_to(library.name)
    (root / "lib" / "libmpi.so").symlink_to(library.name)
    (root / "lib" / "libmpi_mpifh.so.40").write_bytes(b"")
    (root / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (root / "bin" / "mpirun").chmod(0o755)
    return library


def test_a_folder_has_each_mpi_once(tmp_path):
    library = tree(tmp_path)
    assert libraries_in(tmp_path / "lib") == [library]
    (tmp_path / "lib/libmpich.so.12").write_bytes(b"")
    assert set(libraries_in(tmp_path / "lib")) == {library, tmp_path / "lib/libmpich.so.12"}
    assert libraries_in(tmp_path / "none") == []


def test_a_text_for_the_linker_is_no_library(tmp_path):
    (tmp_path / "libmpi.so").write_text("INPUT(libmpi.so.40)")
    assert libraries_in(tmp_path) == []


def test_paths_lead_to_libraries(tmp_path):
    library, other = tree(tmp_path / "a"), tree(tmp_path / "b", "12.2.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").symlink_to(tmp_path / "b/bin/mpirun")
    found = reached({"LD_LIBRARY_PATH": f"/none:{tmp_path}/a/lib:", "PATH": f"{tmp_path}/bin"})
    assert found == (
        Reached(library=library, by="LD_LIBRARY_PATH"),
        Reached(library=other, by="mpirun", program=tmp_path / "bin/mpirun"),
    )
    assert reached({"PATH": "/none"}) == ()


def make(path, age_s=3600):
    path.write_bytes(b"x" * 8192)
    old = time.time() - age_s
    os.utime(path, (old, old))
    return path


def test_only_old_files_that_nobody_uses_are_stale(tmp_path):
    stale = make(tmp_path / "sm_segment.vm.0.1")
    mapped, opened = make(tmp_path / "vader_segment.1"), make(tmp_path / "mpich_shm_1")
    make(tmp_path / "sm_segment.vm.0.2", age_s=1)
    make(tmp_path / "somebody_elses")
    code = (
        "import mmap, sys; a = open(sys.argv[1], 'r+b'); m = mmap.mmap(a.fileno(), 0); a.close();"
        "b = open(sys.argv[2]); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, mapped, opened], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        user.stdout.readline()
        (found,) = leftovers(tmp_path)
        user.stdin.close()
    assert (found.path, found.maker, found.num_bytes) == (stale, "Open MPI", 8192)
    assert {each.path for each in leftovers(tmp_path)} == {stale, mapped, opened}


def test_a_folder_of_ours_is_stale_without_its_lock(tmp_path):
    old = time.time() - 3600
    for name in ("hpctrain-held", "hpctrain-ended", "hpctrain-unknown"):
        (tmp_path / name).mkdir()
        if name != "hpctrain-unknown":
            (tmp_path / name / "lock").write_bytes(b"")
        os.utime(tmp_path / name, (old, old))
    code = (
        "import fcntl, sys; a = open(sys.argv[1]); fcntl.flock(a, fcntl.LOCK_SH);"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "hpctrain-held/lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        assert [each.path.name for each in leftovers(tmp_path)] == ["hpctrain-ended"]
        holder.stdin.close()
