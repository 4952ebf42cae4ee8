"""Check that random saves, loads, failures and restarts leave the state of a plain model."""

import random
import shutil
from dataclasses import dataclass, field

import pytest
import torch

from hpctrain.checkpoint.manager import Manager
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import steps_in
from tests.checkpoint.states import same
from tests.full_disk import largest_file

KEEP = 2
SHAPES = [(), (0, 2), (3,), (200,), (40, 5), (1, 90)]
DTYPES = [torch.float64, torch.float32, torch.int64, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Split small tensors, so that each rank writes a part."""
    monkeypatch.setattr("hpctrain.checkpoint.saving.WHOLE_BYTES", 64)


def drawn(draw):
    """Return a state with few names, whose shapes and dtypes differ between calls."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    state = {"number": draw.random()}
    for name in draw.sample("abcd", draw.randint(1, 4)):
        shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
        state[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return state


class Guard:
    """Interrupt a save before it writes, before the rename, or before the pruning."""

    def __init__(self):
        self.calls_left = 1 << 30

    def __call__(self):
        self.calls_left -= 1
        if self.calls_left < 0:
            self.calls_left = 1 << 30
            raise CheckpointError("interrupted")


@dataclass
class Model:
    """Model a manager in memory and without other ranks."""

    on_disk: dict = field(default_factory=dict)
    step: int | None = None  # step of the last save or load
    has_failed: bool = False  # the last save failed, and the error has not been raised yet

    def output(self):
        """Return True, once, if the last save failed: the next call must raise its error."""
        failed, self.has_failed = self.has_failed, False
        if failed:
            self.step = None
        return failed

    def save(self, step, state, failure, *, wait, at_once):
        """Return True if the call raises."""
        if self.output() and not wait:
            return True
        if step == self.step:
            return False
        self.step, self.has_failed = step, failure is not None
        if failure in (None, "tidying"):
            self.on_disk[step] = state
        if failure is None:
            steps = sorted(old for old in self.on_disk if old <= step)[-KEEP:]
            self.on_disk = {old: self.on_disk[old] for old in steps}
        return (wait or at_once) and self.output()

    def load(self):
        self.step = max(self.on_disk, default=None)
        return self.on_disk.get(self.step)


class Sequence:
    """Make the same random calls on every rank, and compare each call with the model."""

    def __init__(self, root, comm, draw, **options):
        self.root, self.comm, self.draw, self.options = root, comm, draw, options
        self.model, self.guard, self.last = Model(), Guard(), 0
        self.open()

    def open(self):
        self.manager = Manager(self.root, self.comm, keep=KEEP, guard=self.guard, **self.options)

    def expect(self, raises, call, *args, **kwargs):
        if not raises:
            return call(*args, **kwargs)
        with pytest.raises(CheckpointError):
            call(*args, **kwargs)
        return None

    def save(self):
        failures = [None, None, None, "writing", "appearing", "tidying"]
        failures += ["disk", "replicas"] if self.comm.size > 1 else ["disk"]
        failure, wait = self.draw.choice(failures), self.draw.random() < 0.5
        is_again = self.draw.random() < 0.2 and self.model.step is not None
        step = self.model.step if is_again else max(0, self.last + self.draw.randint(-2, 3))
        source = self.draw.choice([None, None, self.draw.randrange(self.comm.size)])
        state, odd = drawn(self.draw), self.draw.randrange(self.comm.size)
        if failure == "replicas":
            source, state["odd"] = None, torch.tensor([float(self.comm.rank == odd)])
        is_skipped = step == self.model.step and not self.model.has_failed
        if is_skipped or (self.model.has_failed and not wait):
            failure = None
        if failure is not None:
            self.manager.latest()  # raise an error of the save before now
        if failure in ("writing", "appearing", "tidying"):
            self.guard.calls_left = ["writing", "appearing", "tidying"].index(failure)
        kept = {name: v.clone() if torch.is_tensor(v) else v for name, v in state.items()}
        if source is not None and self.comm.rank != source:
            state = {"other": torch.zeros(self.comm.rank)}
        at_once = not self.options["background"]
        raises = self.model.save(step, kept, failure, wait=wait, at_once=at_once)
        with largest_file(10 if failure == "disk" else 1 << 30):
            self.expect(raises, self.manager.save, state, step, wait=wait, source_rank=source)
            if failure == "disk":
                self.manager.latest()  # waits for the thread
        for value in state.values():  # a training step
            if torch.is_tensor(value):
                value.fill_(1)
        self.last = step

    def load(self):
        expected, loaded = self.model.load(), self.manager.load_latest()
        assert (loaded is None) == (expected is None)
        if loaded is not None:
            assert loaded.step == self.model.step
            assert same(loaded.state, expected)
            self.last = loaded.step  # the run continues from there

    def latest(self):
        found = self.manager.latest()
        newest = max(self.model.on_disk, default=None)
        assert found == (None if newest is None else self.root / f"step-{newest:08d}")

    def wait(self):
        self.expect(self.model.output(), self.manager.wait)

    def restart(self):
        self.expect(self.model.output(), self.manager.close)
        self.model.step = None
        self.comm.barrier()
        assert sorted(steps_in(self.root) if self.root.exists() else []) == sorted(
            self.model.on_disk
        )
        self.comm.barrier()
        self.open()

    def lose_newest(self):
        self.manager.latest()
        self.comm.barrier()
        if self.model.on_disk:
            newest = max(self.model.on_disk)
            del self.model.on_disk[newest]
            if self.comm.rank == 0:
                shutil.rmtree(self.root / f"step-{newest:08d}")
        self.comm.barrier()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_every_sequence_of_calls_leaves_the_state_of_the_model(comm, root, seed, background):
    draw = random.Random(seed)
    sequence = Sequence(root, comm, draw, background=background)
    calls = [Sequence.save] * 6 + [Sequence.load] * 3
    calls += [Sequence.latest, Sequence.wait, Sequence.restart, Sequence.lose_newest]
    for _ in range(40):
        draw.choice(calls)(sequence)
    sequence.restart()
    sequence.load()
    sequence.manager.close()
