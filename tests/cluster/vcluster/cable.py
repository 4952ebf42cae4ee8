"""Simulate a long cable: forward frames between two network devices after a delay.

The switch runs this file as a program, ``python cable.py LEFT RIGHT SECONDS``. The program makes
two TAP devices, prints ``ready``, and forwards every frame in both directions after SECONDS, in
order.
"""

import errno
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02  # of ``linux/if_tun.h``

FRAME_BYTES = 1 << 17  # more than the largest frame with its virtio header


def open_tap(name: str) -> int:
    """Make a TAP device and return its file; closing the file removes the device.

    Frames are forwarded as the kernel of the sender wrote them: large, with incomplete checksums.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return tap


class Direction:
    """Hold one direction of the cable: the frames in flight, and their due times."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self.target, self.delay_s = source, target, delay_s
        self.frames: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read a frame from the source."""
        self.frames.append((time.monotonic() + self.delay_s, os.read(self.source, FRAME_BYTES)))

    def deliver(self) -> float | None:
        """Write the frames that are due and return the seconds until the next one, or None."""
        while self.frames:
            left_s = self.frames[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            try:
                os.write(self.target, self.frames.popleft()[1])
            except OSError as error:
                if error.errno != errno.EIO:  # the device is down: the frame is lost
                    raise
        return None


def carry(left: int, right: int, delay_s: float) -> None:
    """Forward frames until the process is killed."""
    directions = Direction(left, right, delay_s), Direction(right, left, delay_s)
    with selectors.DefaultSelector() as selector:
        for direction in directions:
            selector.register(direction.source, selectors.EVENT_READ, direction)
        while True:
            due = [left_s for d in directions if (left_s := d.deliver()) is not None]
            for key, _ in selector.select(min(due, default=None)):
                key.data.take()


if __name__ == "__main__":
    ends = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(*ends, float(sys.argv[3]))
