"""Who a process is to others on its machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.process import identity
from hpctrain.core.libc import sharpen_sleep

TELL = "from hpctrain.cluster.process import identity; print(identity().namespace)"


def told_by(*command):
    done = subprocess.run([*command, sys.executable, "-c", TELL], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_processes_of_one_machine_see_each_other():
    assert identity().pid == os.getpid()
    assert told_by() == str(identity().namespace)


@pytest.mark.requires("cluster")
def test_a_container_has_ids_of_its_own():
    unshare = shutil.which("unshare")
    assert told_by(unshare, "--pid", "--fork") != str(identity().namespace)


def test_a_short_sleep_can_be_had():
    slack = Path("/proc/self/timerslack_ns")
    before = int(slack.read_text())
    sharpen_sleep()
    assert int(slack.read_text()) == 1 < before
