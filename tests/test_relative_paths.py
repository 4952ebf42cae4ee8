"""Check that relative paths keep their meaning when the program changes its directory.

Every public function with a path has a case: it is called with a relative path, the directory is
changed, the result is used, and all files are in the directory of the call.
"""

import inspect
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain import checkpoint, cost, data, parallel
from hpctrain.core.config import Settings
from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.runtime.function_job import Job
from hpctrain.runtime.world import current
from tests.test_public_api import PACKAGES

NO_FILES = {
    "ShardedEmbedding.wanted(path)",  # path of a tensor in a checkpoint
    "checkpoint.Manager(files)",  # "node" or "rank"
    "checkpoint.save(files)",
}
NAMELESS = {"parallel.shard(offload)"}
"""Takes a folder; neither its name nor its annotation says so."""

CASES = {}


def case(*names):
    def add(function):
        CASES.update(dict.fromkeys(names, function))
        return function

    return add


def parameters_with_paths():
    found = set(NAMELESS)
    for package in (hpctrain, *PACKAGES):
        prefix = package.__name__.removeprefix("hpctrain").lstrip(".")
        prefix = f"{prefix}." if prefix else ""
        for name in package.__all__:
            value = getattr(package, name)
            members = [(f"{prefix}{name}", value)]
            if inspect.isclass(value):
                public = inspect.getmembers(value, callable)
                members += [(f"{prefix}{name}.{n}", m) for n, m in public if n[0] != "_"]
            for called, member in members if callable(value) else ():
                found.update(f"{called}({p})" for p in _paths_of(member))
    variables = inspect.get_annotations(Settings).items()
    found.update(f"HPCTRAIN_{n.upper()}" for n, a in variables if "Path" in str(a))
    return found - NO_FILES


def _paths_of(value):
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    named = re.compile("path|folder|director|file|(^|_)dir(_|$)")
    return [p.name for p in parameters if "Path" in str(p.annotation) or named.search(p.name)]


def test_every_public_path_has_a_case():
    assert parameters_with_paths() == set(CASES)


@case("checkpoint.Manager(directory)")
def _(comm):
    manager = checkpoint.Manager("made", comm, every=1, keep=2)
    manager.save({"t": torch.ones(3)}, 1)
    yield
    manager.save({"t": torch.ones(3)}, 2)
    manager.wait()
    assert manager.load_latest().step == 2
    manager.close()


@case("checkpoint.save(directory)", "checkpoint.load(directory)")
def _(comm):
    checkpoint.save("made", {"t": torch.ones(3)}, comm, step=1, private={"r": comm.rank})
    loaded = checkpoint.load("made", comm)
    yield
    assert loaded.private[(comm.rank + 1) % comm.size] == {"r": (comm.rank + 1) % comm.size}


@case("data.ShardWriter(directory)")
def _(comm):
    writer = data.ShardWriter("made", {"x": ((), "f4")}, samples_per_shard=2, comm=comm)
    yield
    with writer:
        writer.append({"x": np.ones(5, "f4")})


@case("data.write_arrays(directory)")
def _(comm):
    _write(comm)
    yield


@case("data.ShardedDataset(path)")
def _(comm):
    _write(comm)
    dataset = data.ShardedDataset("made")
    yield
    assert dataset[3]["x"] == 1.0


@case("data.ShardedDataset.open(path)")
def _(comm):
    _write(comm)
    dataset = data.ShardedDataset.open("made", comm)
    yield
    loader = data.Loader(dataset, global_batch=comm.size, comm=comm, workers=1)
    assert sum(batch.num_samples for batch in loader) > 0


@case("data.stage(to)")
def _(comm):
    _write(comm, "source")
    staged = data.stage(data.ShardedDataset.open("source", comm), comm, "made")
    yield
    assert staged[3]["x"] == 1.0
    comm.barrier()


@case("data.Split.write(path)", "data.Split.read(path)", "data.Loader(split)")
def _(comm):
    _write(comm)
    dataset = data.ShardedDataset.open("made", comm)
    split = data.Split(dataset.uuid, np.arange(len(dataset), dtype="u4") % 3, 3)
    if comm.rank == 0:
        split.write("split")
    comm.barrier()
    assert data.Split.read("split").num_parts == 3
    order = {"global_batch": comm.size, "order": "sequential"}
    loader = data.Loader(dataset, split="split", comm=comm, **order)
    yield
    assert sum(batch.num_samples for batch in loader) > 0


