"""Check the memory that a node stores once with ``shard="node"``, master parameters included."""

import copy
import gc
import io
import os
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.hooks import warn_if_has_hooks

from hpctrain.core.errors import ConfigError
from hpctrain.optim import LAMB
from tests.gradients.test_sharded_step import (
    MANY,
    assert_one_model,
    assert_same_bits,
    backward,
    halve,
    make_model,
    train,
    wrapped,
)
from tests.gradients.training import EVERY_SIZE

pytestmark = pytest.mark.requires("own-engine")

KINDS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "fused": True},
    torch.optim.Adagrad: {"lr": 0.01},
    torch.optim.Adafactor: {"lr": 0.1},
}


class Oracle:
    """Step master parameters in one process with torch, on the gradients of all ranks."""

    def __init__(self, hvd, kind, dtype):
        self.hvd, self.model = hvd, make_model(dtype)
        self.trained = [p for n, p in self.model.named_parameters() if n != "unused"]
        self.masters = [p.detach().float() for p in self.trained]
        self.optimizer = kind(self.masters, **KINDS[kind])

    def step(self, number):
        grads = []
        for rank in range(self.hvd.size()):
            self.model.zero_grad()
            backward(self.hvd, self.model, number, rank)
            grads.append([p.grad.float() for p in self.trained])
        for master, own in zip(self.masters, zip(*grads, strict=True), strict=True):
            master.grad = sum(own[1:], own[0]) * (1.0 / self.hvd.size())
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.trained, self.masters, strict=True):
                p.copy_(master)

    def assert_equals(self, model, optimizer):
        assert_same_bits(self.model, model)
        trained = [p for n, p in model.named_parameters() if n != "unused"]
        for p, master in zip(trained, self.masters, strict=True):
            entry = dict(optimizer.state[p])
            assert_same_bits(entry.pop("master"), master)
            assert_same_bits(entry, dict(self.optimizer.state[master]))


def with_masters(hvd, kind, dtype=torch.bfloat16):
    options = {"shard": "node", "master_dtype": torch.float32}
    return wrapped(hvd, kind, dtype, KINDS[kind], **options)


def step(hvd, model, optimizer, number):
    optimizer.zero_grad()
    backward(hvd, model, number)
    optimizer.step()


@EVERY_SIZE
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_masters_take_the_steps_of_32_bits_and_are_rounded_once(hvd):
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16):
            oracle, (model, optimizer) = Oracle(hvd, kind, dtype), with_masters(hvd, kind, dtype)
            for number in range(4):
                oracle.step(number)
                step(hvd, model, optimizer, number)
                oracle.assert_equals(model, optimizer)


@EVERY_SIZE
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_masters_resume_from_a_file_with_the_same_bits(hvd, world):
    for kind in KINDS:
        model, optimizer = with_masters(hvd, kind)
        for number in range(2):
            step(hvd, model, optimizer, number)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        resumed, other = with_masters(hvd, kind)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        assert_same_bits(saved["optimizer"], other.state_dict())
        for number in range(2, 4):
            for one in ((model, optimizer), (resumed, other)):
                step(hvd, *one, number)
        assert_same_bits(model, resumed)
        assert_same_bits(optimizer.state_dict(), other.state_dict())
        assert_one_model(world, model)


@EVERY_SIZE
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_masters_follow_writes_to_parameters(hvd):
    model, optimizer = with_masters(hvd, torch.optim.SGD)
    step(hvd, model, optimizer, 0)
    kept = optimizer.state[model[0].weight]["master"].clone()
    with torch.no_grad():
        model[0].weight[3] = 2.0
    optimizer.zero_grad()
    (model[0].weight.sum() * 0.0).backward()
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    kept[3] = 2.0
    assert_same_bits(optimizer.state[model[0].weight]["master"], kept)


@EVERY_SIZE
@pytest.mark.parametrize("per_node", [None], indirect=True)
def test_state_without_masters_resumes_with_masters_of_its_parameters(hvd):
    plain_model, plain = wrapped(hvd, torch.optim.AdamW, torch.bfloat16, {"lr": 0.01})
    step(hvd, plain_model, plain, 0)
    model, optimizer = with_masters(hvd, torch.optim.AdamW)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    step(hvd, model, optimizer, 1)
    entry = optimizer.state[model[0].weight]
    assert {v.dtype for v in entry.values()} == {torch.float32}
    assert torch.equal(entry["master"].to(torch.bfloat16), model[0].weight)


