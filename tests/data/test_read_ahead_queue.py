"""Pieces in line are read in order, each once, and asked for before; what fails stops no other."""

from threading import Event

import pytest

from hpctrain.data.io import read_ahead_queue as line_module
from hpctrain.data.io.read_ahead_queue import Line, ReadPiece


@pytest.mark.parametrize("lots", [[1], [20], [3, 0, 1, 16]])
def test_each_piece_is_asked_for_and_then_read_in_order(monkeypatch, lots):
    monkeypatch.setattr(line_module, "_THREADS", 1)
    told, done, held = [], Event(), Event()

    def piece(number, last):
        def read():
            told.append(("read", number))
            if last:
                done.set()

        return ReadPiece(read, lambda: told.append(("ask", number)))

    line, count = Line(), sum(lots)
    line.join([ReadPiece(held.wait)])
    pieces = [piece(number, number == count - 1) for number in range(count)]
    for size in lots:
        line.join(pieces[:size])
        pieces = pieces[size:]
    held.set()
    assert done.wait(10)
    assert [number for what, number in told if what == "read"] == [*range(count)]
    asked = [number for what, number in told if what == "ask"]
    # The first ones were joined while the one before was read: nobody could ask for them.
    assert asked == [*range(asked[0], count)] if asked else count == 1
    for number in asked:
        place = told.index(("ask", number))
        read_before = [other for what, other in told[:place] if what == "read"]
        assert number not in read_before
        assert number - len(read_before) <= line_module._SOON


def test_a_disk_that_cannot_be_asked_is_read_all_the_same():
    done = Event()

    def fail():
        raise OSError("no")

    line = Line()
    line.join([ReadPiece(lambda: None), ReadPiece(lambda: None, fail), ReadPiece(done.set, fail)])
    assert done.wait(10)


def test_sweeps_wait_for_no_other_pieces():
    swept, held, done = Event(), Event(), Event()
    line = Line()
    line.join([ReadPiece(held.wait)] * 4)
    line.join([ReadPiece(swept.set, is_sweep=True), ReadPiece(done.set)])
    assert swept.wait(10)
    assert not done.is_set()
    held.set()
    assert done.wait(10)
