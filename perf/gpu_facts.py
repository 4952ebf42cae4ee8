"""Capabilities of a machine with a GPU, for ``gpu_check.py``: facts, shared memory, copies.

    python perf/gpu_facts.py card
    python perf/gpu_facts.py sums
    hpctrain launch -n 2 -- python perf/gpu_facts.py between
    hpctrain launch -n 4 -- python perf/gpu_facts.py copies

Each part prints its finding as a line of JSON. Node memory is a memfd that the ranks map; if it is
registered with CUDA, copies are as fast as with pinned memory, which ``copies`` compares.
"""

import ctypes
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_finding import Finding, reported_errors
from torch import Tensor

from hpctrain.comm.device import device_of
from hpctrain.comm.node.node_memory import reserve
from hpctrain.comm.node.segments import map_shared
from hpctrain.comm.ops import Op, combination, combine_to
from hpctrain.core.units import KIB, MIB

SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LARGE = MIB  # rates are compared from this size on: smaller copies measure latency
PROCESSES = (1, 2, 4)
ROUNDS = 5
LEAST_OF_PINNED = 0.95

PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
ATTRIBUTES = {
    "host memory can be registered": 99,
    "registered memory has one address": 91,
    "virtual memory management": 102,
    "memory as a file descriptor": 103,
    "GPUDirect RDMA": 116,
    "events between processes": 125,
    "async engines": 40,
}
"""Names of ``CUdevice_attribute``, by number."""

Work = Callable[[], object]


def main() -> None:
    """Run the part that the command line names."""
    parts: dict[str, Callable[[], Finding]] = {
        "card": card,
        "between": between,
        "copies": copies,
        "sums": sums,
    }
    parts[sys.argv[1]]().write_on_rank_0()


# --- one process ---------------------------------------------------------------------------------


def card() -> Finding:
    """Return versions, the GPU and its link, and whether node memory can be registered."""
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "cards": torch.cuda.device_count(),
        "capability": "sm_" + "".join(map(str, torch.cuda.get_device_capability())),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }
    found |= link() | attributes()
    registered = registered_memfd()
    return Finding(
        "pass" if registered["memfd"] == "registered" else "fail", "", found | registered
    )


def link() -> dict[str, Any]:
    """Return driver, link and topology from nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return {"nvidia-smi": "none"}
    names = {
        "driver": "driver_version",
        "PCIe generation": "pcie.link.gen.max",
        "PCIe width": "pcie.link.width.max",
        "memory": "memory.total",
        "compute mode": "compute_mode",
    }
    line = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    words = [word.strip() for word in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(names, words, strict=False)) or {"nvidia-smi": done.stderr.strip()}


def attributes() -> dict[str, int]:
    """Return device attributes of the driver that the runtime API does not name."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.init()
    found = {}
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int(-1)
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, torch.cuda.current_device())
        found[name] = value.value
    return found


class NodeMemory:
    """A mapped memfd, registered with CUDA by default."""

    def __init__(self, num_bytes: int, *, is_registered: bool = True) -> None:
        self.segment = map_shared(reserve(num_bytes), num_bytes)
        self.address, self.seconds = ctypes.addressof(self.segment), 0.0
        self.flat = torch.frombuffer(self.segment, dtype=torch.uint8)
        if is_registered:
            torch.cuda.synchronize()
            start = time.perf_counter()
            refused = int(torch.cuda.cudart().cudaHostRegister(self.address, num_bytes, PORTABLE))
            self.seconds = time.perf_counter() - start
            if refused:
                raise OSError(f"cudaHostRegister of a memfd failed with {refused}")

    def close(self) -> None:
        """Unregister the memory before it is unmapped."""
        torch.cuda.cudart().cudaHostUnregister(self.address)


def registered_memfd() -> dict[str, Any]:
    """Register a memfd, copy in both directions, and check whether torch regards it as pinned."""
    num_bytes = 256 * MIB
    try:
        memory = NodeMemory(num_bytes)
    except OSError as error:
        return {"memfd": str(error)}
    source = torch.randint(255, (num_bytes,), dtype=torch.uint8, device="cuda")
    memory.flat.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    back = memory.flat.to("cuda", non_blocking=True)
    right = torch.equal(back, source) and torch.equal(memory.flat, source.cpu())
    side = torch.cuda.Stream()
    torch.cuda._sleep(200_000_000)  # noqa: SLF001 - about 0.1 s
    start = time.perf_counter()
    memory.flat.copy_(source, non_blocking=True)
    is_asynchronous = time.perf_counter() - start < 0.01
    with torch.cuda.stream(side):
        found = {
            "memfd": "registered" if right and is_asynchronous else "copies wrong or block",
            "memfd is asynchronous": is_asynchronous,
            "memfd is_pinned()": memory.flat.is_pinned(),
            "memfd registers GiB/s": num_bytes / 2**30 / memory.seconds,
        }
    torch.cuda.synchronize()
    memory.close()
    return found


