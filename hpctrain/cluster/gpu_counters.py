"""Counters of the GPU of this rank: utilisation, memory and power."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster.binding import gpu_of
from hpctrain.cluster.env import launched

_Counter = Callable[[], Mapping[str, Any]]


def nvidia_gpu() -> _Counter | None:
    """Return the counter of this rank's NVIDIA GPU; None without GPU or ``nvidia-ml-py``."""
    try:
        import pynvml  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        chosen = _of_rank(pynvml.nvmlDeviceGetCount())
        if not chosen:
            return None
        if chosen.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(chosen))
        else:  # GPU-UUID or MIG-UUID
            handle = pynvml.nvmlDeviceGetHandleByUUID(chosen)
        fixed = {"gpu": _text(pynvml.nvmlDeviceGetName(handle)), "gpu_source": "NVML"}
        fixed["gpu_id"] = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return None

    def asked(function: Any, read: Callable[[Any], float]) -> float | None:
        try:  # a counter may be missing, such as the utilisation of a MIG instance
            return read(function(handle))
        except pynvml.NVMLError:
            return None

    def read() -> Mapping[str, Any]:
        busy = asked(pynvml.nvmlDeviceGetUtilizationRates, lambda each: each.gpu / 100)
        used = asked(pynvml.nvmlDeviceGetMemoryInfo, lambda each: each.used)
        power = asked(pynvml.nvmlDeviceGetPowerUsage, lambda each: each / 1000)
        found = {"gpu_busy": busy, "gpu_memory_bytes": used, "gpu_w": power}
        return fixed | {name: value for name, value in found.items() if value is not None}

    return read


def amd_gpu(root: Path) -> _Counter | None:
    """Return the counter of this rank's AMD GPU, from ROCm SMI's files; None without a GPU."""
    found = (root / "sys/class/drm").glob("card[0-9]*/device/gpu_busy_percent")
    cards = sorted((each.parent for each in found), key=lambda each: int(each.parent.name[4:]))
    chosen = _of_rank(len(cards))
    if not chosen.isdigit() or int(chosen) >= len(cards):
        return None
    card = cards[int(chosen)]
    names = ("power1_average", "power1_input")  # newer kernels have only the second
    powers = [file for name in names for file in sorted(card.glob(f"hwmon/hwmon*/{name}"))]
    fixed = {"gpu": "AMD GPU", "gpu_id": card.parent.name, "gpu_source": "ROCm SMI"}
    if (card / "product_name").exists():
        fixed["gpu"] = (card / "product_name").read_text().strip() or fixed["gpu"]

    def read() -> Mapping[str, Any]:
        sample: dict[str, Any] = {"gpu_busy": int((card / "gpu_busy_percent").read_text()) / 100}
        sample["gpu_memory_bytes"] = int((card / "mem_info_vram_used").read_text())
        if powers:
            sample["gpu_w"] = int(powers[0].read_text()) / 1e6
        return fixed | sample

    return read


def _of_rank(num_gpus: int) -> str:
    """Return the name of the GPU of this rank, an index or a UUID; empty without a GPU."""
    here = launched()
    return gpu_of((here.local_rank if here else None) or 0, num_gpus) if num_gpus else ""


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older versions return bytes
