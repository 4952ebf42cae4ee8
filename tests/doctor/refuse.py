"""Run a command for which the kernel rejects one system call, or blocks in this call forever.

``python refuse.py flock ENOLCK command ...`` acts like a file system without locks, ``python
refuse.py flock hang command ...`` like one whose lock server is unreachable.
"""

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys

NUMBERS = {
    "x86_64": {
        "fallocate": 285,
        "flock": 73,
        "memfd_create": 319,
        "process_vm_readv": 310,
        "seccomp": 317,
    },
    "aarch64": {
        "fallocate": 47,
        "flock": 32,
        "memfd_create": 279,
        "process_vm_readv": 270,
        "seccomp": 277,
    },
}[platform.machine()]

ALLOW, FAIL, ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, NEW_LISTENER = 38, 1, 8


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def install(call: str, answer: str) -> int:
    """Filter the calls of this process and its children; return the file that blocks them."""
    action = ASK if answer == "hang" else FAIL | getattr(errno, answer)
    lines = [
        (LOAD_NUMBER, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 1, NUMBERS[call]),
        (RETURN, 0, 0, action),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    flags = NEW_LISTENER if answer == "hang" else 0
    result = libc.syscall(
        NUMBERS["seccomp"], SET_MODE_FILTER, ctypes.c_ulong(flags), ctypes.byref(program)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    install(sys.argv[1], sys.argv[2])
    sys.exit(subprocess.run(sys.argv[3:], check=False).returncode)
