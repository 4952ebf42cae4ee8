"""Stop requests by signal, file and deadline are recorded; the program stops itself."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpctrain.cluster.env import ASKED
from hpctrain.core.errors import CommError
from hpctrain.runtime.stopping import SIGNALS, StopRequests, deadline
from tests.processes import ended

PROGRAM = """
import ctypes, time
from hpctrain.runtime.stopping import StopRequests

with StopRequests() as requests:
    print("ready", flush=True)
    while not requests.reason:
        time.sleep(0.01)
    print(requests.reason, flush=True)
    # Hangs in native code, where Python's handlers do not run.
    while True:
        ctypes.CDLL(None).usleep(900_000)
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_recorded_and_the_handlers_are_restored(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequests() as requests:
        assert not requests.reason
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the launcher forwards a second copy of the signal
        assert requests.reason == number.name
        os.kill(os.getpid(), next(each for each in SIGNALS if each != number))
        assert requests.reason == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "second signal" not in {thread.name for thread in threading.enumerate()}


def test_the_reason_is_the_signal_that_the_launcher_received(tmp_path, monkeypatch):
    monkeypatch.setenv(ASKED, str(tmp_path / "asked"))
    for message in ("SIGUSR1", "SIGHUP"):
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert requests.reason == message
        (tmp_path / "asked").write_text("SIGHUP")


EARLY = """
import os, signal
from hpctrain.runtime.stopping import StopRequests, held_back

before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
with held_back():
    os.kill(os.getpid(), signal.SIGUSR1)
    with StopRequests() as requests:
        print(requests.reason)
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
"""


def test_a_signal_before_the_handlers_are_installed_is_not_lost():
    line = [sys.executable, "-c", EARLY]
    assert subprocess.check_output(line, text=True) == "SIGUSR1\n"


HANGUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
from hpctrain.comm.mpi_start import MPI
os.kill(os.getpid(), signal.SIGHUP)
print("alive")
"""


@pytest.mark.launches
@pytest.mark.parametrize(("handler", "end"), [("SIG_DFL", (-1, "")), ("SIG_IGN", (0, "alive\n"))])
def test_a_rank_ends_with_its_terminal_unless_it_ignores_the_signal(handler, end):
    done = ended([sys.executable, "-c", HANGUP, handler], timeout=60)
    assert (done.returncode, done.stdout) == end


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGINT)
            assert not requests.reason
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_ends_a_process_that_hangs_in_native_code(number):
    program = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(20) == 128 + number


def test_the_stop_file_is_checked_at_intervals(tmp_path):
    now = [0.0]
    requests = StopRequests(stop_file=tmp_path / "STOP", look_s=1.0, clock=lambda: now[0])
    assert not requests.reason
    (tmp_path / "STOP").touch()
    now[0] = 0.9
    assert not requests.reason
    now[0] = 1.0
    assert requests.reason == "file STOP"
    (tmp_path / "STOP").unlink()
    assert requests.reason == "file STOP"


def test_the_budget_ends_at_the_deadline():
    now = [10.0]
    requests = StopRequests(deadline=20.0, clock=lambda: now[0])
    assert not requests.reason
    assert requests.describe() == "in 10.00 s"
    now[0] = 20.0
    assert requests.reason == "budget"


@pytest.mark.parametrize(
    ("after_s", "job_end", "margin_s", "end"),
    [
        (None, None, 60, None),
        (50, None, 60, 150),
        (None, 1000, 60, 940),
        (5000, 1000, 60, 940),
        (50, 1000, 60, 150),
        (None, 160, 120, 154),  # a short job may use nine tenths of its time
        (None, 50, 120, 50),
    ],
)
def test_the_earlier_of_budget_and_job_end_is_the_deadline(after_s, job_end, margin_s, end):
    assert deadline(100, after_s, job_end, margin_s) == end


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_of_a_loop_stop_after_the_same_step(hvd, tmp_path, monkeypatch):
    folder = tmp_path / str(hvd.rank())
    folder.mkdir()
    monkeypatch.setenv("RUN_DIRECTORY", str(folder))
    before = signal.getsignal(signal.SIGUSR1)
    assert not hvd.should_stop()
    if hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert hvd.should_stop()
    assert hvd.should_stop()  # the answer does not change
    assert (folder / "stopping").exists() == (hvd.rank() == 0)
    hvd.shutdown()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.ranks(2)
def test_a_stop_file_in_the_run_directory_stops_all_ranks(hvd, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_DIRECTORY", str(tmp_path))
    if hvd.rank() == 0:
        (tmp_path / "STOP").touch()
    assert hvd.should_stop()


@pytest.mark.ranks(1, 2, 3)
def test_the_first_should_stop_must_be_called_on_the_main_thread(hvd):
    def ask():
        try:
            answers.append(hvd.should_stop())
        except CommError as error:
            answers.append(str(error))

    def in_thread():
        thread = threading.Thread(target=ask, name="mine")
        thread.start()
        thread.join()

    answers: list[object] = []
    last = hvd.size() - 1
    in_thread() if hvd.rank() == last else ask()
    assert "only be received by the main thread" in answers[0]
    assert "in thread mine" in answers[0]
    assert not hvd.should_stop()
    in_thread()
    assert answers[1:] == [False]
    if hvd.rank() == last:
        os.kill(os.getpid(), signal.SIGTERM)
    in_thread()
    assert answers[2:] == [True]


def test_handlers_of_the_program_are_also_called():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    try:
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (requests.reason, called) == ("SIGUSR1", [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 7), (signal.SIGUSR1, 7), (signal.SIGTERM, -signal.SIGTERM)],
)
def test_a_forked_child_is_ended_by_its_parent_only(number, code):
    (is_ready, ready), (is_over, over) = os.pipe(), os.pipe()
    with StopRequests() as requests:
        if not (child := os.fork()):
            os.write(ready, b"1")
            os.read(is_over, 1)
            os._exit(7)
        os.read(is_ready, 1)
        os.kill(child, number)
        os.write(over, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert not requests.reason
    for end in (is_ready, ready, is_over, over):
        os.close(end)


def test_exit_in_another_thread_restores_the_process():
    program = (
        "import threading; from hpctrain.runtime.stopping import StopRequests\n"
        "requests = StopRequests().__enter__()\n"
        "thread = threading.Thread(target=requests.__exit__); thread.start(); thread.join(5)\n"
        "assert not thread.is_alive()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
