"""Check random malicious archives and HDF5 files: packed exactly or rejected."""

import random
import tarfile
from collections import Counter
from io import BytesIO

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import DataError
from tests.data.packing.test_tar import npy

N = 12


def write_tar(path, draw):
    """Return the samples of an archive, and whether it must be rejected."""
    trap = draw.choice([None, None, "link", "symlink", "claim", "twice", "cut", "lacks"])
    endings = draw.sample(["cls", "npy", "bin", "seg.txt"], draw.randrange(1, 5))
    folder, at, samples = draw.choice(["", "./", "a/b/"]), draw.randrange(N), []
    with tarfile.open(path, draw.choice(["w", "w:gz"])) as archive:
        for index in range(N):
            contents = {"cls": b"%d" % index, "npy": npy(np.full(2, index)), "bin": b"x" * index}
            contents["seg.txt"] = b"text"
            samples.append({ending: contents[ending] for ending in endings})
            for ending in endings:
                is_at = index == at and ending == endings[-1]
                member = tarfile.TarInfo(f"{folder}{index:03}.{ending}")
                add(archive, member, contents[ending], trap if is_at else None)
            if draw.random() < 0.2:
                archive.addfile(tarfile.TarInfo(f"README{index}"))
        if trap == "claim":
            member = tarfile.TarInfo(f"999.{endings[0]}")
            member.size = draw.choice([2**31, 2**33])
            archive.addfile(member)
    if trap == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size * draw.randrange(1, 9) // 20])
    # A sample without its only extension does not count.
    if trap == "lacks" and len(endings) == 1:
        del samples[at]
        trap = None
    return samples, trap is not None


def add(archive, member, content, trap):
    member.size = len(content)
    if trap in ("link", "symlink"):
        member.type = tarfile.LNKTYPE if trap == "link" else tarfile.SYMTYPE
        member.linkname, member.size = "000.cls", 0
    for _ in range({"lacks": 0, "twice": 2}.get(trap, 1)):
        archive.addfile(member, BytesIO(content))


def write_hdf5(path, draw):
    """Return the requested datasets, and whether they must be rejected."""
    asked = {}
    trap = draw.choice([None, None, "storage", "virtual", "link", "soft", "dangling", "cut"])
    with h5py.File(path, "w") as file:
        for number in range(draw.randrange(1, 4)):
            asked[f"f{number}"] = draw.choice(["", "a/", "a/b/"]) + f"x{number}"
            add_dataset(file, asked[f"f{number}"], draw)
        if trap in TRAPS:
            TRAPS[trap](file, path.with_name("outside.h5"))
    if trap == "cut":
        path.write_bytes(path.read_bytes()[: -draw.randrange(1, 100)])
    elif trap and draw.random() < 0.7:
        asked["t"] = "t"
        return asked, True
    return asked, trap == "cut"


def add_dataset(file, name, draw):
    kind = draw.choice(["plain", "chunks", "gzip", "big", "text", "rows", "unwritten"])
    row = np.random.default_rng(draw.randrange(100)).random((N, 3))
    if kind == "text":
        file.create_dataset(name, data=["é" * index for index in range(N)])
    elif kind == "rows":
        rows = file.create_dataset(name, N, h5py.vlen_dtype("i4"))
        for index in range(N):
            rows[index] = np.arange(index)
    elif kind == "unwritten":
        file.create_dataset(name, (N, 2), "i2", fillvalue=7, chunks=(5, 2))
    elif kind == "gzip":
        file.create_dataset(name, data=row, chunks=(5, 2), compression="gzip")
    else:
        chunks = (5, 2) if kind == "chunks" else None
        file.create_dataset(name, data=row, dtype=">f4" if kind == "big" else "f8", chunks=chunks)


def external_storage(file, outside):
    np.arange(float(N)).tofile(outside)
    file.create_dataset("t", (N,), "f8", external=[(str(outside), 0, 8 * N)])


def virtual(file, outside):
    layout = h5py.VirtualLayout((N,), "f8")
    layout[:] = h5py.VirtualSource(str(outside), "x", (N,))
    file.create_virtual_dataset("t", layout)


def external_link(file, outside):
    with h5py.File(outside, "w") as other:
        other["x"] = np.arange(float(N))
    file["t"] = h5py.ExternalLink(str(outside), "/x")


def soft_link(to):
    def link(file, _):
        file["t"] = h5py.SoftLink(to)

    return link


TRAPS = {
    "storage": external_storage,
    "virtual": virtual,
    "link": external_link,
    "soft": soft_link("/t"),
    "dangling": soft_link("/nowhere"),
}


def is_same(found, want):
    if isinstance(want, bytes):
        return bytes(found) == want
    return np.array_equal(found, want)


def check_tar(tmp_path, packed, seeds):
    outcomes = Counter()
    for seed in seeds:
        path = tmp_path / f"{seed}.tar"
        samples, is_refused = write_tar(path, random.Random(seed))
        if is_refused or not samples:
            with pytest.raises(DataError):
                packed(path)
            outcomes["refused"] += 1
            continue
        _, found = packed(path)
        for ending in samples[0]:
            got = found[ending.replace(".", "_")]
            assert len(got) == len(samples), f"seed {seed}"
            for value, sample in zip(got, samples, strict=True):
                content = sample[ending]
                want = int(content) if ending == "cls" else content
                want = np.load(BytesIO(content)) if ending == "npy" else want
                assert is_same(value, want), f"seed {seed}"
        outcomes["packed"] += 1
    return outcomes


def check_hdf5(tmp_path, packed, seeds):
    outcomes = Counter()
    for seed in seeds:
        path = tmp_path / f"{seed}.h5"
        asked, is_refused = write_hdf5(path, random.Random(seed))
        shuffle = seed if seed % 3 == 0 else None
        if is_refused:
            with pytest.raises(DataError):
                packed(path, fields=asked, shuffle=shuffle)
            outcomes["refused"] += 1
            continue
        numbered = {**asked, "number": "number"}
        with h5py.File(path, "r+") as file:
            file["number"] = np.arange(N)
            want = {name: file[at][:] for name, at in numbered.items()}
        _, found = packed(path, fields=numbered, shuffle=shuffle)
        for name, values in want.items():
            for value, index in zip(found[name], found["number"], strict=True):
                assert is_same(value, values[index]), f"seed {seed}: {name}"
        outcomes["packed"] += 1
    return outcomes


def test_archives_are_packed_completely_or_rejected(tmp_path, packed):
    outcomes = check_tar(tmp_path, packed, range(8))
    assert min(outcomes["packed"], outcomes["refused"]) >= 2


def test_hdf5_files_are_packed_completely_or_rejected(tmp_path, packed):
    outcomes = check_hdf5(tmp_path, packed, range(8, 16))
    assert min(outcomes["packed"], outcomes["refused"]) >= 2


@pytest.mark.conformance
def test_many_archives_and_hdf5_files_are_packed_completely_or_rejected(tmp_path, packed):
    for check in (check_tar, check_hdf5):
        outcomes = check(tmp_path, packed, range(100, 130))
        assert min(outcomes["packed"], outcomes["refused"]) >= 5
