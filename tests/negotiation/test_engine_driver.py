"""The engine driver: one thread at a time drives, and the delay of its thread adapts."""

import random
import threading
import time

import torch

from hpctrain.negotiation.engine_driver import SubmissionTimer
from tests.negotiation.controlling import SEVERAL, allreduce


@SEVERAL
def test_one_thread_at_a_time_drives_the_engine(controller, monkeypatch):
    rank, size = controller.comm.rank, controller.comm.size
    inside, overlaps, turn = set(), [], controller._progress.advance

    def watched_turn():
        inside.add(threading.get_ident())
        time.sleep(0.0002)  # other threads run
        overlaps.extend(inside - {threading.get_ident()})
        try:
            return turn()
        finally:
            inside.discard(threading.get_ident())

    monkeypatch.setattr(controller._progress, "advance", watched_turn)
    chance, sums = random.Random(rank), []

    def work(thread):
        for step in range(10):
            handle = controller.submit(allreduce(f"{thread}/{step}", torch.full((2,), rank)))
            time.sleep(chance.random() * 0.002)  # the background thread may drive meanwhile
            sums.append(handle.wait()[0].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[sum(range(size))] * 2] * 40
    assert not overlaps


def test_the_delay_doubles_while_every_operation_has_a_waiting_caller():
    timer = SubmissionTimer(cycle_s=1e-4)
    delays = []
    for was_needed in (False, False, False, True, *[False] * 9):
        timer.adapt(was_needed=was_needed)
        delays.append(round(timer.delay_s * 1e4))
    assert delays == [2, 4, 8, 1, 2, 4, 8, 16, 20, 20, 20, 20, 20]
    timer.close()


def test_the_delay_is_never_shorter_than_the_cycle():
    timer = SubmissionTimer(cycle_s=0.5)
    for was_needed in (True, False, False):
        timer.adapt(was_needed=was_needed)
        assert timer.delay_s == 0.5
    timer.close()
