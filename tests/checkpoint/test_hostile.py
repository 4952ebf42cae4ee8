"""Check that a damaged or malicious checkpoint raises on every rank and has no other effect."""

import json
import os
import random
import zlib
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.format.manifest import NAME, VERSION, CheckpointManifest, file_name
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.loading import check, load
from hpctrain.checkpoint.part_lists import PartIndex
from hpctrain.checkpoint.saving import save
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import flip

STATE = {"w": torch.arange(600.0).reshape(30, 20), "n": [1, 2.5, "text"], "b": torch.ones(7)}
PRIVATE = {"random": torch.arange(50)}
FILE = file_name(0)
ALONE = SerialCommunicator()


@pytest.fixture(params=[1, VERSION])
def good(tmp_path, request):
    """Return a checkpoint for a test to damage."""
    save(tmp_path / "a", STATE, ALONE, step=1, private=PRIVATE)
    if request.param == 1:
        to_version_1(tmp_path / "a")
    return tmp_path / "a"


only_1 = pytest.mark.parametrize("good", [1], indirect=True)
only_newest = pytest.mark.parametrize("good", [VERSION], indirect=True)


def to_version_1(directory):
    """Replace a checkpoint of one rank by the same checkpoint in version 1 of the format."""
    index = PartIndex(directory, CheckpointManifest.read(directory))
    index.read([0])

    def listed(records):
        return {
            name: {"dtype": record.dtype, "shape": record.shape, "parts": [
                {"rank": part.rank, "offset": part.shard.offset, "shape": part.shard.shape,
                 "crc32": part.crcs}
                for part in record.parts
            ]}
            for name, record in records.items()
        }  # fmt: skip

    output = manifest_of(directory)
    del output["files"]
    parts = {"tensors": listed(index.records()), "private": {"0": listed(index.private(0))}}
    seal(directory, {**output, "version": 1, **parts})
    header, data = header_of(directory / FILE)
    del header["__metadata__"]
    with_header(directory / FILE, json.dumps(header).encode(), data)


def refused(directory, match=None, **more):
    with pytest.raises(CheckpointError, match=match) as caught:
        load(directory, ALONE, **more)
    assert str(directory) in str(caught.value)
    faults = check(directory)
    assert faults
    assert all(str(directory) in fault for fault in faults)


@pytest.mark.parametrize("name", [FILE, NAME])
def test_flipped_bit_is_found_at_any_position(good, name):
    path = good / name
    data = path.read_bytes()
    choice = random.Random(0)
    for position in {*range(16), *choice.sample(range(len(data)), 120), len(data) - 1}:
        flip(path, position, 1 << choice.randrange(8))
        refused(good)
        path.write_bytes(data)
    assert check(good) == []


@pytest.mark.parametrize("name", [FILE, NAME])
def test_truncated_file_is_found(good, name):
    path = good / name
    data = path.read_bytes()
    for part in (0.0, 0.001, 0.1, 0.5, 0.9, 1 - 1 / len(data)):
        path.write_bytes(data[: int(len(data) * part)])
        refused(good, r"is damaged: .*; use another checkpoint")
    path.write_bytes(data + b"\n")
    refused(good, "is damaged")


@pytest.mark.parametrize("name", [FILE, NAME])
def test_missing_or_irregular_file_raises(good, name, tmp_path):
    path = good / name
    kept = path.rename(tmp_path / "kept")
    refused(good, "No such file" if name == FILE else "its save did not finish: manifest")
    path.symlink_to(kept)
    refused(good, "is a symbolic link; replace the link by a copy")
    path.unlink()
    path.mkdir()
    refused(good)
    path.rmdir()
    os.mkfifo(path)
    refused(good, "must be regular files")


