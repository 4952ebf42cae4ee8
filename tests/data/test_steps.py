"""What a rank asks for ahead of its steps, in window order: each block once, before it is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data import steps as steps_module
from hpctrain.data.order.window import WindowOrder, WindowShape
from hpctrain.data.steps import Cut, Steps


@pytest.fixture(scope="module", autouse=True)
def few_asked():
    patch = pytest.MonkeyPatch()
    patch.setattr(steps_module, "ASKED", 8)  # a small set has more than one lot of blocks
    yield
    patch.undo()


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 1500),
    batch=st.integers(1, 12),
    size=st.integers(1, 4),
    together=st.integers(1, 3),
    data=st.data(),
)
def test_each_block_is_asked_for_once_and_before_it_is_read(n, batch, size, together, data):
    block, window = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    lanes = data.draw(st.integers(1, batch))
    order = WindowOrder(n, 1, 0, WindowShape(block=block, window=window, lanes=lanes))
    rank, start = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, n - 1))
    cut = Cut(num_samples=n, start=start, global_batch=batch, tail="short", rank=rank, size=size)
    steps = Steps(order, cut, together, 4)
    asked: list[int] = []
    for number in range(len(steps)):
        soon = steps.soon(number)
        asked += np.unique(soon // block).tolist()
        part = steps.part(number)
        # What bounds memory: in a lane, at most two windows of turns are in use at a time.
        assert len(order.turns_begun(min(n - 1, start + number * together * batch))) <= 4 * window
        if size == 1:
            assert {*(part.indices // block).tolist()} <= {*asked}
    assert len(set(asked)) == len(asked)