@case("cost.Machine.read(path)")
def _(comm):
    if comm.rank == 0:
        Path("made").write_text("nodes = 4\n")
    comm.barrier()
    machine = cost.Machine.read("made")
    yield
    assert machine.nodes == 4


@case("start_timeline(file_path)")
def _(comm):
    hpctrain.start_timeline("made-{rank}")
    hpctrain.start_timeline("made-{rank}")
    yield
    hpctrain.allreduce(torch.ones(2), name="x")
    hpctrain.stop_timeline()
    comm.barrier()
    if comm.rank == 0:
        Path("../first/made-0").rename("../first/made")


@case("ShardedEmbedding(path)")
def _(comm):
    if comm.rank == 0:
        Path("made").mkdir()
    comm.barrier()
    table = hpctrain.ShardedEmbedding(50, 4, path="made")
    yield
    assert table(torch.tensor([1, 2])).shape == (2, 4)


@case("Resources(folder)", "Job(folder)")
def _(comm):
    if comm.rank == 0:
        job = hpctrain.submit(print, hpctrain.Resources(folder="made"))
        assert repr(Job(7, Path("made"), 1)) == repr(job)
    yield
    if comm.rank == 0:
        (job.folder / "slurm-7.out").write_text("message")
        assert job.stdout() == "message"


@case("parallel.shard(offload)")
def _(comm):
    if comm.rank == 0:
        Path("made").mkdir()
    comm.barrier()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = parallel.shard(model, optimizer, stage=3, offload="made")
    yield
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@case(*(f"HPCTRAIN_{name}" for name in ("PLAN", "LOG_DIR", "RECORDS", "STAGE_DIR", "TIMELINE")))
def _(comm):
    """See ``tests/core/test_paths.py``."""
    if comm.rank == 0:
        Path("made").touch()
    yield


def _write(comm, name="made"):
    if comm.rank == 0:
        data.write_arrays(name, {"x": np.ones(9, "f4")}, samples_per_shard=4)
    comm.barrier()


@pytest.fixture
def comm(world):  # noqa: ARG001 - all ranks have it
    hpctrain.init()
    yield current().comm
    hpctrain.shutdown()


SBATCH = "#!/bin/sh\necho 7\n"


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", {function: name for name, function in CASES.items()}.values())
def test_files_stay_where_the_call_was(comm, tmp_path, monkeypatch, name):
    root = comm.broadcast_object(tmp_path)
    first, second = root / "first", root / "second"
    if comm.rank == 0:
        first.mkdir()
        second.mkdir()
        (root / "sbatch").write_text(SBATCH)
        (root / "sbatch").chmod(0o755)
    comm.barrier()
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    monkeypatch.chdir(first)
    steps = CASES[name](comm)
    next(steps)
    os.chdir(second)
    assert list(steps) == []
    comm.barrier()
    assert list(second.iterdir()) == []
    assert (first / "made").exists()


def _save(comm):
    checkpoint.save("made", {"t": torch.ones(3)}, comm, step=1)


def _save_by_manager(comm):
    manager = checkpoint.Manager("made", comm)
    manager.save({"t": torch.ones(3)}, 1)
    manager.close()


def _write_shards(comm):
    fields = {"x": ((), "f4")}
    with data.ShardWriter("made", fields, samples_per_shard=2, comm=comm) as writer:
        writer.append({"x": np.ones(2, "f4")})


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("write", [_save, _save_by_manager, _write_shards])
def test_ranks_in_different_directories_raise_before_writing(comm, tmp_path, monkeypatch, write):
    root = comm.broadcast_object(tmp_path)
    here = root / ("first" if comm.rank == 0 else "second")
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    with pytest.raises((CheckpointError, DataError), match="second/made"):
        write(comm)
    comm.barrier()
    assert [*root.glob("second/*"), *root.glob("first/made/manifest.json")] == []
