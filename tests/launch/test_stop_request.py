"""A launch that is asked to stop lets ranks save that can, and bounds the time of all others."""

import contextlib
import os
import pty
import signal
import sys

import pytest

from tests.launch.started import line, ranks_are_gone, start, wait_for

pytestmark = [pytest.mark.launches, pytest.mark.limit(60)]


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
    "signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
)
def test_a_signal_asks_ranks_that_can_save_and_their_code_is_passed_on(tmp_path, signal_number):
    process = start(tmp_path, SAVES.format(folder=str(tmp_path)), grace_s=0.2)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal_number)
    assert process.wait(30) == 85
    # As SIGUSR1, and they know why; that one itself is only handed on.
    why = None if signal_number == signal.SIGUSR1 else signal_number.name
    said = [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)]
    assert [text.split()[0] for text in said] == ["10", "10"]
    assert why is None or {text.split()[1] for text in said} == {why}
    assert ranks_are_gone(tmp_path)


def test_ranks_that_were_asked_and_hang_are_killed_when_their_time_is_up(tmp_path):
    code = SAVES.format(folder=str(tmp_path)).replace("time.sleep(1)", "time.sleep(50)")
    process = start(tmp_path, code, grace_s=0.5, save_s=1.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) not in (0, 85)
    assert ranks_are_gone(tmp_path)


def test_an_mpirun_that_was_killed_leaves_no_files(tmp_path, monkeypatch):
    # The next one with its process id would fail on them.
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


def test_a_rank_that_handles_sigterm_alone_is_not_sent_sigusr1(tmp_path):
    # Its SIGUSR1 would be the end of it.
    process = start(tmp_path, ONLY_TERM.format(folder=str(tmp_path)), grace_s=3.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=15)
    assert names(tmp_path, "cleaned") == 2
    assert ranks_are_gone(tmp_path)


def test_one_rank_that_cannot_save_is_enough_to_end_all_as_before(tmp_path):
    process = start(
        tmp_path, f"if rank: time.sleep(50)\n{SAVES.format(folder=str(tmp_path))}", grace_s=0.5
    )
    wait_for(lambda: names(tmp_path, "ready") == 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) not in (0, 85)
    assert ranks_are_gone(tmp_path)


def on_a_terminal(tmp_path, code, **how):
    """Supervise in the foreground of a terminal of its own; return its pid and the terminal."""
    program = (
        "import sys; from hpctrain.launch import mpiexec; "
        "from hpctrain.launch.supervise import supervise\n"
        f"try: sys.exit(supervise({line(tmp_path, code)!r}, environ=mpiexec.environment(), "
        f"**{how!r}))\nexcept KeyboardInterrupt: sys.exit(130)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.execv(sys.executable, [sys.executable, "-c", program])
        os._exit(1)
    return pid, terminal


def code_of(pid, terminal):
    """Read the terminal until the process ends; return its exit code and what was written."""
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(terminal, 4096):
            text += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


@pytest.mark.parametrize(("saves", "expected"), [(True, 85), (False, 130)])
def test_ctrl_c_on_a_terminal_lets_ranks_save_and_leaves_nothing(tmp_path, saves, expected):
    code = SAVES.format(folder=str(tmp_path))
    if not saves:
        code = f"Path({str(tmp_path)!r}, f'ready-{{rank}}').touch(); time.sleep(50)"
    pid, terminal = on_a_terminal(tmp_path, code, grace_s=2.0)
    wait_for(lambda: names(tmp_path, "ready") == 2)
    os.write(terminal, b"\x03")
    code, text = code_of(pid, terminal)
    assert code == expected, text
    assert ("asked to save" in text) == saves
    assert ranks_are_gone(tmp_path)


def test_what_is_typed_on_a_terminal_reaches_rank_0(tmp_path):
    code = "if not rank: print('typed', sys.stdin.readline().upper(), flush=True)"
    pid, terminal = on_a_terminal(tmp_path, code)
    wait_for(lambda: names(tmp_path, "pid") == 2)
    os.write(terminal, b"hello\n")
    code, text = code_of(pid, terminal)
    assert code == 0, text
    assert "typed HELLO" in text
