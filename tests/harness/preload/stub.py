"""The process that mpirun starts in place of a rank: asks the server to fork the rank.

    python -I -S stub.py SOCKET ARGS...   ARGS as for Python: FILE ..., -m MODULE ..., -c CODE ...

The stub forwards signals to the rank, and exits with its exit code. It imports only built-in
modules, because it must start fast and lives as long as the rank.
"""

import _signal
import _socket
import marshal
import posix
import sys

REFUSED = 0xFFFFFFFF
RELAYED = (
    *(_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM, _signal.SIGQUIT),
    *(_signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGCONT, _signal.SIGTSTP),
)


def run_alone(words):
    posix.execv(sys.executable, [sys.executable, *words])


def main():
    path, words = sys.argv[1], sys.argv[2:]
    if not words or (words[0][0] == "-" and words[0] not in ("-c", "-m")):
        run_alone(words)
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        link.connect(path)
    except OSError:
        run_alone(words)
    fds = sorted({int(name) for name in posix.listdir("/proc/self/fd")} - {link.fileno()})
    fds = [fd for fd in fds if is_open(fd)]
    ignored = [n for n in RELAYED if _signal.getsignal(n) == _signal.SIG_IGN]
    umask = posix.umask(0)
    posix.umask(umask)
    request = marshal.dumps(
        {
            "words": words,
            "folder": posix.getcwd(),
            "environ": dict(posix.environ),
            "fds": fds,
            "affinity": sorted(posix.sched_getaffinity(0)),
            "pid": posix.getpid(),
            "umask": umask,
            "ignored": [int(n) for n in ignored],
            "mask": [int(n) for n in _signal.pthread_sigmask(0, [])],
            "network": posix.readlink("/proc/self/ns/net"),
        }
    )
    for number in RELAYED:
        if number not in ignored:
            _signal.signal(number, lambda n, _: link.send(bytes([n])))
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    head = len(request).to_bytes(4, "big")
    link.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    link.sendall(request)
    status = int.from_bytes(answer_of(link), "big")
    if status == REFUSED:
        run_alone(words)
    if posix.WIFSIGNALED(status):
        die(posix.WTERMSIG(status))
    posix._exit(posix.WEXITSTATUS(status))


def answer_of(link):
    answer = b""
    while len(answer) < 4:
        try:
            more = link.recv(4 - len(answer))
        except ConnectionResetError:
            more = b""
        if not more:  # The server has exited, and its children with it.
            die(_signal.SIGKILL)
        answer += more
    return answer


def is_open(fd):
    try:
        posix.fstat(fd)
    except OSError:
        return False
    return True


def die(number):
    if number not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
    posix.kill(posix.getpid(), number)
    posix._exit(128 + number)


main()
