"""All ends of a launch, with the real mpirun of this environment."""

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.cluster.env import BEGUN, ENDED, RANK_LOST
from hpctrain.cluster.process import stat
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.rank_processes import descendants
from hpctrain.launch.stderr import merged
from hpctrain.launch.supervise import TIMED_OUT, supervise
from tests.harness.pace import scaled
from tests.launch.started import line, ranks_are_gone, start, wait_for
from tests.processes import ended, is_alive

pytestmark = [pytest.mark.launches, pytest.mark.limit(60)]


WAITS_IN_INIT = "sys.exit(3)\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()"
LONG = pytest.mark.conformance


@pytest.mark.parametrize(
    "death",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        WAITS_IN_INIT,
        pytest.param("os._exit(3)", marks=LONG),
        pytest.param("raise ValueError", marks=LONG),
    ],
)
def test_the_death_of_one_rank_ends_the_launch_with_an_error(tmp_path, death):
    before = time.monotonic()
    code = f"if rank == 1: {death}\ntime.sleep(50)"
    assert supervise(line(tmp_path, code), environ=mpiexec.environment()).code != 0
    assert time.monotonic() - before < scaled(30)
    assert ranks_are_gone(tmp_path)


def test_a_launch_past_its_limit_ends_with_124(tmp_path):
    end = supervise(
        line(tmp_path, "time.sleep(50)"), environ=mpiexec.environment(), timeout_s=3.0, grace_s=1.0
    )
    assert end == (TIMED_OUT, True)
    assert ranks_are_gone(tmp_path)


@pytest.mark.parametrize(("code", "num_ranks"), [(0, 2), (85, 3), pytest.param(7, 1, marks=LONG)])
def test_an_exit_code_of_all_ranks_is_returned(tmp_path, code, num_ranks):
    argv, before = line(tmp_path, f"sys.exit({code})", num_ranks), signal.getsignal(signal.SIGTERM)
    assert supervise(argv, environ=mpiexec.environment()) == (code, False)
    assert signal.getsignal(signal.SIGTERM) is before


STUBBORN = "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("number", "ignores"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGINT, STUBBORN),
        pytest.param(signal.SIGINT, "", marks=LONG),
        pytest.param(signal.SIGHUP, "", marks=LONG),
    ],
)
def test_a_signal_ends_mpirun_and_its_ranks(tmp_path, number, ignores):
    process = start(tmp_path, f"{ignores}time.sleep(50)", grace_s=1.0 if ignores else 2.0)
    process.send_signal(number)
    # Python ends by SIGINT itself if the program does not catch KeyboardInterrupt.
    assert process.wait(timeout=15) == (-number if number == signal.SIGINT else 128 + number)
    assert ranks_are_gone(tmp_path)


def test_a_second_signal_kills_immediately(tmp_path):
    process = start(tmp_path, f"{STUBBORN}time.sleep(50)", grace_s=60.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) != 0
    assert ranks_are_gone(tmp_path)


@pytest.mark.parametrize("code", ["", STUBBORN])
@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_the_ranks_end_after_a_launch_that_sigkill_ends(tmp_path, code, seconds):
    process = start(tmp_path, f"{code}time.sleep(50)")
    (mpirun,) = [
        pid
        for pid in descendants(process.pid)
        if stat(pid).parent == process.pid and descendants(pid)
    ]
    time.sleep(seconds)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(mpirun), limit_s=15.0)
    assert ranks_are_gone(tmp_path)


def test_the_ranks_end_after_a_launch_that_ends_while_mpirun_starts():
    program = (
        "import sys; from hpctrain.launch.supervise import supervise; supervise(sys.argv[1:])"
    )
    for pause in [*["true"] * 6, "sleep 0.002", "sleep 0.005"]:
        words = ["sh", "-c", f"{pause}; kill -KILL $PPID; exec sleep 50"]
        # The output ends when the last process has ended.
        line = [sys.executable, "-c", program, *words]
        done = subprocess.run(line, check=False, stdout=subprocess.PIPE, timeout=30)
        assert done.returncode == -signal.SIGKILL


def test_the_ranks_of_a_killed_mpirun_are_killed(tmp_path, capfd):
    process = start(tmp_path, f"{STUBBORN}time.sleep(50)")
    time.sleep(2.5)  # the launch looks at its ranks once per second
    (mpirun,) = [
        pid
        for pid in descendants(process.pid)
        if stat(pid).parent == process.pid and descendants(pid)
    ]
    os.kill(mpirun, signal.SIGKILL)
    assert process.wait(timeout=15) == 128 + signal.SIGKILL
    assert ranks_are_gone(tmp_path)
    assert "mpirun was killed, and left 2 processes, which are killed" in capfd.readouterr().err


