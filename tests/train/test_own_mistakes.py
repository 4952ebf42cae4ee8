"""Mistakes in the user's model, loss and data are found by a dry run and reported in few lines."""

import sys

import pytest

import hpctrain
from hpctrain.core.errors import HpctrainError
from hpctrain.core.logs import file_in
from hpctrain.core.user_error import MAX_LINES, folded
from hpctrain.launch import mpiexec
from hpctrain.train.load_config import load
from hpctrain.train.run import RunOptions, run
from tests.processes import ended
from tests.train.starting import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.limit(180)]

MINE = """\
import numpy, torch
from torch import nn
from torch.nn import functional
from hpctrain.data import ShardedDataset, write_arrays

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, :1]

class Net(nn.Module):
    def __init__(self, features, classes, fault):
        super().__init__()
        self.fault, self.linear = fault, nn.Linear(features, classes)

    def forward(self, x):
        if self.fault == "memory":
            return torch.empty(1 << 50)
        out = self.linear(x)
        out = {"backward": Halved.apply, "detached": torch.Tensor.detach}.get(
            self.fault, torch.Tensor.contiguous)(out)
        return (out, x) if self.fault == "tuple" else out

def model(features=6, classes=3, fault=""):
    if fault == "made":
        raise KeyError("width")
    return Net(features, classes, fault)

def data(comm, folder, fault=""):
    if fault == "away":
        raise OSError("the disk is away")
    draw = numpy.random.default_rng(0)
    x = draw.normal(size=(32, 6)).astype("float64" if fault == "double" else "float32")
    y = draw.integers(0, 3, 32).astype("int32" if fault == "label" else "int64")
    if fault == "gap":
        x[:] = numpy.nan
    if comm.rank == 0:
        for part in ("train", "test"):
            write_arrays(f"{folder}/{part}", {"x": x, "y": y}, samples_per_shard=16)
    comm.barrier()
    return tuple(ShardedDataset.open(f"{folder}/{part}", comm) for part in ("train", "test"))

def each_loss(output, label):
    return functional.cross_entropy(output, label, reduction="none")

def sizes(comm, folder):
    train, _ = data(comm, folder)
    if comm.rank == 0:
        fields = {"x": numpy.ones((32, 7), "f4"), "y": numpy.arange(32) % 3}
        write_arrays(f"{folder}/wide", fields, samples_per_shard=16)
    comm.barrier()
    return train, ShardedDataset.open(f"{folder}/wide", comm)

def numbers(comm, folder):
    if comm.rank == 0:
        fields = {"x": numpy.ones((32, 6), "f4"), "y": numpy.ones((32, 3))}
        for part in ("train", "test"):
            write_arrays(f"{folder}/{part}", fields, samples_per_shard=16)
    comm.barrier()
    return tuple(ShardedDataset.open(f"{folder}/{part}", comm) for part in ("train", "test"))

def plain(comm, folder):
    data = torch.utils.data.TensorDataset(torch.ones(32, 6))
    return data, torch.utils.data.Subset(data, [1, 2])

def crop(fields):
    return {"x": fields["z"], "y": fields["y"]}

def nothing(fields):
    pass

def one_label(fields):
    return {"x": fields["x"], "y": fields["y"][0]}

def arrays(fields):
    return {name: values.numpy() for name, values in fields.items()}

def layers():
    return torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(5, 3)))

def indexed(output, label):
    return output.gather(1, label)

def averaged(output, label):
    return float((output.argmax(1) == label).float().mean())
"""

CONFIG = """\
name = "mine"
[model]
target = "mine:model"
[data]
target = "mine:data"
[optimizer]
name = "SGD"
lr = 0.1
[train]
epochs = 1
global_batch = 16
[log]
plots = false
"""