@pytest.mark.limit(60)
@pytest.mark.ranks(2, 3)
def test_damage_found_by_one_rank_raises_on_every_rank(world, tmp_path):
    comm = MpiCommunicator(world)
    folder = Path(world.bcast(str(tmp_path))) / "a"
    save(folder, STATE, comm, step=1, private=PRIVATE)
    last = comm.size - 1
    wanted = {"w": Shard((30, 20), (0, 0), (30 if comm.rank == last else 0, 20))}
    wanted["b"] = Shard((7,), (0,), (0,))
    spoilt = CheckpointManifest.read(folder).tensors["w"].files[0]
    if comm.rank == 0:
        path = folder / file_name(spoilt)
        flip(path, path.read_bytes().index(STATE["w"].numpy().tobytes()), 1)
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"the bytes of w have changed in block 0"):
        load(folder, comm, into=wanted)
    with pytest.raises(CheckpointError, match=rf"{file_name(spoilt)} is damaged"):
        load(folder, comm)
    comm.close()


@pytest.mark.requires("root")
def test_unreadable_file_raises(good):
    for name in (FILE, NAME):
        (good / name).chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError):
                load(good, ALONE)
        finally:
            os.seteuid(0)
        (good / name).chmod(0o644)


def manifest_of(directory):
    output = json.loads((directory / NAME).read_bytes())
    del output["crc32"]
    return output


def seal(directory, output):
    """Write a manifest with any content and a correct checksum."""
    body = b",\n".join(
        f"{json.dumps(key)}: {json.dumps(value)}".encode() for key, value in output.items()
    )
    write_sealed(directory, body + b"}")


def write_sealed(directory, body):
    (directory / NAME).write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)


def spoil(output, where, value):
    """Set a value of a manifest at a path such as ``tensors/w/shape``."""
    *way, last = where.split("/")
    for key in way:
        output = output[int(key) if isinstance(output, list) else key]
    if isinstance(output, list):
        output[int(last)] = value
    elif value is None:
        del output[last]
    else:
        output[last] = value


ODD = [-1, 1.5, True, "3", [], {}, 2**63, 10**30]
SPOILT = [
    *((where, value) for where in ("step", "world", "tensors/w/parts/0/rank") for value in ODD),
    *((f"tensors/w/{name}/0", value) for name in ("shape", "parts") for value in ODD),
    *((f"tensors/w/parts/0/{name}/0", v) for name in ("offset", "shape", "crc32") for v in ODD),
    *((f"tensors/w/{name}", value) for name in ("dtype", "shape", "parts") for value in ODD),
    *((name, value) for name in ("tensors", "private", "facts") for value in (1, [], "x")),
    *((name, None) for name in ("step", "world", "facts", "tensors", "private", "skeleton")),
    ("format", "another"), ("version", "1"), ("world", 0), ("tensors/w/parts/0/rank", 1),
    ("tensors/w/dtype", "float16"), ("tensors/w/dtype", "object"), ("tensors/w", None),
    ("tensors/w/shape", [20, 30]), ("tensors/w/shape", [2**40, 2**40]),
    ("tensors/w/parts/0/rank", "../../x"), ("tensors/w/parts/0/crc32", [1]),
    ("tensors/w/parts/0/crc32", [1, 2]), ("tensors/w/parts/0/crc32", []),
    ("tensors/%private", {"dtype": "uint8", "shape": [0], "parts": []}),
    ("private/0/w", {"dtype": "uint8", "shape": [0], "parts": []}),
    ("private/x", {}), ("private/0/%private/parts/0/rank", 7), ("skeleton", {"tensor": "v"}),
    ("skeleton", {"eval": "x"}), ("skeleton", [[[[[{}]]]]]),
]  # fmt: skip


@only_1
@pytest.mark.parametrize(("where", "value"), SPOILT, ids=str)
def test_malicious_manifest_raises(good, where, value):
    output = manifest_of(good)
    spoil(output, where, value)
    seal(good, output)
    refused(good)