def sums() -> Finding:
    """Compare the kernel that sums buckets of several ranks with operations of torch."""
    rows, num_wrong, num_bytes = [], 0, 64 * MIB
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        how = combination(dtype, Op.SUM)
        for num_ranks in (2, 4, 8):
            numel = num_bytes // dtype.itemsize - 5
            drawn = (torch.randn(numel, device="cuda") * 10 for _ in range(num_ranks))
            parts = [values.to(dtype) for values in drawn]
            by_torch, total = [part.clone() for part in parts], torch.empty_like(parts[0])
            kernel = device_of(parts[0].device).sum_of(parts, how)
            if kernel is None:
                return Finding("fail", "no kernel: is Triton there, and a C compiler?")

            def with_torch(parts=by_torch, total=total, how=how) -> None:
                combine_to(total, parts, how, 0.25)
                for part in parts:
                    part.copy_(total)

            kernel(0.25)
            with_torch()
            pairs = zip(parts, by_torch, strict=True)
            wrong = sum(int((one != other).sum()) for one, other in pairs)
            num_wrong += wrong
            moved = 2 * num_ranks * parts[0].nbytes / 1e6
            rows.append(
                {
                    "dtype": str(dtype),
                    "ranks": num_ranks,
                    "values that differ": wrong,
                    "kernel GB/s": round(moved / milliseconds(lambda kernel=kernel: kernel(0.25))),
                    "torch GB/s": round(moved / milliseconds(with_torch)),
                }
            )
    says = f"{num_wrong} values differ" if num_wrong else ""
    return Finding("fail" if num_wrong else "pass", says, {"rows": rows})


def milliseconds(work: Work) -> float:
    """Return the median time of work on the GPU."""
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


# --- two processes -------------------------------------------------------------------------------


