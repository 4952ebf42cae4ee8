"""Counters are read from simulated system files, and are absent where there are none."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.cluster import counters, step_records
from hpctrain.cluster.counters import CRAY, RAPL, Counters
from hpctrain.core.records import Records, read


class NVMLError(Exception):
    """Error of the stand-in of pynvml."""


def stand_in(**changes):
    """Return a stand-in of pynvml with four GPUs, whose power in W is 100 times their index."""
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
        "nvmlDeviceGetName": lambda _: b"NVIDIA H200",
        "nvmlDeviceGetUUID": "GPU-{}".format,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=83),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=2**34),
        "nvmlDeviceGetPowerUsage": lambda handle: 100_000 * handle,
    }
    return SimpleNamespace(**functions | changes)


def write(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def rapl(root, *, package, dram):
    zone = "sys/class/powercap/intel-rapl:0"
    for name, value, folder in (("package-0", package, zone), ("dram", dram, f"{zone}:0")):
        files = {"name": name, "energy_uj": value, "max_energy_range_uj": 10_000_000}
        write(root, **{f"{folder}/{file}": f"{text}\n" for file, text in files.items()})
    write(root, **{"sys/class/powercap/intel-rapl:1/name": "psys\n"})  # contains the packages


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_this_process_has_memory_bytes_and_processor_time():
    counter = Counters()
    first = counter.read()
    with Path(os.devnull).open("wb") as file:
        file.write(bytes(2**20))
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    second = counter.read()
    assert second["written_total"] - first["written_total"] >= 2**20
    assert 0.04 < second["cpu_s"] - first["cpu_s"] <= second["busy_s"] - first["busy_s"] + 0.02
    assert second["host_memory_bytes"] > 2**20
    assert second["sampled_at"] > first["sampled_at"]


def test_a_running_child_counts_as_own_work():
    first = Counters().read()
    work = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with subprocess.Popen(
        [sys.executable, "-c", f"{work}\ninput()"], stdin=subprocess.PIPE
    ) as child:
        deadline = time.monotonic() + 30
        while Counters().read()["cpu_s"] - first["cpu_s"] < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = Counters().read()["cpu_s"] - first["cpu_s"]
        child.communicate(b"\n")
    assert found > 0.3


def test_no_counter_is_no_error(tmp_path):
    assert set(Counters(tmp_path).read()) == {"sampled_at"}
    write(tmp_path, **{"sys/cray/pm_counters/energy": "unavailable\n"})
    assert set(Counters(tmp_path).read()) == {"sampled_at"}


def test_cray_counters_replace_rapl_because_they_include_the_processors(tmp_path):
    rapl(tmp_path, package=5_000_000, dram=1_000_000)
    write(tmp_path, **{"sys/cray/pm_counters/energy": "123456 J 1700000000000000 us\n"})
    found = Counters(tmp_path).read()
    assert (found["node_joules"], found["node_source"]) == (123456.0, CRAY)


def test_rapl_adds_packages_and_memory_and_continues_after_an_overflow(tmp_path):
    rapl(tmp_path, package=5_000_000, dram=1_000_000)
    counter = Counters(tmp_path)
    assert counter.read()["node_joules"] == 0.0
    rapl(tmp_path, package=9_000_000, dram=1_500_000)
    found = counter.read()
    assert (found["node_joules"], found["node_source"]) == (pytest.approx(4.5), RAPL)
    rapl(tmp_path, package=2_000_000, dram=2_000_000)  # 9 J to 10 J, and 0 J to 2 J
    assert counter.read()["node_joules"] == pytest.approx(4.5 + 3.0 + 0.5)


def test_the_clock_is_of_a_core_of_this_process(tmp_path):
    core = min(os.sched_getaffinity(0))
    file = f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
    write(tmp_path, **{file: "2450000\n"})
    assert Counters(tmp_path).read()["mhz"] == 2450.0


@pytest.mark.parametrize(
    ("visible", "local_rank", "watts"),
    [("", "0", 0.0), ("", "3", 300.0), ("2,3", "1", 300.0), ("GPU-x1", "1", 100.0)],
)
def test_an_nvidia_gpu_is_that_of_the_local_rank(
    tmp_path, monkeypatch, visible, local_rank, watts
):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name, value in (
        ("RANK", "0"),
        ("SIZE", "4"),
        ("LOCAL_RANK", local_rank),
        ("LOCAL_SIZE", "4"),
    ):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found = Counters(tmp_path).read()
    assert found["gpu_w"] == watts
    assert (found["gpu"], found["gpu_busy"]) == ("NVIDIA H200", 0.83)
    assert (found["gpu_memory_bytes"], found["gpu_source"]) == (2**34, "NVML")


def failing(*_):
    raise NVMLError


def test_counters_that_a_gpu_lacks_are_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlDeviceGetUtilizationRates=failing))
    found = Counters(tmp_path).read()
    assert "gpu_busy" not in found
    assert found["gpu_memory_bytes"] == 2**34
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlInit=failing))
    assert set(Counters(tmp_path).read()) == {"sampled_at"}
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlDeviceGetCount=lambda: 0))
    assert set(Counters(tmp_path).read()) == {"sampled_at"}


def test_an_amd_gpu_is_read_from_its_files(tmp_path, monkeypatch):
    for card in (0, 1, 10):
        device = f"sys/class/drm/card{card}/device"
        files = {
            "gpu_busy_percent": f"{card}\n",
            "mem_info_vram_used": "1024\n",
            "product_name": "AMD Instinct MI250X\n",
            "hwmon/hwmon3/power1_average": f"{card}000000\n",
        }
        write(tmp_path, **{f"{device}/{name}": text for name, text in files.items()})
    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2")
    found = Counters(tmp_path).read()
    assert (found["gpu"], found["gpu_id"]) == ("AMD Instinct MI250X", "card10")
    assert (found["gpu_busy"], found["gpu_w"], found["gpu_memory_bytes"]) == (0.1, 10.0, 1024)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "7")
    assert "gpu" not in Counters(tmp_path).read()


def test_samples_take_at_most_a_hundredth_of_the_time(tmp_path, monkeypatch):
    slow = SimpleNamespace(read=lambda: time.sleep(0.02) or {"sampled_at": time.monotonic()})
    monkeypatch.setattr(counters, "Counters", lambda: slow)
    monkeypatch.setattr(step_records, "_PERIOD_S", 0.0)
    with Records(tmp_path / "host-1.jsonl") as records:
        sampler = step_records._Sampler(records)
        time.sleep(1.0)
        sampler.stop()
    times = [each["sampled_at"] for each in read(records.path, key="sampled_at")]
    assert len(times) == 2  # the first, and the last by stop()
    assert times[1] - times[0] > 0.5


def test_the_default_folder_can_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "ROOT", tmp_path)
    assert set(Counters().read()) == {"sampled_at"}
