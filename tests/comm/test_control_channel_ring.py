"""The ring between two mailboxes: what goes in comes out, whole and in order, at any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.control_channel import ring
from hpctrain.comm.control_channel.ring import HEAD_BYTES, RING_BYTES, Inlet, Outlet, fence_of
from hpctrain.comm.node.segments import Semaphore, private

SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(RING_BYTES - 20, RING_BYTES + 20),
    st.integers(0, 5 * RING_BYTES),
)


def semaphore() -> Semaphore:
    made = Semaphore(private(64))
    made.initialise()
    return made


class Pair:
    """Both ends of a ring in one process."""

    def __init__(self) -> None:
        memory = np.zeros((HEAD_BYTES + RING_BYTES) // 8, np.uint64).view(np.uint8).data
        fence = fence_of(semaphore())
        self.reader_bell, self.writer_bell = semaphore(), semaphore()
        self.outlet = Outlet(memory, self.reader_bell, fence)
        self.inlet = Inlet(memory, self.writer_bell, fence)


def message(number: int, num_bytes: int) -> bytes:
    return bytes([number % 251]) * num_bytes


@pytest.mark.parametrize("in_order", [True, False], ids=["no fences", "fences"])
@given(st.lists(st.one_of(SIZES.map(lambda size: ("send", size)), st.just(("receive", 0)))))
def test_messages_of_any_size_arrive_in_order(in_order, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "STORES_IN_ORDER", in_order)
        pair = Pair()
    sent, received = [], []
    for what, size in steps:
        if what == "send":
            sent.append(message(len(sent), size))
            pair.outlet.send(sent[-1])
        else:
            received += pair.inlet.receive() or []
            assert received == sent[: len(received)]
    while len(received) < len(sent):
        if pair.outlet.is_stuck and pair.writer_bell.try_wait():
            pair.outlet.push()
        assert pair.reader_bell.try_wait()  # nothing comes without a ring
        received += pair.inlet.receive() or []
    assert received == sent
    assert not pair.outlet.is_stuck
    assert pair.inlet.receive() is None


def test_a_writer_that_saw_a_full_ring_is_woken_by_the_next_read():
    pair = Pair()
    pair.outlet.send(bytes(RING_BYTES))
    assert pair.outlet.is_stuck
    pair.outlet.push()
    assert not pair.writer_bell.try_wait()
    assert pair.inlet.receive() == []
    assert pair.writer_bell.try_wait()
    pair.outlet.push()
    assert not pair.outlet.is_stuck
    assert pair.inlet.receive() == [bytes(RING_BYTES)]
    assert not pair.writer_bell.try_wait()
