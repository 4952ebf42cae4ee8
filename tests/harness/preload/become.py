"""Give a forked process the state of the stub that requested it."""

import os
import resource
import signal
import sys


def become(request):
    """Take over process group, signals, limits, descriptors and environment of the stub."""
    try:
        os.setpgid(0, os.getpgid(request["pid"]))
    except OSError:  # The stub is in another session, so signals to its group reach only the stub.
        os.setpgid(0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *request["ignored"]):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    for limit in range(16):
        resource.setrlimit(limit, resource.prlimit(request["pid"], limit))
    os.sched_setaffinity(0, request["affinity"])
    os.umask(request["umask"])
    os.chdir(request["folder"])
    sys.modules["hpctrain.core.paths"].START = request["folder"]
    _place(request["received"], request["fds"])
    os.environ.clear()
    os.environ.update(request["environ"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr.reconfigure(write_through=unbuffered)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(asked) if asked.isdigit() else len(request["affinity"])
    sys.modules["torch"].set_num_threads(num_threads)
    sys.modules["numpy"].random.seed()


def _place(received, numbers):
    """Give each received file descriptor the number that the descriptor has in the stub."""
    top = max([*numbers, *received]) + 1
    for i, (fd, number) in enumerate(zip(received, numbers, strict=True)):
        os.dup2(fd, top + i)
        if fd not in numbers:
            os.close(fd)
        received[i] = (top + i, number)
    for high, number in received:
        os.dup2(high, number, inheritable=True)
        os.close(high)
