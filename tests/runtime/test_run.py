"""``hpctrain.run`` from a separate script, so that its functions are in ``__main__``."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import hpctrain
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.runtime.run import RankError, run
from tests.harness import preload
from tests.harness.pace import scaled
from tests.processes import ended, wait_until

pytestmark = [pytest.mark.launches, pytest.mark.limit(120)]


@pytest.fixture(autouse=True)
def _ranks_that_have_loaded_torch(monkeypatch):
    real = mpiexec.command
    monkeypatch.setattr(
        mpiexec, "command", lambda argv, **how: real([*preload.python(), *argv[1:]], **how)
    )


def script(tmp_path, body, name="notebook.py"):
    file = tmp_path / name
    file.write_text(textwrap.dedent(body))
    # The script is outside sys.path, so ranks find its functions only by what run() passes on.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [sys.executable, str(file)], environ


def output_of(tmp_path, body):
    argv, environ = script(tmp_path, body)
    done = ended(argv, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_are_ordered_by_rank_for_functions_of_a_script(tmp_path):
    (tmp_path / "beside.py").write_text("SCALE = 10\n")
    text = output_of(
        tmp_path,
        """
        import torch
        import hpctrain as hvd
        import beside

        class Pair:
            def __init__(self, rank, total):
                self.rank, self.total = rank, total

        def work(offset, factor=1):
            mine = torch.tensor([hvd.rank() * factor + offset])
            return Pair(hvd.rank(), beside.SCALE * hvd.allreduce(mine, op=hvd.Sum).item())

        pairs = hvd.run(work, (1,), {"factor": 2}, np=2)
        print(*((isinstance(pair, Pair), pair.rank, pair.total) for pair in pairs))
        """,
    )
    # Over ranks 0, 1: 10 * sum(2 * rank + 1)
    assert text.strip() == "(True, 0, 40) (True, 1, 40)"


def place():
    return hpctrain.rank(), hpctrain.size(), hpctrain.local_size(), hpctrain.cross_rank()


def test_ranks_form_one_world_with_declared_nodes():
    before = hpctrain.is_initialized()
    assert run(place, np=3, nodes=2) == [(0, 3, 2, 0), (1, 3, 2, 0), (2, 3, 1, 1)]
    # The calling process does not initialize a world.
    assert hpctrain.is_initialized() == before


class OddError(Exception):
    """An exception that cannot be unpickled: its constructor needs two arguments."""

    def __init__(self, text, number):
        super().__init__(text)
        self.number = number


def fail(kind):
    if hpctrain.rank() == hpctrain.size() - 1:
        if kind == "value":
            raise ValueError("seven is not a prime")
        if kind == "odd":
            raise OddError("odd", 3)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "lock":
            return threading.Lock()
    hpctrain.barrier()
    return None


def test_an_exception_has_its_rank_and_remote_traceback():
    with pytest.raises(RankError, match="rank 1: ValueError: seven is not a prime") as error:
        run(fail, ("value",), np=2)
    assert error.value.rank == 1
    assert 'raise ValueError("seven is not a prime")' in error.value.remote_traceback
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("kind", "np", "message"),
    [
        ("odd", 1, "rank 0: OddError: odd"),
        ("lock", 1, "rank 0: TypeError: cannot pickle"),
        ("killed", 2, "rank 1|code"),
    ],
)
def test_unpicklable_results_and_killed_ranks_are_described(kind, np, message):
    with pytest.raises((RankError, LaunchError), match=message) as error:
        run(fail, (kind,), np=np)
    assert kind != "odd" or error.value.__cause__ is None


def test_ranks_are_ended_after_the_timeout():
    before = time.monotonic()
    with pytest.raises(LaunchError, match="all 2 ranks must finish within 5 s"):
        run(time.sleep, (100,), np=2, timeout_s=5)
    assert time.monotonic() - before < scaled(40)


def test_an_unpicklable_function_starts_no_rank():
    with pytest.raises(TypeError, match="pickle"):
        run(place, (threading.Lock(),), np=2)


def test_ctrl_c_ends_the_ranks_and_raises_keyboard_interrupt(tmp_path):
    body = """
        import time, pathlib
        import hpctrain as hvd

        def work():
            pathlib.Path(f"here-{hvd.rank()}").touch()
            time.sleep(100)

        try:
            hvd.run(work, np=2)
        except KeyboardInterrupt:
            print("interrupted")
        """
    argv, environ = script(tmp_path, body)
    with subprocess.Popen(
        argv, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 2, 60)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=30)
    assert text.endswith(b"interrupted\n")
