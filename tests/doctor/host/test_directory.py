"""Faults of a directory are planted for real: by the kernel, by mounts, by rights."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from hpctrain.core.units import GIB
from hpctrain.doctor.host import directory_steps, directory_trial
from hpctrain.doctor.host.directory import check
from hpctrain.doctor.host.directory_trial import facts_of, file_system_of, try_directory
from hpctrain.doctor.host.facts import DirectoryFacts
from tests.doctor.host.healthy import only, with_

REFUSE = Path(__file__).with_name("refuse.py")

TRY = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from hpctrain.doctor.host.directory import check
from hpctrain.doctor.host.facts import Facts
from hpctrain.doctor.host.directory_trial import try_directory
from tests.doctor.host.healthy import with_
facts = try_directory(Path(sys.argv[1]), float(sys.argv[2]))
print(json.dumps([asdict(each) for each in check(with_(directories=(facts,)))]))
"""


def findings(directory, *before, limit_s=60):
    """What is found in a directory by a process that ``before`` puts somewhere."""
    done = subprocess.run(
        [*before, sys.executable, "-c", TRY, str(directory), str(limit_s)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_good_directory_is_ok_and_left_as_it_was(tmp_path):
    facts = try_directory(tmp_path, 60)
    assert [step.name for step in facts.steps] == ["list", "write", "lock", "hdf5", "hdf5 locked"]
    assert [step.error for step in facts.steps] == [""] * 5
    assert facts.hung == ""
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_the_trial_of_a_directory_syncs_as_a_checkpoint_does(disk, capsys):
    directory_steps.main(disk.root)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["end", ""] in told
    assert not list(disk.root.iterdir())


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    found = only(check(with_(directories=(try_directory(tmp_path / "none", 60),))))
    assert found.level == "error"
    assert "FileNotFoundError" in found.what
    assert "mkdir -p" in found.do


@pytest.mark.requires("root")
def test_a_directory_that_is_read_only_is_a_warning(tmp_path):
    with h5py.File(tmp_path / "shard.h5", "w") as file:
        file["x"] = 1
    mount = 'mount --bind -o ro "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    (found,) = findings(tmp_path, "unshare", "-m", "sh", "-c", mount, str(tmp_path))
    assert found["level"] == "warning"
    assert "Read-only file system" in found["what"]
    assert "another directory" in found["do"]


def test_a_file_system_without_locks_is_a_warning(tmp_path):
    (found,) = findings(tmp_path, sys.executable, REFUSE, "flock", "ENOLCK")
    assert found["level"] == "warning"
    assert "no locks" in found["what"]
    assert "HDF5_USE_FILE_LOCKING=FALSE" in found["do"]


def test_a_lock_that_hangs_is_an_error_that_does_not_hang(tmp_path):
    (found,) = findings(tmp_path, sys.executable, REFUSE, "flock", "hang", limit_s=6)
    assert found["level"] == "error"
    assert "taking a lock hangs" in found["what"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_a_note():
    facts = DirectoryFacts(path=Path("/scratch"), file_system="ext4", free_bytes=GIB - 1)
    assert only(check(with_(directories=(facts,)))).level == "note"


@pytest.mark.parametrize(
    ("lines", "hung", "running"),
    [
        (["list", "write"], True, "write"),
        ([], True, "start"),
        (["list", "write", "lock"], False, ""),
    ],
)
def test_the_step_that_hangs_is_named(lines, hung, running):
    said = ['["place", "lustre", 5]']
    for name in lines:
        said += [f'["begin", "{name}"]', '["end", ""]']
    if running and lines:
        said.pop()
    facts = facts_of(Path("/scratch"), [*said, '["beg'], hung=hung)
    assert (facts.hung, facts.file_system) == (running, "lustre")


def test_hdf5_that_fails_without_locks_is_an_error():
    lines = ['["begin", "hdf5"]', '["end", "OSError: bad"]', '["begin", "lock"]', '["end", ""]']
    facts = facts_of(Path("/scratch"), lines, hung=False)
    found = only(check(with_(directories=(facts,))))
    assert found.level == "error"
    assert "OSError: bad" in found.what


def test_a_hung_step_that_takes_no_lock_blames_the_file_server():
    facts = DirectoryFacts(path=Path("/scratch"), hung="list")
    assert "file server" in only(check(with_(directories=(facts,)))).what


def test_the_kind_of_file_system_is_that_of_the_mount_on_top(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:1 / /scratch rw - ext4 /dev/sdb rw\n"
        "3 1 0:2 / /scratch rw shared:7 - lustre 10.0.0.1@o2ib:/s rw\n"
        "4 1 0:3 / /scratch2 rw - nfs4 server:/x rw\n"
        "cut off\n"
    )
    assert file_system_of(Path("/scratch/me"), mounts) == "lustre"
    assert file_system_of(Path("/scratch2"), mounts) == "nfs4"
    assert file_system_of(Path("/home"), mounts) == "ext4"
    assert file_system_of(Path("/home"), tmp_path / "none") == ""


def test_what_a_hung_trial_made_is_removed(tmp_path):
    made = tmp_path / ".hpctrain-doctor-x"
    made.mkdir()
    directory_trial._remove_what_was_made(f'["place", "", 1]\n["made", "{made}"]\n["beg')
    assert not made.exists()
