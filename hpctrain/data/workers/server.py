"""The processes of a decode pool: a server without MPI and threads, and the workers it forks.

The server is a program of its own and not a fork of the rank: a fork copies what threads and MPI
hold at that instant. It never sees the user's script, whose ``from mpi4py import MPI`` would join
a world that it is no part of. Workers are forks of the server, so that torch is imported once.
"""

import contextlib
import os
import pickle
import signal
import traceback
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

from hpctrain.data.transform import begin_generators
from hpctrain.data.workers.processes import Notes
from hpctrain.data.workers.shm_message import Outbox, portable

_Alive: TypeAlias = dict[int, tuple[int, int]]
"""Number and process of each worker, by a pipe that ends with it."""

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
    alive: _Alive = {}
    for number, descriptor in enumerate(workers):
        end, held = os.pipe()
        if not (pid := os.fork()):
            # Another end of a socket in here would hide the death of its owner.
            for other in {*workers[number:], control} - {descriptor}:
                os.close(other)
            _run(descriptor, notes[number])
        for ours in (descriptor, held):
            os.close(ours)
        alive[end] = number, pid
    with contextlib.suppress(OSError, EOFError):  # the rank is gone, or has closed the pool
        _watch(Connection(control), alive)
    ends = set(alive)
    while ends and (ended := wait([*ends], GRACE_S)):  # idle workers have seen their sockets
        ends.difference_update(ended)
    os.killpg(0, signal.SIGKILL)


def _watch(rank: "Connection[Any, Any]", alive: _Alive) -> None:
    """Tell the rank of each end; end the worker that it names, which writes its stack before."""
    while True:
        for ready in wait([rank, *alive]):
            if ready is rank:
                named = rank.recv()
                for end in [end for end, (number, _) in alive.items() if number == named]:
                    _abort(alive[end][1], end)
            elif isinstance(ready, int):
                number, pid = alive.pop(ready)
                rank.send((number, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _abort(pid: int, end: int) -> None:
    # A worker that was stopped writes its stack once it goes on.
    for kind in (signal.SIGABRT, signal.SIGCONT):
        os.kill(pid, kind)
    if not wait([end], STACK_S):
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