class Handle(ctypes.Structure):
    """A ``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Runtime:
    """The libcudart that torch has loaded, called by ctypes."""

    def __init__(self) -> None:
        torch.cuda.init()
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = [line.split(maxsplit=5)[-1] for line in lines if re.search(r"libcudart\.so", line)]
        self.library = ctypes.CDLL(names[0])

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Raises ``OSError`` if it returns an error."""
        if refused := getattr(self.library, name)(*arguments):
            raise OSError(f"{name} failed with {refused}")

    def allocate(self, num_bytes: int) -> int:
        """Return the address of plain memory of the GPU."""
        pointer = ctypes.c_void_p()
        self("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return int(pointer.value or 0)

    def offer(self, address: int) -> bytes:
        """Return the handle with which another process can map the memory."""
        handle = Handle()
        self("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, offered: bytes) -> int:
        """Map the memory of another process."""
        pointer, handle = ctypes.c_void_p(), Handle.from_buffer_copy(offered)
        self("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(1))
        return int(pointer.value or 0)


class Raw:
    """Memory of the GPU at an address, for ``torch.as_tensor``."""

    def __init__(self, address: int, numel: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (numel,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def between() -> Finding:
    """Share memory and events of the GPU between two processes."""
    from mpi4py import MPI  # noqa: PLC0415 - MPI is started where it is needed only

    comm = MPI.COMM_WORLD
    torch.cuda.init()
    found = {}
    for name, part in (("memory", shared_memory), ("events", shared_events)):
        try:
            mine = "" if part(comm) else "wrong values"
        except (OSError, RuntimeError) as error:
            mine = f"{type(error).__name__}: {error}"
        found[name] = next(filter(None, comm.allgather(mine)), "works")
    works = all(text == "works" for text in found.values())
    return Finding("pass" if works else "fail", "", found)


def shared_memory(comm: Any) -> bool:
    """Let each rank write into the memory of the other; return whether the values arrived."""
    runtime, numel = Runtime(), 1 << 20
    own = runtime.allocate(4 * numel)
    offers = comm.allgather(runtime.offer(own))
    other = runtime.open(offers[1 - comm.rank])
    mine = torch.as_tensor(Raw(own, numel), device="cuda")
    theirs = torch.as_tensor(Raw(other, numel), device="cuda")
    expected = torch.arange(numel, dtype=torch.float32, device="cuda")
    theirs.copy_(expected + comm.rank)
    torch.cuda.synchronize()
    comm.Barrier()
    right = torch.equal(mine, expected + 1 - comm.rank)
    comm.Barrier()
    runtime("cudaIpcCloseMemHandle", ctypes.c_void_p(other))
    return right


def shared_events(comm: Any) -> bool:
    """Let the stream of rank 1 wait for the delayed stream of rank 0, and read its memory."""
    runtime, numel, right = Runtime(), 1 << 20, True
    own = runtime.allocate(4 * numel)
    event = torch.cuda.Event(interprocess=True)
    event.record()
    offers = comm.allgather((runtime.offer(own), event.ipc_handle()))
    if comm.rank == 0:
        values = torch.as_tensor(Raw(own, numel), device="cuda")
    else:
        values = torch.as_tensor(Raw(runtime.open(offers[0][0]), numel), device="cuda")
        event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), offers[0][1])
    for turn in range(1, 11):
        comm.Barrier()
        if comm.rank == 0:
            torch.cuda._sleep(20_000_000)  # noqa: SLF001 - about 10 ms
            values.fill_(turn)
            event.record()
        comm.Barrier()
        if comm.rank == 1:
            event.wait()
            right &= bool((values == turn).all())
    comm.Barrier()
    return right


# --- copies --------------------------------------------------------------------------------------


def copies() -> Finding:
    """Measure copies from and to the GPU, of registered node memory against pinned memory."""
    from mpi4py import MPI  # noqa: PLC0415 - MPI is started where it is needed only

    comm, most = MPI.COMM_WORLD, max(SIZES)
    device = [torch.empty(most, dtype=torch.uint8, device="cuda") for _ in range(2)]
    memories = [NodeMemory(most) for _ in range(2)]
    kinds = {
        "memfd": [memory.flat for memory in memories],
        "pinned": [torch.zeros(most, dtype=torch.uint8).pin_memory() for _ in range(2)],
    }
    rows = []
    for processes in [number for number in PROCESSES if number <= comm.size]:
        part = comm.Split(0 if comm.rank < processes else MPI.UNDEFINED)
        if comm.rank < processes:
            for num_bytes in SIZES:
                rows += measured(part, num_bytes, device, kinds)
        comm.Barrier()
    for memory in memories:
        memory.close()
    counted = [row for row in rows if row["processes"] == 1 and row["bytes"] >= LARGE]
    shares = {
        direction: min(
            (row[direction]["memfd"] / row[direction]["pinned"] for row in counted), default=1.0
        )
        for direction in ("to host", "to card", "both")
    }  # of rank 0, which is in all rows
    figures = {"memfd / pinned": shares, "rows": [flattened(row) for row in rows]}
    worst = min(shares.values())
    verdict = "pass" if worst >= LEAST_OF_PINNED else "fail"
    return Finding(verdict, f"memfd at least {worst:.0%} of pinned", figures)


def measured(
    comm: Any, num_bytes: int, device: list[Tensor], kinds: dict[str, list[Tensor]]
) -> list[dict[str, Any]]:
    """Return a row of GB/s of all processes together, by direction and kind of memory."""
    card_parts = [flat[:num_bytes] for flat in device]
    repetitions = min(max(2, 128 * MIB // num_bytes), 100)
    works: dict[tuple[str, str], Work] = {}
    streams = [torch.cuda.Stream() for _ in range(2)]
    for kind, flats in kinds.items():
        host = [flat[:num_bytes] for flat in flats]
        works["to host", kind] = Copies([(host[0], card_parts[0])], streams)
        works["to card", kind] = Copies([(card_parts[1], host[1])], streams)
        pairs = [(host[0], card_parts[0]), (card_parts[1], host[1])]
        works["both", kind] = Copies(pairs, streams)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in works}
    for turn in range(-1, ROUNDS):
        for name, work in works.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repetitions):
                work()
            torch.cuda.synchronize()
            elapsed = max(comm.allgather(time.perf_counter() - start))
            if turn >= 0:
                seconds[name].append(elapsed / repetitions)
    row: dict[str, Any] = {"processes": comm.size, "bytes": num_bytes}
    for (direction, kind), times in seconds.items():
        moved = num_bytes * comm.size * (2 if direction == "both" else 1)
        row.setdefault(direction, {})[kind] = moved / statistics.median(times) / 1e9
    return [row]


class Copies:
    """Copies that start concurrently, each on a separate stream."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], streams: list[Any]) -> None:
        self.pairs = list(zip(pairs, streams, strict=False))

    def __call__(self) -> None:
        """Start all copies."""
        for (to, source), stream in self.pairs:
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a nested row as a flat row for the table."""
    flat = {"processes": row["processes"], "KiB": row["bytes"] // KIB}
    for direction in ("to host", "to card", "both"):
        flat |= {
            f"{direction}, {kind} GB/s": round(rate, 2) for kind, rate in row[direction].items()
        }
    return flat


if __name__ == "__main__":
    with reported_errors():
        main()
