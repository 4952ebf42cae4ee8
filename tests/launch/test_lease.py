"""Only one job at a time writes to a run directory; leases are real files with short times."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from hpctrain.cluster.process import birth
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.launch.lease import NAME, Holder, Lease, Silence, Times
from tests.full_disk import largest_file

TIMES = Times(beat_s=0.05, stale_s=0.6, wait_s=0.9, look_s=0.05, settle_s=0.1)
ELSEWHERE = ("another boot", 1)


@pytest.fixture
def lease(tmp_path, monkeypatch):
    """Function that creates leases of one directory, by default on this host."""
    made = []

    def make(*, times=TIMES, host=None, **variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            made.append(Lease(tmp_path, times))
        if host is not None:
            _move(made[-1], host)
        return made[-1]

    yield make
    for one in made:
        one.release()


def _move(lease, host):
    """Give a lease the host and namespace of another machine."""
    lease._me = replace(lease._me, host=host, namespace=(host, 1))
    lease._mine = json.dumps(asdict(lease._me)).encode()


def take(lease, **how):
    """Call ``attempt`` until the lease is taken; return its messages."""
    output = []
    while text := lease.attempt(**how):
        output.append(text)
        time.sleep(TIMES.look_s)
    return output


def test_one_of_several_concurrent_attempts_gets_the_lease(lease):
    wanting = [lease(host=f"node-{number}") for number in range(8)]
    gate, had = threading.Barrier(len(wanting)), []

    def want(one):
        gate.wait()
        if not one.attempt():
            had.append(one)

    threads = [threading.Thread(target=want, args=(one,)) for one in wanting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(had) == 1
    assert [one for one in wanting if one.is_held()] == had


def test_a_released_lease_is_free_and_leaves_no_files(lease, tmp_path):
    one, other = lease(host="a"), lease(host="b")
    assert take(one) == []
    one.release()
    assert list(tmp_path.iterdir()) == []
    assert not one.is_held()
    assert take(other) == []


def test_attempts_wait_for_a_live_holder_and_then_name_it(lease):
    take(lease(host="node-7", SLURM_JOB_ID="4711"))
    other = lease(host="b")
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=rf"job 4711, process {os.getpid()} on node-7 \(since 20.*--force"
    ):
        take(other)
    assert time.monotonic() - began >= TIMES.wait_s


def test_a_lease_without_heartbeats_is_taken_over(lease, tmp_path):
    one, other = lease(host="a", times=replace(TIMES, beat_s=100.0)), lease(host="b")
    take(one)
    began = time.monotonic()
    output = take(other)
    assert time.monotonic() - began >= TIMES.stale_s
    assert "on a (since" in output[0]
    assert other.is_held()
    assert not one.is_held(looks=True)
    assert Holder.read(tmp_path) == other._me


def test_a_waiter_that_was_suspended_does_not_take_over(lease):
    take(lease(host="a", times=replace(TIMES, beat_s=100.0)))
    other = lease(host="b")
    for _ in range(3):
        assert "waiting" in other.attempt()
        # the waiter does not look in between, as when the file system does not respond
        time.sleep(TIMES.stale_s)


def test_silence_counts_from_the_last_change_and_not_while_this_process_is_blocked():
    silence = Silence(longest_s=0.1)
    assert silence.passed() == 0.0
    time.sleep(0.2)
    assert silence.passed() == 0.1
    seen = [(silence.look(sign, 1.0), silence.quiet_s) for sign in ("a", "a", "a", "b", "b")]
    assert seen == [(True, 0.0), (False, 1.0), (False, 2.0), (True, 0.0), (False, 1.0)]
    assert silence.waited_s == 5.0


def test_the_lease_of_a_dead_process_is_taken_over_at_once(lease, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    here = Holder.here()
    for holder in (
        replace(here, pid=dead.pid),
        replace(here, born=birth(os.getpid()) - 1),  # another process with the same process id
    ):
        (tmp_path / NAME).write_text(json.dumps(asdict(holder)))
        other = lease(times=replace(TIMES, stale_s=100.0))
        assert "taken over" in take(other)[0]
        other.release()


@pytest.mark.parametrize(
    ("restarts", "hosts", "message"),
    [("1", "ab", "taken over"), ("0", "ab", "waiting"), ("1", (None, None), "waiting")],
    ids=["started again", "the same start", "a process that lives here"],
)
def test_a_job_that_slurm_restarted_takes_over_its_own_lease_at_once(
    lease, restarts, hosts, message
):
    take(lease(host=hosts[0], SLURM_JOB_ID="12"))
    other = lease(host=hosts[1], SLURM_JOB_ID="12", SLURM_RESTART_COUNT=restarts)
    assert message in other.attempt()


def test_a_holder_that_lost_its_lease_by_force_stops_writing(lease, tmp_path):
    one, other = lease(host="a"), lease(host="b")
    take(one)
    take(other, force=True)
    time.sleep(3 * TIMES.beat_s)
    assert one.is_lost
    assert not one.is_held()
    with pytest.raises(CheckpointError, match=r"on b \(since .* has taken the lease"):
        one.check()
    one.release()
    assert other.is_held(looks=True)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, other._counter.name}


def test_a_forced_takeover_completes_after_the_holder_has_looked(lease):
    times = replace(TIMES, beat_s=100.0, look_s=0.2, settle_s=0.4)
    one, other = lease(host="a", times=times), lease(host="b", times=times)
    take(one)
    assert one.is_held(looks=True)
    while other.attempt(force=True):
        time.sleep(0.01)
    assert not one.is_held()  # the cached answer is too old


def test_of_two_forced_takeovers_one_wins(lease):
    take(lease(host="a"))
    b, c = lease(host="b"), lease(host="c")
    assert "taken over" in b.attempt(force=True)
    assert "taken over" in c.attempt(force=True)
    assert "waiting" in b.attempt(force=True)
    take(c)
    assert not b.is_held()


@pytest.mark.parametrize(
    "text", [b"", bytes(64), b"{", b"3", b'{"namespace": [1, 2], "pid": -1, "token": "../x"}']
)
def test_an_unreadable_lease_is_taken_over_after_the_stale_time(lease, tmp_path, text):
    (tmp_path / NAME).write_bytes(text)
    other = lease(host="b")
    began = time.monotonic()
    assert "invalid lease file" in take(other)[0]
    assert TIMES.stale_s <= time.monotonic() - began
    assert other.is_held()
    assert Holder.read(tmp_path) == other._me


@pytest.mark.parametrize("way", ["another job came and went", "somebody removed it"])
def test_a_holder_whose_lease_file_is_gone_stops_and_does_not_restore_it(lease, tmp_path, way):
    one, other = lease(host="a", times=replace(TIMES, beat_s=100.0)), lease(host="b")
    take(one)
    if way == "somebody removed it":
        (tmp_path / NAME).unlink()
    else:
        take(other, force=True)
        other.release()
        # as if the job was stopped before it wrote the file
        (tmp_path / one._counter.name).write_text("7\n")
    assert not one.is_held(looks=True)
    assert one.is_lost
    with pytest.raises(CheckpointError, match=r"lease\.json of this job is missing: another job"):
        one.check()
    one.release()
    assert list(tmp_path.iterdir()) == []
    assert take(lease(host="c")) == []


def test_a_full_disk_is_an_error_and_no_lease_is_taken(lease, tmp_path):
    one, other = lease(host="a", times=replace(TIMES, beat_s=100.0)), lease(host="b")
    with largest_file(0), pytest.raises(OSError, match="too large"):
        one.attempt()
    assert list(tmp_path.iterdir()) == []
    take(one)
    with largest_file(0), pytest.raises(OSError, match="too large"):
        take(other, force=True)
    assert one.is_held(looks=True)


def test_a_disk_that_becomes_full_does_not_end_the_holder(lease, caplog):
    one = lease(host="a")
    take(one)
    with largest_file(0):
        time.sleep(4 * TIMES.beat_s)
    assert caplog.text.count("the heartbeat must be written") == 1
    before = one._counter.read_text()
    time.sleep(4 * TIMES.beat_s)
    assert one._counter.read_text() != before
    assert one.is_held(looks=True)
