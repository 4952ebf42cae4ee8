"""The server imports slow modules, then forks one process for each request of a stub.

The server does not initialize MPI, starts no thread and computes nothing, because a fork does
not keep that state.
"""

import array
import contextlib
import gc
import importlib
import marshal
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from tests.harness.preload.become import become

MODULES = ("torch", "numpy", "h5py", "mpi4py", "pytest", "hypothesis", "hpctrain.cli.main")
READ_WHILE_LOADED = ("OMP_", "MKL_", "KMP_", "GOMP_", "LD_", "PYTHON", "TORCH_", "PYTORCH_")
READ_WHILE_LOADED += ("MPI4PY_", "NUMEXPR_", "HDF5_")
"""Prefixes of variables that Python or a library reads before a program starts."""
READ_LATER = ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPATH")
"""Variables with such a prefix that ``become`` can apply later."""
REFUSED = (0xFFFFFFFF).to_bytes(4, "big")


def fixed(environ):
    """Return the environment variables that have no effect if changed after the imports."""
    found = {k: v for k, v in environ.items() if k.startswith(READ_WHILE_LOADED)}
    for name in READ_LATER:
        found.pop(name, None)
    # Open MPI's launcher prepends its own library directory, which mpi4py finds without it.
    folders = found.pop("LD_LIBRARY_PATH", "").split(":")
    return found | {"folders": [f for f in folders if f not in ("", f"{sys.prefix}/lib")]}


OWN, NETWORK = fixed(os.environ), str(Path("/proc/self/ns/net").readlink())


class Children:
    """Forked processes, each with a connection to its stub and a pidfd."""

    def __init__(self, poll):
        self._poll = poll
        self._links = {}
        """By descriptor of the connection: the connection, the process id and the pidfd."""
        self._ends = {}

    def add(self, link, pid):
        pidfd = os.pidfd_open(pid)
        self._links[link.fileno()] = (link, pid, pidfd)
        self._ends[pidfd] = link.fileno()
        link.setblocking(False)
        self._poll.register(link, select.POLLIN)
        self._poll.register(pidfd, select.POLLIN)

    def forget(self):
        """Close the server's descriptors in a child."""
        for link, _, pidfd in self._links.values():
            link.close()
            os.close(pidfd)

    def serve(self, fd):
        """Send exit statuses of processes to their stubs, and signals of stubs to processes."""
        if fd in self._ends:
            link, pid, pidfd = self._links.pop(self._ends.pop(fd))
            status = os.waitpid(pid, 0)[1]
            self._poll.unregister(pidfd)
            with contextlib.suppress(KeyError):
                self._poll.unregister(link)
            with contextlib.suppress(OSError):
                link.sendall(status.to_bytes(4, "big"))
            link.close()
            os.close(pidfd)
        elif fd in self._links:
            link, _, pidfd = self._links[fd]
            try:
                # end of file: the stub was killed
                signals = link.recv(64) or bytes([signal.SIGKILL])
            except BlockingIOError:
                return
            except OSError:
                signals = bytes([signal.SIGKILL])
            for number in signals:
                signal.pidfd_send_signal(pidfd, number)
            if signal.SIGKILL in signals:
                self._poll.unregister(link)


def serve(listener):
    """Fork a child per request. Return the request in the child, finally None in the server."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLHUP)
    children = Children(poll)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                return None
            if fd != listener.fileno():
                children.serve(fd)
                continue
            link = listener.accept()[0]
            if (request := receive(link)) is None:
                continue
            pid = os.fork()
            if pid == 0:
                children.forget()
                listener.close()
                link.close()
                return request
            for received in request["received"]:
                os.close(received)
            children.add(link, pid)


def receive(link):
    """Return the request of a stub; None if the stub must start Python itself."""
    head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(4 * 250))
    received = array.array("i")
    for _, _, data in ancillary:
        received.frombytes(data[: len(data) - len(data) % 4])
    body, size = b"", int.from_bytes(head, "big")
    while len(body) < size and (more := link.recv(size - len(body))):
        body += more
    if size and len(body) == size:
        request = marshal.loads(body)
        environ = {os.fsdecode(k): os.fsdecode(v) for k, v in request["environ"].items()}
        if fixed(environ) == OWN and request["network"] == NETWORK:
            return request | {"environ": environ, "received": list(received)}
    for fd in received:
        os.close(fd)
    link.sendall(REFUSED)
    link.close()
    return None


def run(words, path):
    """Run the program that the Python arguments name."""
    program = sys.modules["__main__"].__dict__
    sys.path[:] = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p] + path
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        program.pop("__file__", None)
        exec(compile(words[1], "<string>", "exec"), program)
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = ["-m", *words[2:]], [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")


def main():
    """Run the server, and in each child the requested program."""
    path = [p for p in sys.path[1:] if p != os.environ["PYTHONPATH"]]
    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1
    assert "mpi4py.MPI" not in sys.modules
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    gc.collect()
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if request := serve(listener):
        become(request)
        random.seed()
        run(request["words"], path)


main()