MODEL = 'model.target = "mine:model" refuses'
LOSS = 'loss.target = "cross_entropy" refuses'
FORWARD = "in forward: out = self.linear(x)"
MISTAKES = {
    "number of classes": (
        "model.args.classes=2",
        "IndexError: Target 2",
        f"{LOSS} float32 (16, 2)",
    ),
    "a tuple": ("model.args.fault=tuple", f"{LOSS} a tuple of float32 (16, 3), float32 (16, 6)"),
    "no scalar": (
        "loss.target=mine:each_loss",
        "must return one number",
        "but returned float32 (16,) for the output float32",
    ),
    "double": (
        "data.args.fault=double",
        "Double",
        f"{MODEL} float64 (16, 6)",
        "pack the data again with --field NAME=WHAT:f4",
        FORWARD,
    ),
    "field": ("data.input=z", 'data.input must be a field of the data, x, y, got "z"'),
    "label": ("data.args.fault=label", f"{LOSS} float32 (16, 3) and int32 (16,)", "WHAT:i8"),
    "shapes": (
        "model.args.features=5",
        "16x6 and 5x3",
        f"{MODEL} float32 (16, 6)",
        "in layer linear, Linear(in_features=5, out_features=3, bias=True)",
        FORWARD,
    ),
    "shapes of layers": (
        "model.target=mine:layers",
        "in layer 1.0, Linear(in_features=5, out_features=3, bias=True)",
    ),
    "typo": ("model.target=mine:modle", "mine has no modle; did you mean model?"),
    "import": ("model.target=broken:model", 'model.target = "broken:model"', "no_such_package"),
    "transform": (
        "data.transform=mine:crop",
        "KeyError",
        "in crop:",
        'data.transform = "mine:crop" was given x float32 (16, 6), y int64 (16,)',
    ),
    "transform of a sample": (
        "data.transform=mine:nothing data.per_sample=true",
        'data.transform = "mine:nothing" returned NoneType',
    ),
    "transform of a batch": ("data.transform=mine:one_label", "x float32 (16, 6), y int64 ()"),
    "transform to arrays": (
        "data.transform=mine:arrays",
        "every sample as tensors",
        "x numpy float32",
    ),
    "transform of a test": (
        "data.test_transform=mine:nothing",
        'NoneType of data.test_transform = "mine:nothing"',
    ),
    "metric": (
        "test.metric=mine:indexed",
        "in indexed:",
        'test.metric = "mine:indexed" was given float32 (16, 3) and int64 (16,)',
    ),
    "mean in a metric": ("test.metric=mine:averaged", "each of 16 samples, got a float"),
    "backward": (
        "model.args.fault=backward",
        "got [16, 1]",
        'the step of model.target = "mine:model" and loss',
        "was given float32 (16, 6) and int64 (16,)",
    ),
    "detached": ("model.args.fault=detached", "check for detach()", "mine:model"),
    "making the model": ("model.args.fault=made", 'model.target = "mine:model"', "in model:"),
    "opening the data": ("data.args.fault=away", 'data.target = "mine:data"', "in data:"),
    "plain data": (
        "data.target=mine:plain",
        "ShardedDataset.open",
        "returned a tuple of a TensorDataset of 32 samples, a Subset of 2 samples",
    ),
    "nan": ("data.args.fault=gap", "must be finite", "step 1"),
    "memory": (
        "model.args.fault=memory",
        "memory",
        'model.target = "mine:model" was given float32 (16, 6)',
        "in forward: return torch.empty(1 << 50)",
    ),
    "optimizer": (
        'optimizer.groups=[{ match = "*", weight_decay = "x" }]',
        "TypeError",
        'optimizer.name = "SGD"',
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    sys.modules.pop("mine", None)  # imported by an earlier test
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "mine.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_reports_each_mistake_with_target_and_shapes(folder, monkeypatch):
    """Runs in this process, because one rank is enough."""
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    wrong = {}
    try:
        for number, (name, (override, *words)) in enumerate(MISTAKES.items()):
            overrides = [
                *override.replace(" data.", "\ndata.").splitlines(),
                f"data.args.folder={folder}/{number}",
            ]
            text = "nothing"
            try:
                run(load(folder / "mine.toml", overrides), {}, RunOptions(dry_run=True))
            except HpctrainError as error:
                text = str(error)
            except Exception as error:
                text = folded(error, None)
            is_reported = all(word in text for word in words)
            if not is_reported or len(text.splitlines()) > MAX_LINES:
                wrong[name] = text
        assert wrong == {}
        assert len(MISTAKES) >= 12
        good = load(folder / "mine.toml", [f"data.args.folder={folder}/good"])
        assert run(good, {}, RunOptions(dry_run=True)) == 0
        assert not (folder / "runs").exists()
    finally:
        hpctrain.shutdown()
        for module in ("mine", "broken"):
            sys.modules.pop(module, None)


def test_two_ranks_report_an_error_once_and_the_log_has_the_traceback(folder):
    words = ["--set=model.args.fault=memory", f"--set=data.args.folder={folder}/d"]
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--"]
    done = ended(
        [*line, "hpctrain", "train", "mine.toml", *words],
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)},
    )
    output = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert output[0] == "[rank 0] mine.py:22 in forward: return torch.empty(1 << 50)", done.stderr
    assert len(output) <= MAX_LINES, done.stderr
    assert 'model.target = "mine:model" was given float32 (8, 6)' in done.stderr
    log = file_in(folder / "runs/mine/log", 0)
    assert output[-1] == f"[rank 0] the whole traceback: {log.relative_to(folder)}"
    whole = log.read_text()
    assert "Traceback (most recent call last)" in whole
    assert "/cli/main.py" in whole
    assert "\0" not in done.stderr


@pytest.mark.conformance
def test_a_mismatch_is_one_error_of_all_ranks_wherever_it_occurs(folder):
    """In micro-shards, in the backward of the loss, and in the test."""
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--"]
    reproducible, backward = "train.reproducible=true", "data.target=mine:numbers"
    loss = [backward, "loss.target=huber_loss"]
    refused = 'loss.target = "huber_loss" refuses float32'
    cases = {
        "backward": (loss, refused, "Double but expected Float"),
        "backward of a micro-shard": ([*loss, reproducible], refused, "Double"),
        "test": (["data.target=mine:sizes"], MODEL, "8x7 and 6x3"),
    }
    for number, (name, (overrides, *words)) in enumerate(cases.items()):
        sets = [*overrides, f"data.args.folder={folder}/{number}", f"output_dir=runs/{number}"]
        done = ended(
            [*line, "hpctrain", "train", "mine.toml", *(f"--set={one}" for one in sets)],
            env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        message = done.stderr
        assert done.returncode == 2, (name, message)
        assert all(word in message for word in words), (name, message)
        assert "Traceback" not in message, (name, message)
        assert message.count("refuses") == 1, (name, message)