def test_a_launch_does_not_read_the_input_of_the_calling_script(tmp_path):
    launch = (
        "from hpctrain.launch import mpiexec; from hpctrain.launch.supervise import supervise; "
        f"supervise({line(tmp_path, 'pass')!r}, environ=mpiexec.environment())"
    )
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1"; cat', sys.executable, launch],
        input="still here\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "still here\n"


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path, "time.sleep(3)")
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=15) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_launch_leaves_no_file_open():
    program = (
        "import gc; from hpctrain.launch.supervise import supervise\n"
        "for _ in range(2): assert supervise(['sh', '-c', 'echo here >&2']).code == 0\n"
        "gc.collect()"
    )
    done = ended([sys.executable, "-X", "dev", "-c", program])
    assert (done.returncode, done.stderr) == (0, "here\nhere\n")


def test_a_missing_program_is_named():
    with pytest.raises(LaunchError, match="/nowhere/mpirun"):
        supervise(["/nowhere/mpirun"])


def test_descendants_include_grandchildren():
    with subprocess.Popen(["sh", "-c", "sleep 30 & wait"]) as shell:
        wait_for(lambda: len(descendants(shell.pid)) == 1)
        (sleep,) = descendants(shell.pid)
        assert shell.pid in descendants(os.getpid())
        assert sleep in descendants(os.getpid())
        os.kill(sleep, signal.SIGTERM)


def test_an_mpirun_that_hangs_after_its_ranks_is_killed(capfd):
    # Open MPI's mpirun can deadlock at its end, after its ranks have exited.
    hung = "import subprocess, time; rank = subprocess.Popen(['true']); time.sleep(60)"
    before = time.monotonic()
    assert supervise([sys.executable, "-c", hung]).code == 128 + signal.SIGKILL
    assert time.monotonic() - before < scaled(20)
    assert "mpirun hangs after its ranks have ended" in capfd.readouterr().err


# -- signals to ranks that can save a checkpoint, and time limits of other ranks ----------------


SAVES = """
from hpctrain.cluster.env import asked_by
def save(number, frame):
    Path({folder!r}, f'asked-{{rank}}').write_text(f'{{number}} {{asked_by()}}')
    time.sleep(1)
    os._exit(85)
for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(n, save)
Path({folder!r}, f'ready-{{rank}}').touch()
while True: time.sleep(0.1)
"""


def names(tmp_path, kind):
    return len([*tmp_path.glob(f"{kind}-*")])


@pytest.mark.parametrize(
    "signal_number",
    [
        signal.SIGTERM,
        signal.SIGUSR1,
        pytest.param(signal.SIGINT, marks=LONG),
        pytest.param(signal.SIGHUP, marks=LONG),
    ],
)
def test_a_signal_asks_ranks_to_save_and_their_exit_code_is_returned(tmp_path, signal_number):
    process = start(tmp_path, SAVES.format(folder=str(tmp_path)), grace_s=0.2)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal_number)
    assert process.wait(30) == 85
    # Ranks receive SIGUSR1 and the name of the original signal, unless that was SIGUSR1.
    why = None if signal_number == signal.SIGUSR1 else signal_number.name
    message = [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)]
    assert [text.split()[0] for text in message] == ["10", "10"]
    assert why is None or {text.split()[1] for text in message} == {why}
    assert ranks_are_gone(tmp_path)


def test_ranks_that_hang_while_saving_are_killed_after_the_limit(tmp_path):
    code = SAVES.format(folder=str(tmp_path)).replace("time.sleep(1)", "time.sleep(50)")
    process = start(tmp_path, code, grace_s=0.5, save_s=1.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) not in (0, 85)
    assert ranks_are_gone(tmp_path)


def test_a_killed_mpirun_leaves_no_files(tmp_path, monkeypatch):
    # A later mpirun with the same process id would fail on these files.
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    code = f"Path({str(tmp_path)!r}, f'ready-{{rank}}').touch(); time.sleep(50)"
    process = start(tmp_path, code, grace_s=0.5)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    assert any(folder.iterdir())
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=15)
    assert ranks_are_gone(tmp_path)
    assert not any(folder.iterdir())


