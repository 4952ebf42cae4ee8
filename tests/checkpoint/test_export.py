"""What is exported is read by others bit for bit, and what they write becomes a checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file

from hpctrain.checkpoint import store
from hpctrain.checkpoint.tools.compare import compare, newest_state
from hpctrain.checkpoint.tools.convert import import_state, read_foreign
from hpctrain.checkpoint.tools.export import export, kind_of, part_of
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.full_disk import largest_file

KINDS = ("pt", "safetensors", "dcp")
NAMES = {"pt": "state.pt", "safetensors": "state.safetensors", "dcp": "state"}


def trained(make=torch.optim.AdamW):
    """Return a model and an optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rates": [0.1, float("inf")],
        "half": torch.randn(5).bfloat16(),
        "name": "digits",
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def run(tmp_path):
    """Give a run directory with one checkpoint, and its state."""
    state = state_of(*trained())
    directory = tmp_path / "run" / "checkpoints" / "step-00000007"
    store.save(directory, state, SerialCommunicator(), step=7)
    return tmp_path / "run", state


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_goes_out_and_comes_back(run, tmp_path, kind):
    path, state = run
    out = tmp_path / "new" / NAMES[kind]
    export(newest_state(path)[1], out, kind_of(out))
    assert same(read_foreign(out), state)
    assert compare(path, out) == []
    assert [file.name for file in out.parent.iterdir()] == [out.name]

    back = tmp_path / "back" / "checkpoints" / "step-00000009"
    import_state(out, back, SerialCommunicator(), step=9, facts={"why": "test"})
    loaded = store.load(back, SerialCommunicator())
    assert same(loaded.state, state)
    assert (loaded.step, loaded.facts["why"]) == (9, "test")
    assert loaded.facts["imported_from"] == str(out)
    assert compare(path, back) == []


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_takes_its_state_back(tmp_path, kind, make):
    model, optimizer = trained(make)
    out = tmp_path / NAMES[kind]
    export(state_of(model, optimizer), out, kind)
    other = make(model.parameters(), lr=5.0)
    other.load_state_dict(read_foreign(out)["optimizer"])
    assert same(other.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_other_programs_read_the_weights_of_a_model(run, tmp_path, kind):
    path, state = run
    out = tmp_path / NAMES[kind]
    export(newest_state(path, "model")[1], out, kind)
    assert compare(path, out, ["model"]) == []
    if kind == "pt":
        found = torch.load(out, weights_only=True)
    elif kind == "safetensors":
        found = load_file(out)
    else:
        found = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
        torch_dcp.load(found, checkpoint_id=out, no_dist=True)
    assert same(found, state["model"])
    trained()[0].load_state_dict(found)
    num_bytes = sum(tensor.nbytes for tensor in state["model"].values())
    files = [out] if out.is_file() else list(out.iterdir())
    assert sum(file.stat().st_size for file in files) < num_bytes + 20_000


def test_weights_of_another_program_become_part_of_a_checkpoint(tmp_path):
    model, _ = trained()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    directory = tmp_path / "step-00000000"
    import_state(tmp_path / "w.safetensors", directory, SerialCommunicator(), under="model")
    assert same(store.load(directory, SerialCommunicator()).state, {"model": model.state_dict()})


def test_views_are_exported_without_what_they_are_views_of(tmp_path):
    whole = torch.arange(100_000.0)
    for kind in KINDS:
        out = tmp_path / NAMES[kind]
        export({"a": whole[3:5], "t": whole[:6].view(2, 3).T, "also": whole[3:5]}, out, kind)
        found = read_foreign(out)
        assert torch.equal(found["a"], whole[3:5])
        assert torch.equal(found["t"], whole[:6].view(2, 3).T)
        files = [out] if out.is_file() else list(out.iterdir())
        assert sum(file.stat().st_size for file in files) < 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_replaced_only_when_asked(tmp_path, kind):
    out = tmp_path / NAMES[kind]
    export({"a": torch.zeros(1)}, out, kind)
    with pytest.raises(CheckpointError, match="is there already"):
        export({"b": torch.zeros(1)}, out, kind)
    assert list(read_foreign(out)) == ["a"]
    export({"b": torch.zeros(1)}, out, kind, overwrite=True)
    assert list(read_foreign(out)) == ["b"]
    other = "pt" if kind == "dcp" else "dcp"
    with pytest.raises(CheckpointError, match="is not replaced by"):
        export({}, out, other, overwrite=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, kind):
    out = tmp_path / "new" / NAMES[kind]
    with (
        largest_file(100_000),
        pytest.raises(
            CheckpointError, match=r"cannot write .*state.*: File too large.*; make room"
        ),
    ):
        export({"a": torch.zeros(1_000_000)}, out, kind)
    assert list(out.parent.iterdir()) == []


def test_what_a_format_cannot_hold_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        export(
            {"a": torch.zeros(1).to(torch.complex128)}, tmp_path / "x.safetensors", "safetensors"
        )
    with pytest.raises(CheckpointError, match="cannot write"):
        export({"a": {"b": 1}, "a.b": 2}, tmp_path / "x", "dcp")
    with pytest.raises(CheckpointError, match=r"by --as or by the ending .pt, .safetensors"):
        kind_of(tmp_path / "x.onnx")
    with pytest.raises(CheckpointError, match="got 'zip'"):
        kind_of(tmp_path / "x.pt", "zip")
    assert kind_of(tmp_path / "x.onnx", "pt") == "pt"


def test_parts_are_named_by_path_and_what_there_is_is_listed():
    state = {"model": {"0.weight": 1, "a/b": 2}, "epoch": 3}
    assert part_of(state, "model/a%2Fb") == 2
    with pytest.raises(
        CheckpointError, match=r"there is no model/x in the state; .*: 0.weight, a"
    ):
        part_of(state, "model/x")
    with pytest.raises(CheckpointError, match="no names"):
        part_of(state, "epoch/x")


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_import_one_state_and_fail_together(world, tmp_path):
    comm = MpiCommunicator(world)
    root = world.bcast(tmp_path)
    model, optimizer = trained()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    if world.rank == 0:
        export(state, root / "state", "dcp")
    world.barrier()
    import_state(root / "state", root / "step-00000000", comm)
    assert same(store.load(root / "step-00000000", comm).state, state)
    with pytest.raises(CheckpointError, match="there is no"):
        import_state(root / "none.pt", root / "step-00000001", comm)
