"""Provide states whose values equal their step, managers that tests close, and file damage."""

from contextlib import contextmanager

import torch

from hpctrain.checkpoint.format.manifest import step_of
from hpctrain.checkpoint.manager import Manager


@contextmanager
def managed(root, comm, **options):
    manager = Manager(root, comm, **options)
    yield manager
    manager.close()


def state(value, numel=100):
    return {"w": torch.full((numel,), float(value)), "n": value}


def steps_in(root):
    return sorted(step for path in root.iterdir() if (step := step_of(path.name)) is not None)


def loaded_value(manager):
    loaded = manager.load_latest()
    assert torch.equal(loaded.state["w"], torch.full_like(loaded.state["w"], loaded.state["n"]))
    assert loaded.step == loaded.state["n"]
    return loaded.step


def flip(path, place=-100, mask=1):
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)