@only_1
@pytest.mark.parametrize(
    "text", ["{", "[" * 120, '{"eval": "x"}', '{"tensor": "none"}', '{"int": "z"}', "\ud800"]
)
def test_private_state_of_a_rank_is_checked_during_the_load(good, text):
    header, data = header_of(good / FILE)
    start, stop = header["%private"]["data_offsets"]
    own = text.encode(errors="surrogatepass").ljust(stop - start)[: stop - start]
    position = (good / FILE).stat().st_size - len(data) + start
    with (good / FILE).open("r+b") as file:
        file.seek(position)
        file.write(own)
    output = manifest_of(good)
    spoil(output, "private/0/%private/parts/0/crc32", [zlib.crc32(own)])
    seal(good, output)
    refused(good)


@pytest.mark.parametrize(
    "body", [b"", b"}", b"1}", b'"a": ' + b"[" * 10**6, b'"step": ' + b"9" * 5000 + b"}", b"\xff}"]
)
def test_manifest_that_is_not_json_raises(good, body):
    write_sealed(good, body)
    refused(good, "is damaged")


@only_1
def test_huge_world_is_permitted_and_empty_world_raises(good):
    output = manifest_of(good)
    seal(good, {**output, "world": 2**62})
    assert check(good) == []
    assert load(good, ALONE).step == 1
    seal(good, {**output, "world": 0, "tensors": {}, "private": {}, "skeleton": None})
    refused(good, "number of ranks that wrote the checkpoint is 0")


@only_1
def test_no_escape_reaches_the_terminal(good):
    output = manifest_of(good)
    bad = "\n\x1b[31m" + "x" * 9999
    for where in ("format", "version", "step", "tensors/w/dtype", "skeleton/dict/0/1/tensor"):
        again = json.loads(json.dumps(output))
        spoil(again, where, bad)
        seal(good, again)
        with pytest.raises(CheckpointError) as caught:
            load(good, ALONE)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
    seal(good, {**output, "version": 4, "reader": bad})
    refused(good, "got 4; install a newer hpctrain")


def test_newer_version_is_reported(good):
    output = manifest_of(good)
    seal(good, {**output, "version": 4, "reader": "1.7"})
    refused(good, "format version must be at most 3, got 4; install hpctrain 1.7 or later")


@only_1
@pytest.mark.parametrize("files", [None, 1, [], [-1], [1], ["0"], [0, 0], [0.0], {"0": 0}])
def test_malicious_list_of_shared_files_raises(good, files):
    output = manifest_of(good)
    seal(good, {**output, "version": 2, "files": files})
    refused(good)
    seal(good, {**output, "version": 2, "files": [0]})
    assert check(good) == []


def header_of(path):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(path, text, data):
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@only_1
@pytest.mark.parametrize(
    ("where", "value"),
    [
        *((f"w/data_offsets/{end}", value) for end in (0, 1) for value in ODD),
        *((f"w/{name}", value) for name in ("dtype", "shape", "data_offsets") for value in ODD),
        *((f"w/{name}", None) for name in ("dtype", "shape", "data_offsets")),
        ("w", None), ("w", []), ("w", 1), ("v", {"dtype": "F32", "shape": [0]}),
        ("w/data_offsets", [0, 2400]), ("w/data_offsets", [2**60, 2**61]),
        ("w/data_offsets", [-2400, 0]), ("w/data_offsets", [400, 2801]),
        ("w/dtype", "F16"), ("w/shape", [20, 30]), ("w/shape", [600]),
    ],
    ids=str,
)  # fmt: skip
def test_malicious_file_raises(good, where, value):
    header, data = header_of(good / FILE)
    spoil(header, where, value)
    with_header(good / FILE, json.dumps(header).encode(), data)
    refused(good, rf"{FILE} is damaged")


@only_1
@pytest.mark.parametrize(
    "text", [b"", b"1", b"[]", b"[" * 10**6, b"{" * 10**6, b'{"w": ' * 10**5, b"\xff", b"9" * 5000]
)
def test_file_with_an_invalid_header_raises(good, text):
    _, data = header_of(good / FILE)
    with_header(good / FILE, text, data)
    refused(good, rf"{FILE} is damaged")


