"""Check that the measured load of other processes excludes the load of the program itself."""

import subprocess
import sys
import time

import pytest

from hpctrain.cluster.machine_load import LoadMeter, MachineLoad, own_s

TICKS = "cpu {user} 5 10 900 7 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n"


def test_the_load_counts_ticks_of_all_cores_that_do_not_wait(tmp_path):
    (tmp_path / "stat").write_text(TICKS.format(user=100))
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 2000.0\ncpu MHz : 3000.5\n")
    before = time.monotonic()
    meter = LoadMeter(tmp_path, tmp_path / "none")
    begun = time.monotonic()
    time.sleep(0.05)
    (tmp_path / "stat").write_text(TICKS.format(user=300).replace(" 900 ", " 999 "))
    ended = time.monotonic()
    found = meter.read()
    after = time.monotonic()
    num_cores, busy_s = found.other_cores + found.own_cores, 2.0  # 200 ticks of 10 ms
    assert 0.99 * busy_s / (after - before) < num_cores < 1.01 * busy_s / (ended - begun)
    assert found.mhz == 2500.25
    frequency = tmp_path / "cpu/cpu0/cpufreq"
    frequency.mkdir(parents=True)
    (frequency / "scaling_cur_freq").write_text("1800000\n")
    assert LoadMeter(tmp_path, tmp_path / "cpu").read().mhz == 1800


def test_missing_system_information_gives_none(tmp_path):
    assert LoadMeter(tmp_path, tmp_path).read() is None


def test_work_of_a_child_that_has_ended_is_own_work_and_not_of_others(tmp_path):
    (tmp_path / "stat").write_text(TICKS.format(user=100))
    outer_s = own_s()
    meter, inner_s = LoadMeter(tmp_path, tmp_path), own_s()
    work = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    (tmp_path / "stat").write_text(TICKS.format(user=1100))  # 10 s of all processes
    least_s, found, most_s = own_s() - inner_s, meter.read(), own_s() - outer_s
    assert least_s > 0.2
    own = found.own_cores / (found.own_cores + found.other_cores)
    assert least_s / 10.001 <= own <= most_s / 9.999


def test_a_machine_is_busy_if_other_programs_use_a_tenth_of_it_and_ranks_do_not_count():
    quiet = MachineLoad(cores=16, load=3.0, own_cores=1.0, other_cores=1.5, mhz=None)
    busy = MachineLoad(cores=16, load=3.0, own_cores=1.0, other_cores=4.6, mhz=2000.0)
    assert not quiet.is_busy
    assert busy.is_busy
    assert busy.describe() == "other processes use 4.6 of 16 cores, load 3.0, 2000 MHz"
    assert busy.without([quiet] * 3).other_cores == pytest.approx(1.6)
