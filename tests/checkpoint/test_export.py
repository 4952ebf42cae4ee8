"""Check that other programs read exports bitwise, and that exports are complete or absent."""

import pytest
import torch
from safetensors.torch import load_file

from hpctrain import checkpoint
from hpctrain.checkpoint.export import export, newest_state, part_of
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import same
from tests.full_disk import largest_file

READERS = {
    "state.pt": lambda path: torch.load(path, weights_only=True),
    "state.safetensors": load_file,
}
FILES = pytest.mark.parametrize("name", READERS)


def trained(make=torch.optim.AdamW):
    """Return the state of a run with a model and an optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rates": [0.1, float("inf"), (1, None, True)],
        "half": torch.randn(5).bfloat16(),
    }


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_exported_state_is_loaded_by_torch(tmp_path, make):
    out = tmp_path / "new" / "state.pt"
    export(trained(make), out)
    assert same(READERS[out.name](out), trained(make))
    assert [file.name for file in out.parent.iterdir()] == [out.name]


@FILES
def test_other_programs_read_the_weights_of_a_model(tmp_path, name):
    state = trained()
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint.save(folder, state, SerialCommunicator(), step=7)
    source, model = newest_state(tmp_path / "run", "model")
    export(model, tmp_path / name)
    found = READERS[name](tmp_path / name)
    assert source == folder
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state["model"].items())
    num_bytes = sum(tensor.nbytes for tensor in state["model"].values())
    assert (tmp_path / name).stat().st_size < num_bytes + 20_000
    with pytest.raises(CheckpointError, match=r"must be a dict, but .* is a Tensor"):
        newest_state(tmp_path / "run", "half")


@FILES
def test_views_are_exported_without_their_base_tensor(tmp_path, name):
    whole = torch.arange(100_000.0)
    state = {"a": whole[3:5], "t": whole[:6].view(2, 3).T, "also": whole[3:5]}
    export(state, tmp_path / name)
    assert (tmp_path / name).stat().st_size < 20_000
    found = READERS[name](tmp_path / name)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@FILES
def test_existing_file_is_replaced_with_overwrite_only(tmp_path, name):
    out = tmp_path / name
    export({"a": torch.zeros(1)}, out)
    with pytest.raises(CheckpointError, match="already exists"):
        export({"b": torch.zeros(1)}, out)
    assert READERS[name](out).keys() == {"a"}
    export({"b": torch.zeros(1)}, out, overwrite=True)
    assert READERS[name](out).keys() == {"b"}
    out.unlink()
    out.mkdir()
    with pytest.raises(CheckpointError, match="must not be a directory, but"):
        export({}, out, overwrite=True)


@FILES
def test_full_disk_raises_and_leaves_no_file(tmp_path, name):
    out = tmp_path / "new" / name
    output = r"state.*: File too large; raise the limit of file sizes"
    with largest_file(100_000), pytest.raises(CheckpointError, match=output):
        export({"a": torch.zeros(1_000_000)}, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "state", "output"),
    [
        ("x.safetensors", {"a": torch.zeros(1).to(torch.complex128)}, "cannot be written"),
        (
            "x.safetensors",
            {"model": {}, "n": 1},
            "model, n of the state are no tensors; choose",
        ),
        ("x.onnx", {}, r"must end in .pt, .pth, .safetensors, got 'x.onnx'"),
        ("x", {}, "got 'x'"),
    ],
)
def test_values_unsupported_by_a_format_raise(tmp_path, name, state, output):
    with pytest.raises(CheckpointError, match=output):
        export(state, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_parts_are_selected_by_path_and_errors_list_the_names():
    state = {"model": {"0.weight": 1, "a/b": 2}, "epoch": 3}
    assert part_of(state, "model/a%2Fb") == 2
    with pytest.raises(CheckpointError, match=r"no model/x; .* of 0.weight, a"):
        part_of(state, "model/x")
    with pytest.raises(CheckpointError, match="no names"):
        part_of(state, "epoch/x")