@only_1
@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**9])
def test_header_with_an_excessive_length_raises(good, length):
    with (good / FILE).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    refused(good, rf"its header must have at most \d+ bytes, got {length}")


SPOILT_NEWEST = [
    *((f"tensors/w/{name}/0", value) for name in ("shape", "files") for value in ODD),
    *((f"tensors/w/{name}", value) for name in ("dtype", "shape", "files") for value in ODD),
    *((f"files/0/{name}/0", v) for name in ("ranks", "private") for v in (*ODD, [0], [1, 0])),
    *((f"files/0/{name}", v) for name in ("private_bytes", "header_crc32") for v in ("1", None)),
    *((name, value) for name in ("tensors", "files", "facts") for value in (1, [], "x", None)),
    ("files/0/ranks", []), ("files/0/ranks/0", [0, 2]), ("files/0/ranks/0", [1, 2]),
    ("files/0/private", []), ("files/0/private/0", [0, 2**62]), ("files/0/header_crc32", 1),
    ("world", 2), ("tensors/w/dtype", "float16"), ("tensors/w/shape", [20, 30]),
    ("tensors/w/shape", [31, 20]), ("tensors/w/shape", [2**40, 2**40]), ("tensors/w", None),
    ("tensors/v", {"dtype": "uint8", "shape": [3], "files": [0, 0]}),
    ("tensors/%private", {"dtype": "uint8", "shape": [0], "files": [0, 0]}),
]  # fmt: skip


@only_newest
@pytest.mark.parametrize(("where", "value"), SPOILT_NEWEST, ids=str)
def test_malicious_manifest_of_the_newest_version_raises(good, where, value):
    output = manifest_of(good)
    spoil(output, where, value)
    seal(good, output)
    refused(good)


@only_newest
@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("w", text) for text in ("", "float32", "float32 0,0", "float32 0,0 1 1")),
        ("w", "float32 0 1"),
        *(("w", f"float32 {offset} 1") for offset in ("1,0", "-1,0", "0,x", "0,0,0", "1e9,0")),
        *(("w", f"{dtype} 0,0 1") for dtype in ("float16", "int32", "object", "complex128")),
        *(("w", value) for value in (1, [], {}, None)),
        ("x", "float32 0,0 1"), ("%rank-0/w", "float32 0,0 1"), ("%rank-7/w", "float32 0,0 1"),
        ("%private", None), ("%private", "uint8 0 x"), ("%rank-1/%private", "uint8 0 1"),
        *((None, value) for value in (0, "text", [0, 48], [[1, 2]], None)),
    ],
    ids=str,
)  # fmt: skip
def test_malicious_list_of_parts_raises(good, name, text):
    header, data = header_of(good / FILE)
    if name is None:
        header["__metadata__"] = text
    else:
        spoil(header["__metadata__"], name.replace("/", "~"), text)
    header = json.loads(json.dumps(header).replace("~", "/"))
    whole = json.dumps(header).encode()
    with_header(good / FILE, whole, data)
    refused(good, "the crc32 of its header is wrong|is not a header")
    output = manifest_of(good)
    head = len(whole).to_bytes(8, "little") + whole
    spoil(output, "files/0/header_crc32", zlib.crc32(head))
    seal(good, output)
    refused(good)


@only_1
def test_tensor_larger_than_memory_raises_with_the_directory(good):
    output = manifest_of(good)
    rows = 1 << 32
    part = {"rank": 0, "offset": [0, 0], "shape": [rows, 1 << 9], "crc32": [0] * (1 << 19)}
    output["tensors"]["w"] = {"dtype": "uint8", "shape": [rows, 1 << 9], "parts": [part]}
    seal(good, output)
    refused(good)
