"""Stall reports: missing ranks, their last collective and stack, and the end of the run."""

import pickle
import threading
import time
from dataclasses import replace

import pytest

from hpctrain.comm.flight_recorder import FlightRecorder
from hpctrain.core.config import Settings
from hpctrain.negotiation.stall import (
    MAX_FRAMES,
    MAX_LINES,
    MAX_NAMES,
    LastCall,
    SetMember,
    StallWatch,
    main_stack,
)

SETTINGS = Settings(stall_s=30.0, stall_abort_s=100.0)


class Ranks:
    """Stall watches of all ranks of a process set, with immediate delivery of messages."""

    def __init__(self, size, settings=SETTINGS, first=0):
        members = [SetMember(first + number, f"node{number // 2}") for number in range(size)]
        self.last = [LastCall() for _ in range(size)]
        self.watches = [StallWatch(settings, n, members, self.last[n]) for n in range(size)]
        self.pending = [{} for _ in range(size)]
        self.joined = set()
        self.deaf = set()

    def submit(self, name, ranks, now=0.0):
        for rank in ranks:
            self.pending[rank][name] = now

    def ask(self, now, rank):
        """Send the question of a rank to all ranks; return False if the rank has no question."""
        question = self.watches[rank].due(now, self.pending[rank])
        if question is None:
            return False
        for number in sorted(set(range(len(self.watches))) - self.deaf):
            self.answer(now, question, number)
        return True

    def answer(self, now, question, number):
        """Answer a question on a rank, and send the answer to the root."""
        sent, joined = pickle.loads(pickle.dumps(question)), number in self.joined
        self.watches[number].answer_to(now, sent, self.pending[number], joined=joined)
        for answers in self.watches[number].for_parent(now):
            self.watches[0].take(pickle.loads(pickle.dumps(answers)))

    def report(self, now):
        (report,) = self.watches[0].reports(now)
        return report


def a_telling_place(ranks, now, rank):
    return ranks.ask(now, rank)


def test_the_report_names_operation_rank_host_last_collective_and_place():
    ranks = Ranks(4, first=4)
    ranks.last[3].note("broadcast", "weights")
    ranks.submit("allreduce.loss", (0, 1, 2))
    ranks.submit("allgather.y", (3,), now=25.0)
    assert a_telling_place(ranks, 31.0, rank=2)
    text = ranks.report(31.0)[0]
    assert '"allreduce.loss" has waited 31 s: submitted by ranks 4-6, not by rank 7' in text
    assert (
        "rank 7 on node1: last collective: broadcast weights, 0 s ago; waits for allgather" in text
    )
    assert "in a_telling_place: return ranks.ask(now, rank)" in text
    assert "in 69 s all ranks end, because of HPCTRAIN_STALL_ABORT_S=100" in text
    assert not ranks.watches[0].reports(31.0)
    ranks = Ranks(2, Settings())
    ranks.submit("a", (0,))
    assert ranks.ask(30.0, 0)
    assert "HPCTRAIN_STALL_ABORT_S=SECONDS ends such a run" in ranks.report(31.0)[0]


def test_a_request_is_not_sent_early_or_twice():
    ranks = Ranks(3)
    ranks.submit("a", (0, 2))
    assert not ranks.ask(29.9, 0)
    assert ranks.ask(30.0, 0)
    assert not ranks.ask(30.5, 2)  # rank 2 has received the question of rank 0
    assert not ranks.ask(59.0, 0)
    assert ranks.ask(60.0, 2)
    ranks.submit("a", (0,), now=61.0)  # a new operation of this name, with its own time
    assert not ranks.ask(90.0, 0)
    assert ranks.ask(91.0, 0)
    assert not Ranks(1, Settings(stall_s=float("inf"))).watches[0].due(1e9, {"a": 0.0})


@pytest.mark.parametrize(("abort_s", "times"), [(80, [30, 80]), (95, [30, 60, 95])])
def test_no_request_is_sent_shortly_before_the_abort(abort_s, times):
    ranks = Ranks(2, replace(SETTINGS, stall_abort_s=abort_s))
    ranks.submit("a", (0,))
    assert [now for now in range(abort_s + 1) if ranks.ask(now, 0)] == times


def test_an_unnamed_collective_is_requested_at_growing_intervals():
    recorder = FlightRecorder()
    stream = recorder.new_stream(range(2))
    stream.begin("sum of 3 float32")
    members = [SetMember(0, "a"), SetMember(1, "a")]
    settings = replace(SETTINGS, stall_abort_s=200.0)
    watch = StallWatch(settings, 0, members, LastCall(), recorder=recorder)

    def is_asked_after(seconds):
        stream.waits_since_s = stream.waits_since_s or time.perf_counter() - 40.0
        return watch.due(time.monotonic() + seconds, {}) is not None

    assert [second for second in range(60) if is_asked_after(second)] == [0, 40]


