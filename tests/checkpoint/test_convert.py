"""What others wrote is read, or told in one line; nothing of it is run."""

import importlib
import os
import pickle
import shutil
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

from hpctrain.checkpoint.tools.convert import read_foreign
from hpctrain.checkpoint.tools.export import export
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.test_export import KINDS, NAMES


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["pt", "index", "value"])
def test_nothing_that_is_read_is_run(tmp_path, place):
    evil = Evil(tmp_path / "was run")
    out = tmp_path / ("x.pt" if place == "pt" else "x")
    if place == "pt":
        torch.save({"a": evil}, out)
    elif place == "index":
        out.mkdir()
        (out / ".metadata").write_bytes(pickle.dumps(evil))
    else:
        torch_dcp.save({"a": evil, "b": torch.zeros(1)}, checkpoint_id=out, no_dist=True)
    with pytest.raises(CheckpointError, match="use another one") as caught:
        read_foreign(out)
    assert "\n" not in str(caught.value)
    assert not evil.path.exists()


def damage_at(path, part):
    data = bytearray(path.read_bytes())
    data[int(len(data) * part)] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_export_is_an_error_or_loads(tmp_path, kind):
    """Only DCP's and torch's own checks are there: what is read is a state, or an error."""
    good = tmp_path / "good" / NAMES[kind]
    export({"model": {"w": torch.zeros(50)}, "n": 1}, good, kind)
    for number in range(60):
        out = tmp_path / f"{number}" / NAMES[kind]
        shutil.copytree(good.parent, out.parent)
        target = out if kind != "dcp" else out / (".metadata" if number % 2 else "__0_0.distcp")
        if number < 10:
            os.truncate(target, target.stat().st_size * number // 10)
        else:
            damage_at(target, number / 60)
        try:
            read = read_foreign(out)
        except CheckpointError as error:
            read = {"error": str(error)}
        assert isinstance(read, dict)
        assert str(out) in read.get("error", str(out))


def rewritten(out, change):
    index = pickle.loads((out / ".metadata").read_bytes())
    change(index)
    (out / ".metadata").write_bytes(pickle.dumps(index))


def lead_out(index):
    for place in index.storage_data.values():
        place.relative_path = "../secret"


def grow(index):
    index.state_dict_metadata["w"].size = torch.Size([1 << 40])


def grow_with_parts(index):
    grow(index)
    index.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1 << 40])


def forget(index):
    index.storage_data.clear()


@pytest.mark.parametrize("change", [lead_out, grow, grow_with_parts, forget])
def test_a_hostile_index_of_dcp_is_an_error(tmp_path, change):
    out = tmp_path / "x"
    export({"w": torch.zeros(4)}, out, "dcp")
    shutil.copy(out / "__0_0.distcp", tmp_path / "secret")
    rewritten(out, change)
    with pytest.raises(CheckpointError, match="use another"):
        read_foreign(out)


def test_an_index_of_dcp_calls_nothing(tmp_path):
    out = tmp_path / "x"
    export({"w": torch.zeros(4)}, out, "dcp")
    here = b"torch.distributed.checkpoint.metadata"
    call = b"cbuiltins\ngetattr\n(c" + here + b"\nMetadata\nV__init__\ntR."
    (out / ".metadata").write_bytes(call)
    with pytest.raises(CheckpointError, match="use another"):
        read_foreign(out)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("builtins", "getattr"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
    ],
)
def test_an_index_of_dcp_changes_no_class_and_no_function(tmp_path, module, name):
    out = tmp_path / "x"
    export({"w": torch.zeros(4)}, out, "dcp")
    good = (out / ".metadata").read_bytes()
    named = f"c{module}\n{name}\n".encode()
    real = getattr(importlib.import_module(module), name)
    for state in (b"N}(Vmark\nI1\nu\x86", b"}(Vmark\nI1\nu"):  # by setattr, and by __dict__
        (out / ".metadata").write_bytes(named + state + b"b0" + good)
        try:
            with pytest.raises(CheckpointError, match="use another"):
                read_foreign(out)
            assert not hasattr(real, "mark")
        finally:
            with suppress(AttributeError, TypeError):
                del real.mark


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_no_file_of_dcp_leads_out_of_its_directory(tmp_path, name):
    out = tmp_path / "x"
    export({"w": torch.zeros(4)}, out, "dcp")
    (out / name).rename(tmp_path / "secret")
    (out / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="use another"):
        read_foreign(out)


def test_what_is_no_state_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="there is no"):
        read_foreign(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no .metadata"):
        read_foreign(tmp_path)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_foreign(tmp_path / "list.pt")
    deep = "[" * 100_000 + "]" * 100_000
    save_file({"a": torch.zeros(1)}, tmp_path / "deep.safetensors", {"hpctrain.skeleton": deep})
    with pytest.raises(CheckpointError, match="damaged"):
        read_foreign(tmp_path / "deep.safetensors")
    torch.save(OrderedDict(a=torch.ones(1)), tmp_path / "ordered.pt")
    assert type(read_foreign(tmp_path / "ordered.pt")) is dict
