"""What is exported is read by others bit for bit, and what they write becomes a checkpoint."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain import checkpoint
from hpctrain.checkpoint.tools.compare import compare, newest_state
from hpctrain.checkpoint.tools.convert import import_state, read_foreign
from hpctrain.checkpoint.tools.export import export, kind_of, part_of
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import same
from tests.full_disk import largest_file

ALONE = SerialCommunicator()
NAMES = {"pt": "state.pt", "safetensors": "state.safetensors", "dcp": "state"}
KINDS = pytest.mark.parametrize("kind", NAMES)
FILES = pytest.mark.parametrize("kind", ["pt", "safetensors"])


def trained(make=torch.optim.AdamW):
    """Return a model and an optimizer after a step, and the state of a run with them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rates": [0.1, float("inf"), (1, None, True)],
        "half": torch.randn(5).bfloat16(),
        "name": "digits",
    }
    return model, optimizer, state


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Give a run directory with one checkpoint, and its state."""
    state = trained()[2]
    path = tmp_path_factory.mktemp("run")
    checkpoint.save(path / "checkpoints" / "step-00000007", state, ALONE, step=7)
    return path, state


@FILES
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_whole_state_goes_out_and_comes_back(tmp_path, kind, make):
    model, optimizer, state = trained(make)
    out = tmp_path / "new" / NAMES[kind]
    export(state, out, kind_of(out))
    assert same(read_foreign(out), state)
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    other = make(model.parameters(), lr=5.0)
    other.load_state_dict(read_foreign(out)["optimizer"])
    assert same(other.state_dict(), optimizer.state_dict())

    back = tmp_path / "back" / "checkpoints" / "step-00000009"
    import_state(out, back, ALONE, step=9, facts={"why": "test"})
    loaded = checkpoint.load(back, ALONE)
    assert same(loaded.state, state)
    assert (loaded.step, loaded.facts) == (9, {"imported_from": str(out), "why": "test"})
    assert compare(out, back) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@KINDS
def test_other_programs_read_the_weights_of_a_model(run, tmp_path, kind):
    path, state = run
    out = tmp_path / NAMES[kind]
    export(newest_state(path, "model")[1], out, kind)
    if kind == "pt":
        found = torch.load(out, weights_only=True)
    elif kind == "safetensors":
        found = load_file(out)
    else:
        found = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
        torch_dcp.load(found, checkpoint_id=out, no_dist=True)
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state["model"].items())
    num_bytes = sum(tensor.nbytes for tensor in state["model"].values())
    files = [out] if out.is_file() else list(out.iterdir())
    assert sum(file.stat().st_size for file in files) < num_bytes + 20_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_of_an_optimizer_comes_back_through_torchs_own_converter(tmp_path):
    model, optimizer, state = trained()
    export(state, tmp_path / "state", "dcp")
    dcp_to_torch_save(tmp_path / "state", tmp_path / "state.pt")
    other = torch.optim.AdamW(model.parameters(), lr=5.0)
    other.load_state_dict(read_foreign(tmp_path / "state.pt")["optimizer"])
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_weights_of_another_program_become_part_of_a_checkpoint(tmp_path):
    model, *_ = trained()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    directory = tmp_path / "step-00000000"
    import_state(tmp_path / "w.safetensors", directory, ALONE, under="model")
    found = checkpoint.load(directory, ALONE).state["model"]
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@KINDS
def test_views_are_exported_without_what_they_are_views_of(tmp_path, kind):
    whole = torch.arange(100_000.0)
    out = tmp_path / NAMES[kind]
    state = {"a": whole[3:5], "t": whole[:6].view(2, 3).T, "also": whole[3:5]}
    export(state, out, kind)
    files = [out] if out.is_file() else list(out.iterdir())
    assert sum(file.stat().st_size for file in files) < 20_000
    if kind != "dcp":
        found = read_foreign(out)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@KINDS
def test_what_is_there_is_replaced_only_when_asked(tmp_path, kind):
    out = tmp_path / NAMES[kind]
    export({"a": torch.zeros(1)}, out, kind)
    before = [file.read_bytes() for file in ([out] if out.is_file() else sorted(out.iterdir()))]
    with pytest.raises(CheckpointError, match="is there already"):
        export({"b": torch.zeros(1)}, out, kind)
    export({"b": torch.zeros(1)}, out, kind, overwrite=True)
    after = [file.read_bytes() for file in ([out] if out.is_file() else sorted(out.iterdir()))]
    assert before != after
    other = "pt" if kind == "dcp" else "dcp"
    with pytest.raises(CheckpointError, match="is not replaced by"):
        export({}, out, other, overwrite=True)


@KINDS
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, kind):
    out = tmp_path / "new" / NAMES[kind]
    told = r"cannot write .*state.*: File too large.*; make room"
    with largest_file(100_000), pytest.raises(CheckpointError, match=told):
        export({"a": torch.zeros(1_000_000)}, out, kind)
    assert list(out.parent.iterdir()) == []


def test_what_a_format_cannot_hold_is_told(tmp_path):
    for value, kind in [
        ({"a": torch.zeros(1).to(torch.complex128)}, "safetensors"),
        ({"a": {"b": 1}, "a.b": 2}, "dcp"),
    ]:
        with pytest.raises(CheckpointError, match="cannot write"):
            export(value, tmp_path / "x", kind)
    with pytest.raises(CheckpointError, match=r"by --as or by the ending .pt, .safetensors"):
        kind_of(tmp_path / "x.onnx")
    with pytest.raises(CheckpointError, match="got 'zip'"):
        kind_of(tmp_path / "x.pt", "zip")
    assert kind_of(tmp_path / "x.onnx", "pt") == "pt"


def test_parts_are_named_by_path_and_what_there_is_is_listed():
    state = {"model": {"0.weight": 1, "a/b": 2}, "epoch": 3}
    assert part_of(state, "model/a%2Fb") == 2
    with pytest.raises(CheckpointError, match=r"no model/x in the state; .*: 0.weight, a"):
        part_of(state, "model/x")
    with pytest.raises(CheckpointError, match="no names"):
        part_of(state, "epoch/x")


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_import_one_state_and_fail_together(world, tmp_path):
    comm = MpiCommunicator(world)
    root = world.bcast(tmp_path)
    state = trained()[2]
    if world.rank == 0:
        export(state, root / "state.pt", "pt")
    world.barrier()
    import_state(root / "state.pt", root / "step-00000000", comm)
    assert same(checkpoint.load(root / "step-00000000", comm).state, state)
    with pytest.raises(CheckpointError, match="there is no"):
        import_state(root / "none.pt", root / "step-00000001", comm)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["pt", "index"])
def test_nothing_that_is_read_is_run(tmp_path, place):
    """An index of torch.distributed.checkpoint is not even opened."""
    evil, out = Evil(tmp_path / "was run"), tmp_path / "x"
    if place == "pt":
        torch.save({"a": evil}, out)
    else:
        out.mkdir()
        (out / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError, match=r"use another one|by python -m torch") as caught:
        read_foreign(out)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        compare(out, out)
    assert not evil.path.exists()


@FILES
def test_a_damaged_export_is_an_error_or_loads(tmp_path, kind):
    """Only the formats' own checks are there: what is read is a state, or an error."""
    out = tmp_path / NAMES[kind]
    export({"model": {"w": torch.zeros(50)}, "n": 1}, out, kind)
    good = out.read_bytes()
    for number in range(60):
        data = bytearray(good[: len(good) * number // 10] if number < 10 else good)
        if number >= 10:
            data[len(data) * number // 60] ^= 0x10
        out.write_bytes(data)
        try:
            read = read_foreign(out)
        except CheckpointError as error:
            read = {"error": str(error)}
        assert isinstance(read, dict)
        assert str(out) in read.get("error", str(out))


def test_what_is_no_state_is_told(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    save_file({"a": torch.zeros(1)}, tmp_path / "deep.safetensors", {"hpctrain.skeleton": deep})
    (tmp_path / "text.pt").write_text("what is this")
    torch.save([1], tmp_path / "list.pt")
    torch.save(tmp_path, tmp_path / "path.pt")
    for name, told in [
        ("x.safetensors", "there is no"),
        ("x.pt", "there is no"),
        ("", "is a directory; one of torch.distributed.checkpoint becomes a file by"),
        ("text.pt", "use another one"),
        ("list.pt", "holds a list"),
        ("path.pt", "more than tensors and plain values"),
        ("deep.safetensors", "damaged"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            read_foreign(tmp_path / name)
    torch.save(OrderedDict(a=torch.ones(1)), tmp_path / "ordered.pt")
    assert type(read_foreign(tmp_path / "ordered.pt")) is dict