def test_an_operation_that_is_decided_before_the_answers_is_not_reported():
    ranks = Ranks(3)
    ranks.submit("a", (0, 2))
    question = ranks.watches[0].due(30.0, ranks.pending[0])
    ranks.pending = [{} for _ in range(3)]
    for number in range(3):
        ranks.answer(30.1, question, number)
    assert ranks.watches[0].reports(30.2) == []


def test_a_rank_that_does_not_answer_is_named():
    ranks = Ranks(3)
    ranks.deaf = {2}
    ranks.submit("a", (0, 1))
    assert ranks.ask(30.0, 0)
    answer_s = ranks.watches[0].answer_s
    assert not ranks.watches[0].reports(30.0 + 0.9 * answer_s)
    text = ranks.report(30.0 + answer_s)[0]
    assert "submitted by ranks 0-1, not by rank 2 on node1" in text
    assert "rank 2 on node1: no answer" in text


def test_ranks_at_the_same_place_are_reported_together():
    ranks = Ranks(8)
    ranks.joined = {7}  # a rank that has joined misses no operation
    ranks.last[5].note("broadcast", "weights")
    ranks.submit("a", (0,))
    assert ranks.ask(30.0, 0)
    text = ranks.report(30.0)[0]
    assert '"a" has waited 30 s: submitted by rank 0, not by ranks 1-6 on' in text
    assert "ranks 1-4,6 on node0, node1, node2, node3: last collective: none so far" in text
    assert "rank 5 on node2: last collective: broadcast weights" in text


def test_a_report_has_a_limited_length():
    ranks = Ranks(20)
    for rank, last in enumerate(ranks.last):
        last.note("broadcast", str(rank))
    for number in range(2 * MAX_NAMES):
        ranks.submit(f"a{number}", (0,), now=float(number) / 10)
    assert ranks.ask(40.0, 0)
    text = ranks.report(40.0)[0]
    assert '"a0" has waited 40 s' in text
    assert f"and {MAX_NAMES - MAX_LINES} more operations" in text
    assert ": at other places, which are not shown" in text
    assert text.count("last collective") == MAX_LINES


def test_the_abort_ends_with_a_report():
    ranks = Ranks(2)
    ranks.submit("a", (0,))
    for now in (30.0, 60.0, 100.0):
        assert ranks.ask(now, 0)
        text, is_final = ranks.report(now)
        assert is_final is (now == 100.0) is ("all ranks end now" in text)
    for stall_s in (float("inf"), 200.0):  # an abort before the first report includes it
        ranks = Ranks(2, replace(SETTINGS, stall_s=stall_s))
        ranks.submit("a", (0,))
        assert not ranks.ask(99.0, 0)
        assert ranks.ask(100.0, 0)
        assert ranks.report(100.0)[1]


@pytest.mark.parametrize(("now", "is_final"), [(30.0, False), (100.0, True)])
def test_a_rank_reports_and_aborts_itself_if_the_root_does_not_answer(now, is_final):
    watch = Ranks(3).watches[1]
    assert watch.due(now, {"a": 0.0}) is not None
    assert watch.reports(now + 1.9 * watch.answer_s) == []
    ((text, ends),) = watch.reports(now + 2 * watch.answer_s)
    assert f'"a" has waited {now:.0f} s on rank 1 on node0' in text
    assert (
        "rank 0 on node0, or a rank between the two in the tree of ranks, does not answer" in text
    )
    assert ends is is_final
    assert watch.reports(now + 3 * watch.answer_s) == []


def test_the_stack_has_lines_of_the_program_and_the_current_line_of_a_library():
    with_one_more_frame = threading.Event()
    found = []

    def look():
        time.sleep(0.2)
        found.append(main_stack())
        with_one_more_frame.set()

    threading.Thread(target=look).start()
    with_one_more_frame.wait()
    lines = found[0].splitlines()
    assert "in test_the_stack_has_lines_of_the_program" in lines[-2]
    assert lines[-2].endswith(": with_one_more_frame.wait()")
    assert "threading.py" in lines[-1]
    assert not any("pluggy" in line for line in lines)


def test_a_deep_stack_is_cut_at_its_outer_end():
    def deep(levels):
        return deep(levels - 1) if levels else main_stack()

    lines = deep(3 * MAX_FRAMES).splitlines()
    assert len(lines) == MAX_FRAMES + 1
    assert lines[0] == "..."
    assert "in deep" in lines[-1]


def test_the_last_collective_is_described_with_its_age():
    last = LastCall()
    assert last.describe() == ("none so far", None)
    last.note("all-reduce of gradients")
    last.note("allreduce", "loss")
    what, ago_s = last.describe()
    assert what == "allreduce loss"
    last.note("allreduce", "allreduce.loss")
    assert last.describe()[0] == "allreduce.loss"
    assert 0 <= ago_s < 60
