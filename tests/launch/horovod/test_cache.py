import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod import cache

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"

HOLD = """
import sys, time
from pathlib import Path
from hpctrain.launch.horovod import cache
with cache.locked(Path(sys.argv[1]), print):
    print("has it", flush=True)
    sys.stdin.readline()
    print("leaves", flush=True)
"""


def hold(folder):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_wheels_lie_in_the_users_cache():
    assert cache.root({"XDG_CACHE_HOME": "/big/cache"}) == Path("/big/cache/hpctrain/horovod")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache.root(environ) == Path.home() / ".cache/hpctrain/horovod"


def test_a_wheel_is_stored_in_place_of_older_ones(tmp_path):
    folder = tmp_path / "key"
    folder.mkdir()
    (folder / "horovod-0.28.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"old")
    wheel = tmp_path / NAME
    wheel.write_bytes(b"new")
    assert cache.store(wheel, folder) == folder / NAME
    assert cache.wheel_in(folder).read_bytes() == b"new"
    assert [path.name for path in folder.iterdir()] == [NAME]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_copy_leaves_what_was_there(tmp_path, monkeypatch, interruption):
    folder = tmp_path / "key"
    folder.mkdir()
    (folder / NAME).write_bytes(b"old")

    def stop(_source, target):
        Path(target).write_bytes(b"ha")
        raise interruption

    monkeypatch.setattr(cache.shutil, "copyfile", stop)
    with pytest.raises((interruption, LaunchError)):
        cache.store(tmp_path / NAME, folder)
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert cache.wheel_in(folder).read_bytes() == b"old"


def test_half_a_wheel_is_none(tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(b"ha")
    assert cache.wheel_in(tmp_path) is None
    assert cache.wheel_in(tmp_path / "none") is None


def test_a_second_build_waits_for_the_first_and_says_so(tmp_path):
    with hold(tmp_path) as first:
        assert first.stdout.readline() == "has it\n"
        with hold(tmp_path) as second:
            said = second.stdout.readline()
            assert "another build of this wheel is under way" in said
            assert f"process {first.pid} on " in said
            first.communicate("\n")
            assert second.stdout.readline() == "has it\n"
            assert second.communicate("\n")[0] == "leaves\n"


def test_the_lock_of_a_killed_build_is_free(tmp_path):
    with hold(tmp_path) as first:
        first.stdout.readline()
        first.kill()
    with hold(tmp_path) as second:
        assert second.communicate("\n")[0] == "has it\nleaves\n"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(LaunchError, match=r"cannot be written.*--wheel-dir"),
        cache.locked(tmp_path / "file/key", print),
    ):
        pass
