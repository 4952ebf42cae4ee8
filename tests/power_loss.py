"""Check what remains on disk after a loss of power: a record of all syncs, and two laws.

A kill keeps the cache of the system, so no kill reveals a missing sync. The module records and
executes every sync, rename and removal of the ranks. The content of a file counts as on disk as of
its last sync; a name counts as on disk if its directory was synced after the name was created.
Files that existed before the test count as on disk.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import pytest

from hpctrain.core import atomic
from hpctrain.core.atomic import PART
from hpctrain.train.metrics import RANKS

FLEETING = (RANKS,)  # files that no run resumes from: they need not be on disk


class Disk:
    """Record the operations of this process below a folder; ranks share one ``record``.

    Violations of two laws are added to ``faults``: a file must be on disk before its name, and
    nothing may be removed while a rename is not on disk.
    """

    def __init__(self, root: Path, record: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self._record = root.resolve(), record
        self.faults: list[str] = []
        self.watchers: list[Callable[[Path], None]] = []
        """Called with each new name, just before the rename."""
        self._renamed: dict[int, list[str]] = {}  # by directory: not on disk yet
        self._real = {name: getattr(os, name) for name in ("fsync", "unlink")}
        record.mkdir(exist_ok=True)
        if self.root.exists() and not any(record.iterdir()):
            for path in (self.root, *self.root.rglob("*")):
                self._keep(path)
        patch.setattr(os, "fsync", self._fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._renaming(getattr(os, name)))
        for name in ("unlink", "remove", "rmdir"):
            patch.setattr(os, name, self._removing(getattr(os, name)))
        patch.setattr(atomic, "exchange_names", self._exchanging(atomic.exchange_names))

    def lost(self, *ignored: str, below: Path | None = None) -> list[str]:
        """Return what a loss of power now would change, except partial and ignored files."""
        return list(self._lost(below or self.root, ignored))

    def has_name(self, path: Path) -> bool:
        """Return True if the name of a path is on disk in its directory."""
        with self._alone():
            names = json.loads(self.kept(path.parent) or "{}")
        return names.get(path.name) == path.lstat().st_ino

    def kept(self, path: Path) -> bytes:
        """Return the bytes of a file that are on disk."""
        return self._place(path).read_bytes() if self._place(path).exists() else b""

    def _lost(self, path: Path, ignored: tuple[str, ...]) -> Iterator[str]:
        if not path.is_dir():
            if self.kept(path) != path.read_bytes() or not self._place(path).exists():
                yield f"the bytes of {path}"
            return
        for entry in sorted(path.iterdir()):
            if entry.name.endswith(PART) or entry.name in (*ignored, *FLEETING):
                continue
            if not self.has_name(entry):
                yield f"the name {entry}"
            yield from self._lost(entry, ignored)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the record of directories against other ranks."""
        with (self._record / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _place(self, path: Path) -> Path:
        return self._record / str(path.stat().st_ino)

    def _keep(self, path: Path) -> None:
        place = self._place(path)
        if path.is_dir():
            with self._alone(), os.scandir(path) as entries:  # other ranks may remove entries
                place.write_text(json.dumps({entry.name: entry.inode() for entry in entries}))
        else:
            part = place.with_name(f"{place.name}.{get_ident()}")  # another thread may read
            part.write_bytes(path.read_bytes())
            part.replace(place)

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(self.root) and path.exists():
            self._keep(path)
            self._renamed.pop(path.stat().st_ino, None)

    def _check(self, source: Path, target: Path) -> None:
        if not any(folder.name.endswith(PART) for folder in target.parents):  # not visible yet
            self.faults += [f"{what} when it became {target}" for what in self._lost(source, ())]
        for watch in self.watchers:
            watch(target)

    def _note(self, *paths: Path) -> None:
        for path in paths:
            self._renamed.setdefault(path.parent.stat().st_ino, []).append(str(path))

    def _renaming(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: os.PathLike[str], target: os.PathLike[str], **options: int) -> None:
            paths = [Path(source).absolute(), Path(target).absolute()]
            is_ours = all(path.is_relative_to(self.root) for path in paths)
            if not is_ours or options or paths[1].name in FLEETING:
                real(source, target, **options)
                return
            self._check(*paths)
            replaced = self._place(paths[1]) if paths[1].exists() else None
            real(source, target)
            if replaced and replaced.exists():
                self._real["unlink"](replaced)
            self._note(*paths)

        return rename

    def _exchanging(self, real: Callable[[Path, Path], bool]) -> Callable[[Path, Path], bool]:
        def exchange(a: Path, b: Path) -> bool:
            self._check(a, b)
            done = real(a, b)
            if done:
                self._note(a, b)
            return done

        return exchange

    def _removing(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: os.PathLike[str], *, dir_fd: int | None = None) -> None:
            folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
            whole = (folder / path).absolute()
            place = None
            if whole.is_relative_to(self.root) and whole.exists():
                place = self._place(whole)
                if place.exists() and self._renamed:
                    self.faults.append(f"{whole} was removed before {self._renamed} was on disk")
            if place and place.exists():  # before another rank can reuse the inode
                self._real["unlink"](place)
            real(path, dir_fd=dir_fd)

        return remove


@pytest.fixture
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Record the operations of all ranks below ``tmp_path`` of rank 0, and check the laws."""
    root: Path = request.getfixturevalue("tmp_path")
    record: Path = request.getfixturevalue("tmp_path_factory").mktemp("record")
    world = request.getfixturevalue("world") if "world" in request.fixturenames else None
    if world is not None:
        root, record = world.bcast((root, record))
    found = Disk(root, record, monkeypatch)
    if world is not None:
        world.Barrier()
    yield found
    monkeypatch.undo()
    assert not found.faults
