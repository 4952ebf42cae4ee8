"""Check random folders with links: packed as a walk by real paths, or rejected."""

import random
from collections import Counter

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.packing.pack import PackConfig, pack
from tests.data.plain import read_whole


def make(root, draw):
    """Make classes of folders with numbered arrays, and links between them."""
    count = iter(range(10**6))
    folders = [root]
    for name in ["cat", "dog", "emu"][: draw.randrange(1, 4)]:
        below = [root / name]
        for depth in range(draw.randrange(3)):
            below.append(draw.choice(below) / f"{draw.choice('am')}{depth}")
        folders += below
    outside = root.parent / "outside"
    for folder in [*folders[1:], outside]:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(draw.randrange(1, 3)):
            np.save(folder / f"{draw.choice('bcx')}{(index := next(count))}.npy", index)
    for number in range(draw.randrange(4)):
        at = draw.choice(folders[1:]) / f"{draw.choice('az')}-link{number}"
        kind = draw.choice(["above", "above", "above", "any", "file", "outside"])
        if kind == "file":
            at.with_suffix(".npy").symlink_to(draw.choice(list(outside.iterdir())))
        elif kind == "outside":
            at.symlink_to(outside)
        else:
            some = at.parents if kind == "above" else folders
            at.symlink_to(draw.choice([one for one in some if one.is_relative_to(root.parent)]))


def expected(root):
    """Return class and number of each file, or None where a folder occurs twice."""
    found, seen = [], set()

    def walk(path, label, above):
        real = path.resolve()
        if real in above:
            return True
        if real in seen:
            return False
        seen.add(real)
        entries = sorted(path.iterdir())
        found.extend((label, int(np.load(one))) for one in entries if not one.is_dir())
        folders = [one for one in entries if one.is_dir()]
        return all(walk(one, label or one.name, {*above, real}) for one in folders)

    return found if walk(root, "", set(root.resolve().parents)) else None


def check(tmp_path, seeds):
    outcomes = Counter()
    for seed in seeds:
        root = tmp_path / str(seed) / "photos"
        make(root, random.Random(seed))
        want = expected(root)
        if want is None:
            with pytest.raises(DataError, match="are the same folder; remove the link"):
                pack(root, tmp_path / "set", PackConfig(overwrite=True))
            outcomes["refused"] += 1
            continue
        done = pack(root, tmp_path / "set", PackConfig(overwrite=True))
        found = read_whole(tmp_path / "set")
        labels = [done.manifest.classes[label] for label in found["label"]]
        assert list(zip(labels, found["array"], strict=True)) == want, f"seed {seed}"
        outcomes["packed"] += 1
        outcomes["left out"] += any("links to a parent folder" in note for note in done.notes)
    return outcomes


@pytest.mark.parametrize(
    ("seeds", "least"),
    [(range(8, 16), 1), pytest.param(range(100, 150), 5, marks=pytest.mark.conformance)],
)
def test_each_file_is_packed_once_under_its_class(tmp_path, seeds, least):
    outcomes = check(tmp_path, seeds)
    assert min(outcomes[one] for one in ("packed", "refused", "left out")) >= least
