"""Check real faults of a directory: by the kernel, by mounts, by permissions."""

import json
import sys
from pathlib import Path

import h5py
import pytest

from hpctrain.doctor.host.directory_trial import (
    facts_of,
    file_system_of,
    take_steps,
    try_directory,
)
from tests.processes import ended

REFUSE = Path(__file__).with_name("refuse.py")

TRY = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from hpctrain.doctor.checks.environment import check_directories
from hpctrain.doctor.host.directory_trial import try_directory
from tests.doctor.healthy import with_
facts = try_directory(Path(sys.argv[1]), float(sys.argv[2]))
print(json.dumps([asdict(each) for each in check_directories(with_(directories=(facts,)))]))
"""


def findings(directory, *before, limit_s=60):
    """Return the findings for a directory, from a process started by the command ``before``."""
    done = ended(
        [*before, sys.executable, "-c", TRY, str(directory), str(limit_s)],
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STEPS = ("list", "write", "lock", "hdf5", "hdf5 locked")


def test_good_directory_is_unchanged_and_missing_one_is_reported(tmp_path):
    facts = try_directory(tmp_path, 60)
    assert facts.steps == dict.fromkeys(STEPS, "")
    assert tuple(facts.steps) == STEPS
    assert facts.hung == ""
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert "FileNotFoundError" in try_directory(tmp_path / "none", 60).steps["list"]


def test_the_trial_of_a_directory_syncs_as_a_checkpoint_does(disk, capsys):
    take_steps(disk.root, "trial")
    output = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert output[1:] == [[step, message] for step in STEPS for message in (None, "")]
    assert not list(disk.root.iterdir())


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
    assert "no file locks" in found["what"]
    assert "HDF5_USE_FILE_LOCKING=FALSE" in found["do"]


def test_a_lock_that_hangs_is_an_error_that_does_not_hang(tmp_path):
    (found,) = findings(tmp_path, sys.executable, REFUSE, "flock", "hang", limit_s=6)
    assert found["level"] == "error"
    assert "request of a file lock hangs" in found["what"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "hung", "running"),
    [
        (["list", "write"], True, "write"),
        ([], True, "start"),
        (["list", "write", "lock"], False, ""),
    ],
)
def test_hanging_step_is_reported(lines, hung, running):
    message = ['["place", "lustre", 5]']
    for name in lines:
        message += [f'["{name}", null]', f'["{name}", ""]']
    if running and lines:
        message.pop()
    facts = facts_of(Path("/scratch"), [*message, '["beg'], hung=hung)
    assert (facts.hung, facts.file_system) == (running, "lustre")


def test_kind_of_file_system_is_reported(tmp_path):
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(tmp_path / "none") == ""
