"""The processes of a decode pool: a server without MPI and threads, and the workers it forks.

The server is a program of its own and not a fork of the rank: a fork copies what threads and MPI
hold at that instant. It never sees the user's script, whose ``from mpi4py import MPI`` would join
a world that it is no part of. Workers are forks of the server, so that torch is imported once.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from hpctrain.data.order.draws import begin_generators
from hpctrain.data.workers.notes import Notes
from hpctrain.data.workers.shm_message import Outbox, portable

GRACE_S = 1.0
"""How long a worker may go on after the rank has closed the pool, or is dead."""
STACK_S = 2.0
"""How long a worker that must end may take to write its stack before it is killed."""


def serve(workers: list[int], notes: list[int], control: int) -> None:
    """Fork the workers, tell the rank which ones die, and end them all when the rank is gone.

    The numbers are descriptors: a socket to the rank and memory for ``Notes`` for each worker,
    and a socket for the server itself, which ends the worker whose number comes.
    """
    for kind in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(kind, signal.SIG_IGN)  # meant for the rank, which ends us by its sockets
    import_module("hpctrain.data.reader")  # once, for all of them
    alive: dict[int, int] = {}
    for number, descriptor in enumerate(workers):
        if not (pid := os.fork()):
            # Another end of a socket in here would hide the death of its owner.
            for other in {*workers, control} - {descriptor}:
                os.close(other)
            _run(descriptor, notes[number])
        alive[pid] = number
    for descriptor in workers:
        os.close(descriptor)
    rank = Connection(control)
    threading.Thread(target=_end_with, args=(rank, alive), daemon=True).start()
    while alive:
        # The process stays, so that nobody else gets its number, until it is out of the table.
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid  # type: ignore[union-attr]
        number = alive.pop(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # the rank may be gone
            rank.send((number, pid, status))
    os._exit(0)  # at once: there is nothing to tidy up


def _end_with(rank: "Connection[Any, Any]", alive: dict[int, int]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            number = rank.recv()
            for pid in [pid for pid, other in list(alive.items()) if other == number]:
                _abort(pid, alive)
    time.sleep(GRACE_S)  # idle workers have seen the end of their sockets meanwhile
    for pid in list(alive):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _abort(pid: int, alive: dict[int, int]) -> None:
    """End a worker, which writes its stack before if it can."""
    end = time.monotonic() + STACK_S
    # A worker that was stopped writes its stack once it goes on.
    for kind in (signal.SIGABRT, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
    while pid in alive and time.monotonic() < end:
        time.sleep(0.01)
    if pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(descriptor: int, notes: int) -> None:
    """Work, then end without the exit handlers of the server's copy."""
    code = 1
    try:
        _work(Connection(descriptor), Notes(notes))
        code = 0
    except (EOFError, ConnectionError):
        code = 0  # the rank is gone, or has closed the pool
    except BaseException:  # this process has nobody above
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(rank: "Connection[Any, Any]", notes: Notes) -> None:
    """Load the task, then answer every request with a parcel or a failure."""
    notes.catch_signals()
    torch.set_num_threads(1)
    outbox = Outbox()
    rank.send("started")
    try:
        task = pickle.loads(rank.recv_bytes())  # noqa: S301 - of the rank that started us
    except Exception as error:  # what a user's module raises at its import
        rank.send(_failure(error))
        return
    rank.send("ready")
    while True:
        offered, surplus, indices, epoch, seed = rank.recv()
        outbox.forget(surplus)
        try:
            # Random numbers depend on the samples, not on which worker happened to get them.
            begin_generators(indices, epoch, seed)
            value = task(indices, epoch, seed, notes.begin_sample)
            parcel, descriptor = outbox.pack(value, offered)
            del value
        except Exception as error:  # the rank raises it
            rank.send(_failure(error))
            continue
        finally:
            notes.end_samples()
        rank.send(parcel)
        if descriptor is not None:
            reduction.send_handle(rank, descriptor, 0)
            os.close(descriptor)


def _failure(error: Exception) -> tuple[Exception, str]:
    return portable(error), "".join(traceback.format_exception(error))
