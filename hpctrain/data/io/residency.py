"""Residency of a file in memory, so that mapping it costs no wait for a disk."""

import ctypes
import os

_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
"""The magic numbers of tmpfs and ramfs, by statfs(2)."""
_LOCAL_FILE_SYSTEMS = (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x794C7630)
"""Of ext2 to ext4, xfs, btrfs, f2fs, zfs and overlayfs: on a disk of this node."""
_NUM_PROBES = 32


def in_memory(descriptor: int, num_bytes: int) -> bool:
    """Return whether a file lies in tmpfs, or as far as probes tell in the page cache.

    Differs from mincore(2), which tells the owner of a file only and calls every page of
    another's file resident: one byte here and there is read without waiting (``RWF_NOWAIT``).
    """
    return on_memory_file_system(descriptor) or _is_cached(descriptor, num_bytes)


def on_memory_file_system(descriptor: int) -> bool:
    """Return whether a file has no other place than memory."""
    return _file_system(descriptor) in _MEMORY_FILE_SYSTEMS


def on_local_disk(descriptor: int) -> bool:
    """Return whether a file lies on a disk of this node, as far as that is known."""
    return _file_system(descriptor) in _LOCAL_FILE_SYSTEMS


def _file_system(descriptor: int) -> int:
    # struct statfs begins with f_type, a long; the rest is less than this on any machine.
    record = ctypes.create_string_buffer(1024)
    if ctypes.CDLL(None).fstatfs(descriptor, record):
        return 0
    return ctypes.c_ulong.from_buffer(record).value & 0xFFFFFFFF


def _is_cached(descriptor: int, num_bytes: int) -> bool:
    byte = bytearray(1)
    try:
        return all(
            os.preadv(descriptor, [byte], num_bytes * probe // _NUM_PROBES, os.RWF_NOWAIT)
            for probe in range(_NUM_PROBES)
        )
    except OSError:
        # Not in the cache, or a file system that does not tell.
        return False
