"""Exceptions of signal handlers at any point of a named operation."""

import sys
import time
from pathlib import Path

import torch

import hpctrain.negotiation
from hpctrain.comm import waiting
from hpctrain.core.errors import CommError
from tests.negotiation.controlling import RUNS, SEVERAL, controller_of

FOLDER = str(Path(hpctrain.negotiation.__file__).parent)
PROMPT_S = 5.0  # far less than the limit of the waits
NUM_POINTS = 24  # other points for each number of ranks
LATE_S = 0.02  # delay of the other ranks, so that the interrupted rank waits for them


class Interrupted(Exception):  # noqa: N818 - as KeyboardInterrupt
    """Raised by a signal handler."""


BETWEEN = ("reduce_now", "wait")
"""Functions that run between the start of an operation and the wait for it."""


class Interruption:
    """Counts the instructions of the package that a call executes; raises at one of them.

    ``names``: functions whose instructions are counted; () for all.
    """

    def __init__(self, number=None, names=()):
        self.number, self.names, self.count = number, names, 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if self.names and frame.f_code.co_name not in self.names:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                raise Interrupted
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


def outcome_of_calls(run, controller, number, late_s, names):
    """Make five calls, the second with an interruption; return the error, and the longest time.

    Ranks that are not interrupted start the second call after ``late_s``.
    """
    size, longest_s = controller.comm.size, 0.0
    error = ""
    for call in range(5):
        time.sleep(late_s if call == 1 and number is None else 0.0)
        start = time.monotonic()
        try:
            tensor = torch.ones(3)
            if call == 1 and number is not None:
                try:
                    with Interruption(number, names):
                        run(controller, "again", tensor)
                except Interrupted:
                    pass
            if tensor[0] == 1:
                run(controller, "again", tensor)
            assert tensor.tolist() == [size] * 3
        except CommError as raised:
            if not error and number is not None:
                time.sleep(2 * late_s)  # the others call, and may complete the interrupted one
            error = str(raised)
        longest_s = max(longest_s, time.monotonic() - start)
    return error, longest_s


@SEVERAL
@RUNS
def test_after_an_interrupt_the_next_calls_work_or_raise_on_all_ranks(ranks, run, monkeypatch):
    monkeypatch.setattr(waiting, "FAILED_S", 0.1)
    everyone, counts = range(ranks.size), []
    for point in range(-2, NUM_POINTS):
        controller = controller_of(ranks.group(everyone), timeout_s=60)
        for _ in range(4):  # from here on without control messages
            run(controller, "again", torch.ones(3))
        ranks.barrier()
        late_s = LATE_S * (point // ranks.size % 2)
        if point < 0:
            time.sleep(LATE_S * ((ranks.rank == 0) is (point == -2)))  # rank 0 comes last, first
            with Interruption(names=BETWEEN if point == -1 else ()) as counted:
                run(controller, "again", torch.ones(3))
            counts.append(ranks.broadcast_object(counted.count))
            assert counts[-1] > 20
            count = late_s = 0
        else:
            count = counts[late_s > 0]
        is_here = point >= 0 and point % ranks.size == ranks.rank
        number = 1 + (4 * point + ranks.size - 1) * count // (4 * NUM_POINTS) if is_here else None
        names = BETWEEN if late_s else ()
        found = ranks.allgather_object(outcome_of_calls(run, controller, number, late_s, names))
        assert len({bool(error) for error, _ in found}) == 1, (point, found)
        assert max(took_s for _, took_s in found) < PROMPT_S, (point, found)
        controller.close()