ONLY_TERM = """
signal.signal(signal.SIGTERM, lambda *_: Path({folder!r}, f'cleaned-{{rank}}').touch())
Path({folder!r}, f'ready-{{rank}}').touch()
while not Path({folder!r}, f'cleaned-{{rank}}').exists(): time.sleep(0.1)
sys.exit(7)
"""


def test_a_rank_that_handles_only_sigterm_gets_no_sigusr1(tmp_path):
    # SIGUSR1 would end the rank.
    process = start(tmp_path, ONLY_TERM.format(folder=str(tmp_path)), grace_s=3.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=15)
    assert names(tmp_path, "cleaned") == 2
    assert ranks_are_gone(tmp_path)


def test_one_rank_that_cannot_save_makes_the_signal_end_all(tmp_path):
    process = start(
        tmp_path, f"if rank: time.sleep(50)\n{SAVES.format(folder=str(tmp_path))}", grace_s=0.5
    )
    wait_for(lambda: names(tmp_path, "ready") == 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) not in (0, 85)
    assert ranks_are_gone(tmp_path)


def on_a_terminal(tmp_path, code, **how):
    """Run ``supervise`` in the foreground of a new terminal; return its pid and the terminal."""
    program = (
        "import sys; from hpctrain.launch import mpiexec; "
        "from hpctrain.launch.supervise import supervise\n"
        f"try: sys.exit(supervise({line(tmp_path, code)!r}, environ=mpiexec.environment(), "
        f"**{how!r}).code)\nexcept KeyboardInterrupt: sys.exit(130)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.environ.pop("PYTHONUNBUFFERED", None)  # the default of most users
            os.execv(sys.executable, [sys.executable, "-c", program])
        os._exit(1)
    return pid, terminal


def code_of(pid, terminal):
    """Read the terminal until the process ends; return its exit code and output."""
    text = b""
    with contextlib.suppress(OSError):  # reading a closed terminal raises OSError
        while piece := os.read(terminal, 4096):
            text += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


@pytest.mark.parametrize(("saves", "expected"), [(True, 85), (False, 130)])
def test_ctrl_c_on_a_terminal_lets_ranks_save_and_leaves_no_process(tmp_path, saves, expected):
    code = SAVES.format(folder=str(tmp_path))
    if not saves:
        code = f"Path({str(tmp_path)!r}, f'ready-{{rank}}').touch(); time.sleep(50)"
    pid, terminal = on_a_terminal(tmp_path, code, grace_s=2.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    os.write(terminal, b"\x03")
    code, text = code_of(pid, terminal)
    assert code == expected, text
    assert ("requested to save" in text) == saves
    assert ranks_are_gone(tmp_path)


def test_a_closed_terminal_lets_ranks_save(tmp_path):
    pid, terminal = on_a_terminal(tmp_path, SAVES.format(folder=str(tmp_path)), grace_s=2.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    os.close(terminal)  # the process gets SIGHUP and cannot write any more
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 85
    assert names(tmp_path, "asked") == 2
    assert ranks_are_gone(tmp_path)


def test_terminal_input_reaches_rank_0(tmp_path):
    code = "if not rank: print('typed', sys.stdin.readline().upper(), flush=True)"
    pid, terminal = on_a_terminal(tmp_path, code)
    wait_for(lambda: names(tmp_path, "pid") == 2)
    os.write(terminal, b"hello\n")
    code, text = code_of(pid, terminal)
    assert code == 0, text
    assert "typed HELLO" in text


BOX = f"{'-' * 74}\nMPI_ABORT was invoked on rank 0 in communicator\n{'-' * 74}\n"
SILENT = f"{'-' * 74}\nprterun has exited due to process rank 0 exiting\nimproperly.\n{'-' * 74}\n"
DIED = f"{BOX}YOUR APPLICATION TERMINATED WITH THE EXIT STRING: {{}}\n"
OTHER = f"{'-' * 74}\nprterun noticed that process rank 0 exited on signal 11\n{'-' * 74}\n"


@pytest.mark.parametrize(
    ("message", "code", "kept"),
    [
        (f"{BOX}why\n", 1, "why\n"),
        (f"why\n{BOX}", 1, "why\n"),
        (f"why\n{OTHER}", 1, f"why\n{OTHER}"),  # this box names the process and the signal
        (BOX, 1, BOX),  # no rank has reported a reason
        (f"a warning\n{SILENT}", 1, f"a warning\n{SILENT}"),  # a warning is no reason
        (f"{SILENT}[rank 1] rank 0 died\n", 87, "[rank 1] rank 0 died\n"),
        (BOX, 85, ""),  # all ranks stopped on request
        ("50 %\r100 %\0", 0, "50 %\r100 %"),
        ("- a list\n=\nend", 0, "- a list\n=\nend"),
    ],
)
def test_mpiruns_report_of_a_failed_rank_is_omitted_if_the_rank_gave_the_reason(
    message, code, kept, capfd
):
    program = f"import sys; sys.stderr.write({message!r}); sys.exit({code})"
    # A rank that exits without a word before the end was lost.
    ends = 87 if SILENT in message else code
    assert supervise([sys.executable, "-c", program]).code == ends
    assert capfd.readouterr().err == kept


@pytest.mark.parametrize(
    ("message", "code", "expected"),
    [
        (DIED.format("Killed (signal 9)"), 9, RANK_LOST),  # output of Hydra
        (DIED.format("Segmentation fault (signal 11)"), 11, 139),
        (f"{'=' * 74}\n=   BAD TERMINATION\n=   KILLED BY SIGNAL: 9\n{'=' * 74}\n", 9, RANK_LOST),
        ("signal 9\n", 9, 9),  # exit code of the program
        ("", 137, RANK_LOST),
        ("", 139, 139),
    ],
)
def test_a_signal_that_ends_a_rank_gives_the_same_code_with_every_launcher(
    message, code, expected
):
    program = f"import sys; sys.stderr.write({message!r}); sys.exit({code})"
    assert supervise([sys.executable, "-c", program]).code == expected


@pytest.mark.parametrize(
    ("message", "is_error"),
    [
        ("a note\n", False),
        (f"{BEGUN}\n{ENDED}\n", False),
        ("hpctrain: 4 ranks take turns on 2 cores [all 4 ranks]\n", False),
        ("hpctrain: the clock is wrong [ranks 0-2, 5 of 8]\n", False),
        ("hpctrain: runs/a already contains the results of a run; remove it\n", True),
        ("hpctrain: task.py:3 in model: f()\nKeyError: 'width'\n", True),
    ],
)
def test_only_an_error_in_earlier_output_counts_as_the_reason_of_the_end(message, is_error, capfd):
    say = "import sys, time; write = sys.stderr.write; "
    program = f"{say}write({message!r}); time.sleep(1.5); write({BOX!r})"
    assert supervise([sys.executable, "-c", program]).code == 0
    assert capfd.readouterr().err == (message if is_error else f"{message}{BOX}")


BEGIN = b"Traceback (most recent call last):\n"
CAUSE = [BEGIN, b'  File "a.py", line 1, in f\n', b"    f()\n", b"KeyError: 3\n"]
TRACE = [
    BEGIN,
    b'  File "a.py", line 2, in g\n',
    b"    g()\n",
    b"ValueError: of two\n",
    b"lines\n",
]


@pytest.mark.parametrize("seed", range(20))
def test_interleaved_tracebacks_of_several_ranks_are_merged(seed):
    draw = random.Random(seed)
    # All ranks but one may be killed while they write.
    ends = [len(TRACE), *draw.choices(range(1, len(TRACE) + 1), k=draw.randrange(1, 5))]
    turns = [rank for rank, end in enumerate(ends) for _ in range(end)]
    draw.shuffle(turns)
    written = [iter(TRACE) for _ in ends]
    output = merged([next(written[rank]) for rank in turns])
    assert output == (b"".join(TRACE), len(ends))


def test_chained_exceptions_are_merged_and_different_ones_are_kept():
    whole = [
        *CAUSE,
        b"\n",
        b"During handling of the above exception, another one:\n",
        b"\n",
        *TRACE,
    ]
    assert merged(whole) == (b"".join(whole), 1)
    assert merged([line for line in whole for _ in range(3)]) == (b"".join(whole), 3)
    others = [b"KeyError: 0\n", b"KeyError: 1\n"]
    output = merged([BEGIN, *CAUSE[:3], *CAUSE[1:3], *others])
    assert output == (b"".join([*CAUSE[:3], *others]), 2)


def test_ranks_that_fail_before_init_report_the_error_once(tmp_path, capfd):
    argv = line(tmp_path, "import time; time.sleep(1); {}['no such key']")
    assert supervise(argv, environ=mpiexec.environment()).code == 1
    assert capfd.readouterr().err.count("KeyError: 'no such key'") == 1