@EVERY_SIZE
def test_unsupported_master_dtypes_are_rejected(hvd):
    for options in (
        {"master_dtype": torch.float32},
        {"master_dtype": torch.bfloat16, "shard": "node"},
    ):
        with pytest.raises(ConfigError, match=r"master_dtype must be (used|torch)"):
            wrapped(hvd, torch.optim.SGD, torch.bfloat16, **options)


# Memory


def bytes_of_tensors(world):
    """Return the bytes of memory of the live tensors of all ranks of the node."""
    gc.collect()
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, device, inode = line.split()[:5]
        first, end = (int(one, 16) for one in bounds.split("-"))
        memory = (device, inode) if inode != "0" else (world.rank, "")
        maps.append((first, end, memory, int(offset, 16) if inode != "0" else first))
    used = defaultdict(list)
    tensors = [one for one in gc.get_objects() if type(one) in {torch.Tensor, nn.Parameter}]
    storages = [t.untyped_storage() for t in tensors if t.is_cpu and t.layout is torch.strided]
    for at, numel in {(s.data_ptr(), s.nbytes()) for s in storages}:
        for first, end, memory, offset in maps:
            low, high = max(first, at), min(end, at + numel)
            if low < high:
                used[memory].append((low - first + offset, high - first + offset))
    every = defaultdict(list)
    for one in world.allgather(dict(used)):
        for memory, ranges in one.items():
            every[memory] += ranges
    return sum(map(length_of_union, every.values()))


def length_of_union(ranges):
    total = end = 0
    for low, high in sorted(ranges):
        total += max(high - max(low, end), 0)
        end = max(end, high)
    return total


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("per_node", [None], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_node_stores_parameters_and_state_once_and_gradients_per_rank(hvd, world, dtype):
    before = bytes_of_tensors(world)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(5))).to(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    master_dtype = torch.float32 if dtype is torch.bfloat16 else None
    optimizer = hvd.DistributedOptimizer(optimizer, shard="node", master_dtype=master_dtype)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 1024, dtype=dtype)).square().mean().backward()
        optimizer.step()
    own = sum(p.nbytes for p in model.parameters())
    state = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values())
    assert state >= 2 * own
    due = own + state + hvd.size() * own
    found = bytes_of_tensors(world) - before
    assert due <= found < 1.05 * due


def child_of(model, before, wait):
    """Fork a child that waits, compares the model with ``before`` and sets it to zeros."""
    if (child := os.fork()) == 0:
        wait()
        with torch.no_grad():
            fault = not all(torch.equal(before[n], p) for n, p in model.named_parameters())
            for p in model.parameters():
                p.zero_()
        os._exit(fault)
    return child


@MANY
def test_copies_and_children_are_private(hvd, world):
    model, optimizer = train(hvd, 1, shard="node")
    copied = copy.deepcopy(model)
    reading, writing = os.pipe()
    halve(model)  # a change that no step has used yet
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    later = [child_of(model, before, lambda: os.read(reading, 1)) for _ in range(2)]
    assert os.waitpid(child_of(model, before, lambda: None), 0)[1] == 0
    world.barrier()
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    world.barrier()
    assert_same_bits(before, dict(model.named_parameters()))
    for step in range(2):
        optimizer.zero_grad()
        backward(hvd, model, step)
        optimizer.step()
    assert_one_model(world, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in model.parameters():  # when it is sent to a restarted worker
            warn_if_has_hooks(p)
    world.barrier()
    os.write(writing, b"12")
    os.close(writing)
    os.close(reading)
    assert [os.waitpid(child, 0)[1] for child in later] == [0, 0]


@MANY
@pytest.mark.parametrize("per_node", [2], indirect=True)
def test_parameters_without_elements_have_the_same_state_as_unsharded(hvd):
    kinds = KINDS | {LAMB: {"lr": 0.1}}
    del kinds[torch.optim.Adafactor]  # Adafactor divides by the number of elements
    for kind, settings in kinds.items():
        found = []
        for shard in (None, "node"):
            model = make_model()
            model.empty, model.more = (nn.Parameter(torch.ones(0, n)) for n in (1, 3))
            optimizer = hvd.DistributedOptimizer(kind(model.parameters(), **settings), shard=shard)
            for number in range(2):
                optimizer.zero_grad()
                model.empty.sum().backward()
                backward(hvd, model, number)
                optimizer.clip_grad_norm_(1e9, float("inf") if shard else 2.0)  # as torch can
                optimizer.step()
            found.append((model, optimizer.state_dict()))
        for ordinary, sharded in zip(*found, strict=True):
            assert_same_bits(ordinary, sharded)
