"""Gradients of ranks that share one GPU, for ``gpu_check.py``.

    hpctrain launch -n 2 -- python perf/gpu_job.py bits | near
    hpctrain launch -n 2 -- python perf/gpu_job.py order [sides | PLANT]
    hpctrain launch -n 2 -- python perf/gpu_job.py waits
    hpctrain launch -n 2 -- python perf/gpu_job.py death | memory | lost

``DEV`` is the device, see ``gpu_device.py``.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_device as here
import torch
from gpu_finding import Finding, reported_errors
from torch import Tensor, nn

import hpctrain as hvd
from hpctrain.comm.bucket_storage import NcclBucket
from hpctrain.comm.device import device_of
from hpctrain.comm.nccl.library import library

IS_REAL = here.KIND != "mcpu"  # that one takes 32 bits, and its time
NUMELS = (1, 2, 7, 64, 1000, 4097, 100_003, *[3_000_001] * IS_REAL)
DTYPES = (torch.float32, *[torch.float64, torch.bfloat16, torch.float16] * IS_REAL)
STEPS = 3
RUNS = 20
FAILING_RANK = 1
LEAVES_S = 10.0
"""How long a rank that has failed lives on, for others to hear of its failure, not of its end."""
NOT_HERE = "each rank must have its own GPU for NCCL"
"""Message of NCCL if it does not allow ranks to share a GPU."""
MARK = "gpu-check-ends: "
"""Stands before the time at which a rank fails on purpose."""


def main() -> None:
    """Run the part that the command line names."""
    parts: dict[str, Callable[..., Finding]] = {
        "bits": bits,
        "near": near,
        "order": order,
        "waits": waits,
        "death": death,
        "memory": memory,
        "lost": lost,
    }
    hvd.init()
    torch.set_num_threads(1)
    try:
        finding = parts[sys.argv[1]](*sys.argv[2:])
    except hvd.HpctrainError as error:
        if NOT_HERE not in str(error):
            raise
        finding = Finding("skip", str(error))
    finding.write_on_rank_0()


# --- bits ----------------------------------------------------------------------------------------


def bits() -> Finding:
    """Compare averages and sums on GPU and CPU, for all dtypes and odd sizes."""
    rows = []
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum):
            here_ones, there_ones = reducer(here.DEVICE, dtype, op), reducer("cpu", dtype, op)
            differ = 0
            for step in range(STEPS):
                given = list(gradients(dtype, step))
                found = reduced(*here_ones, given)
                expected = reduced(*there_ones, given)
                differ += sum(map(count_differing, found, expected))
            differ = int(hvd.allreduce(torch.tensor(differ), op=hvd.Sum))
            name = "average" if op is hvd.Average else "sum"
            rows.append({"dtype": str(dtype), "of ranks": name, "values that differ": differ})
    wrong = sum(row["values that differ"] for row in rows)
    says = f"{wrong} values differ" if wrong else ""
    return Finding("fail" if wrong else "pass", says, {"rows": rows})


def reducer(device: object, dtype: torch.dtype, op: object) -> tuple[list[nn.Parameter], Any]:
    """Return parameters of odd sizes, and an optimizer that reduces their gradients."""
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in NUMELS]
    optimizer = torch.optim.SGD(parameters, lr=0.0, foreach=IS_REAL)
    named = [(f"p{n}", p) for n, p in zip(NUMELS, parameters, strict=True)]
    return parameters, hvd.DistributedOptimizer(optimizer, named, op=op)


def gradients(dtype: torch.dtype, step: int) -> Iterator[Tensor]:
    """Draw gradients of this rank: all magnitudes, subnormals and zeros of both signs."""
    source = torch.Generator().manual_seed(1000 * step + hvd.rank())
    tiny = torch.finfo(dtype).tiny / 2
    for numel in NUMELS:
        powers = torch.randint(-6, 7, (numel,), generator=source)
        values = torch.randn(numel, generator=source, dtype=torch.float64) * 10.0**powers / 1e3
        values[::11], values[3::17], values[5::23] = tiny, -0.0, 0.0
        yield values.to(dtype)


def reduced(
    parameters: Sequence[nn.Parameter], optimizer: Any, given: list[Tensor]
) -> list[Tensor]:
    """Run a backward that produces the gradients ``given``; return the reduced gradients."""
    optimizer.zero_grad()
    pairs = zip(parameters, given, strict=True)
    sum((p * g.to(p.device)).sum() for p, g in pairs).backward()
    found = [p.grad.detach().to("cpu", copy=True) for p in parameters]
    optimizer.step()
    return found


def count_differing(found: Tensor, expected: Tensor) -> int:
    """Return the number of values that are not bitwise equal."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    return int((found.view(kind) != expected.view(kind)).sum())


# --- near ----------------------------------------------------------------------------------------


def near() -> Finding:
    """Compare sums of gradients by NCCL and by the CPU, for all dtypes and odd sizes.

    Values may differ by one rounding for each rank, and one for the average.
    """
    rows = []
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum):
            here_ones, there_ones = reducer(here.DEVICE, dtype, op), reducer("cpu", dtype, op)
            differ, far, worst = 0, 0, 0.0
            for step in range(STEPS):
                given = list(gradients(dtype, step))
                here_found, expected_all = reduced(*here_ones, given), reduced(*there_ones, given)
                for found, expected, own in zip(here_found, expected_all, given, strict=True):
                    roundings = roundings_between(found, expected, own)
                    differ += count_differing(found, expected)
                    far += int((roundings > hvd.size() + 1).sum())
                    worst = max(worst, float(roundings.max()))
            name = "average" if op is hvd.Average else "sum"
            row = {"dtype": str(dtype), "of ranks": name, "bits differ": differ, "too far": far}
            rows.append(row | {"roundings at most": round(worst, 2)})
    wrong = max(hvd.allgather_object(sum(row["too far"] for row in rows)))
    version = str(library())
    says = f"NCCL {version}: {wrong} values differ too much" if wrong else f"NCCL {version}"
    return Finding("fail" if wrong else "pass", says, {"rows": rows})


def roundings_between(found: Tensor, expected: Tensor, own: Tensor) -> Tensor:
    """Return the differences in units of the rounding error at the sum of absolute values."""
    of_all = hvd.allreduce(own.double().abs(), op=hvd.Sum)
    limits = torch.finfo(own.dtype)
    unit = (of_all * limits.eps).clamp(min=limits.tiny * limits.eps)
    return (found.double() - expected.double()).abs() / unit


# --- order ---------------------------------------------------------------------------------------


def order(what: str = "") -> Finding:
    """Train with delayed streams, and compare bitwise with the plain loop.

    With ``sides`` the model computes on two streams. With a planted fault, an operation does not
    wait for its input, and the results must be wrong: this shows that the phase detects the fault.
    """
    make, plant = (branches, "") if what == "sides" else (network, what)
    delay_copies()
    if plant:
        PLANTS[plant]()
    try:
        right = [torch.equal(trained(make, seed), plain(make, seed)) for seed in range(RUNS)]
    except hvd.HpctrainError as error:
        if plant:
            return Finding("pass", f"the check of weights detected the fault: {error}"[:200])
        raise
    counts = hvd.allgather_object(sum(right))
    figures = {"runs": RUNS, "right on all ranks": min(counts)}
    if plant:
        verdict = "pass" if min(counts) < RUNS else "fail"
        return Finding(
            verdict,
            "" if verdict == "pass" else f"the planted fault {plant} was not detected",
            figures,
        )
    verdict = "pass" if min(counts) == RUNS else "fail"
    return Finding(verdict, f"right in {min(counts)} of {RUNS} runs", figures)


def network(seed: int, *, is_late: bool) -> nn.Module:
    """Return a small network whose gradients are delayed if ``is_late``."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((256, 512), (512, 512), (512, 512), (512, 10)):
        layers += [nn.Linear(before, after), nn.ReLU()]
        layers += [here.LateBackward()] * is_late
    return nn.Sequential(*layers).to(here.DEVICE)


def branches(seed: int, *, is_late: bool) -> nn.Module:
    """Return a network of layers with two branches, on two streams if ``is_late``."""
    torch.manual_seed(seed)
    side = device_of(here.DEVICE).new_stream() if is_late else None
    return nn.Sequential(*(Branches(side) for _ in range(3))).to(here.DEVICE)


class Branches(nn.Module):
    """Two layers with the same values, one on a separate, delayed stream."""

    def __init__(self, side: Any) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(256, 256), nn.Linear(256, 256), side

    def forward(self, values: Tensor) -> Tensor:
        """Return the sum of both layers."""
        first = self.first(values)
        if self.side is None:
            return first + self.second(values)
        stream = torch.accelerator.current_stream()
        self.side.wait_stream(stream)
        with self.side:
            second = here.Late.apply(self.second(values))
        stream.wait_stream(self.side)
        return first + second


def batch(seed: int, step: int, rank: int) -> Tensor:
    """Return random samples for a rank and a step."""
    source = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    return torch.randn(64, 256, generator=source).to(here.DEVICE)


def weights(model: nn.Module) -> Tensor:
    """Return all parameters as a tensor on the host."""
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def trained(make: Callable[..., nn.Module], seed: int) -> Tensor:
    """Train on all ranks; return the parameters."""
    model = make(seed, is_late=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=IS_REAL)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(seed, step, hvd.rank())).square().mean().backward()
        optimizer.step()
    return weights(model)


def plain(make: Callable[..., nn.Module], seed: int) -> Tensor:
    """Train without communication on the batches of all ranks; return the parameters."""
    model = make(seed, is_late=False)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=IS_REAL)
    for step in range(STEPS):
        totals: list[Tensor] = []
        for rank in range(hvd.size()):
            optimizer.zero_grad()
            model(batch(seed, step, rank)).square().mean().backward()
            own = [p.grad.clone() for p in parameters]
            totals = (
                [total + one for total, one in zip(totals, own, strict=True)] if totals else own
            )
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total * (1 / hvd.size())
        optimizer.step()
    return weights(model)


def delay_copies() -> None:
    """Delay the streams of copies and sums before each operation."""
    device = device_of(here.DEVICE)
    on = device.on

    @contextlib.contextmanager
    def late(stream: torch.Stream) -> Iterator[None]:
        with on(stream):
            here.delay(1.0)
            yield

    device.on = late


def caller_does_not_wait() -> None:
    """Plant a fault: the optimizer steps before the average is complete."""
    device = device_of(here.DEVICE)
    stream_of = device.current_stream
    device.current_stream = lambda: without_waits(stream_of())


def copies_do_not_wait() -> None:
    """Plant a fault: copies and sums start before their input is written."""
    device = device_of(here.DEVICE)
    device.down, device.up = without_waits(device.down), without_waits(device.up)


def without_waits(stream: torch.Stream) -> torch.Stream:
    """Return the same stream with waits for events that are no-ops."""
    kind = type(stream)
    members = {"wait_event": lambda *_: None, "wait_stream": lambda *_: None}
    return type("StreamWithoutWaits", (kind,), members)(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def sums_do_not_wait() -> None:
    """Plant a fault: NCCL starts before its input is written."""
    device = device_of(here.DEVICE)
    stream_of = device.new_stream
    device.new_stream = lambda: without_waits(stream_of())


def host_does_not_wait() -> None:
    """Plant a fault: the host sums before the copies are complete."""
    device = device_of(here.DEVICE)
    event_of = device.new_event

    def event_without_wait() -> torch.Event:
        made = event_of()
        made.synchronize = lambda: None
        return made

    device.new_event = event_without_wait


PLANTS: dict[str, Callable[[], None]] = {
    "caller": caller_does_not_wait,
    "copies": copies_do_not_wait,
    "host": host_does_not_wait,
    "sums": sums_do_not_wait,
}


# --- waits ---------------------------------------------------------------------------------------


def waits() -> Finding:
    """Count the waits of the host for the device within backward, in threads that queue work."""
    model = network(0, is_late=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=IS_REAL)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    samples = batch(0, 0, hvd.rank())
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (here.KIND == "cuda")
    profile = torch.profiler.profile(activities=activities)
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        loss = model(samples).square().mean()
        here.wait_for_all()
        if step == STEPS + 1:
            profile.start()
        is_first = step == 0  # in which ranks compare state on the host
        quiet = contextlib.nullcontext() if is_first else here.no_host_sync()
        with quiet, torch.profiler.record_function("the backward"):
            loss.backward()
        if step == STEPS + 1:
            here.wait_for_all()
            profile.stop()
        optimizer.step()
    counts = synchronizations(profile)
    of_all = hvd.allgather_object(counts)
    worst = max(sum(each["queueing threads"].values()) for each in of_all)
    figures = {f"rank {rank}": each for rank, each in enumerate(of_all)}
    return Finding("fail" if worst else "pass", f"{worst} waits on queueing threads", figures)


def synchronizations(profile: Any) -> dict[str, dict[str, int]]:
    """Count the synchronizing runtime calls within backward, by kind of thread and name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    whole = next(
        e for e in events if e["name"] == "the backward" and e["cat"] != "gpu_user_annotation"
    )
    first, last = whole["ts"], whole["ts"] + whole["dur"]
    queueing = {e["tid"] for e in events if str(e["name"]).startswith("autograd::engine")}
    queueing.add(whole["tid"])
    counts: dict[str, dict[str, int]] = {"queueing threads": {}, "other threads": {}}
    for event in events:
        name = str(event["name"])
        if (
            "Synchronize" in name
            and event.get("cat") == "cuda_runtime"
            and first <= event["ts"] <= last
        ):
            kind = counts["queueing threads" if event["tid"] in queueing else "other threads"]
            kind[name] = kind.get(name, 0) + 1
    return counts


# --- ends ----------------------------------------------------------------------------------------


def death() -> Finding:
    """Kill a rank within backward."""
    return fails_in_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def memory() -> Finding:
    """Exhaust the GPU memory of a rank within backward."""
    return fails_in_step(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=here.DEVICE))


def lost() -> Finding:
    """Abort NCCL on a living rank while the streams of other ranks wait for its sum."""
    queue, step, start = NcclBucket._sum, 0, 0.0  # noqa: SLF001 - the planted fault

    def leave(bucket: Any, *scales: float | None) -> None:
        if step == STEPS and hvd.rank() == FAILING_RANK:
            bucket._nccl.break_off("the test aborts NCCL")  # noqa: SLF001
        queue(bucket, *scales)

    NcclBucket._sum = leave  # type: ignore[method-assign] # noqa: SLF001
    model = network(0, is_late=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=IS_REAL)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    try:
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            model(batch(0, step, hvd.rank())).square().mean().backward()
            optimizer.step()
            start = time.time()
            here.wait_for_all()
        text, verdict = "training continued without the sum", "fail"
    except hvd.HpctrainError as error:
        took = time.time() - start
        text, verdict = f"error after {took:.1f} s: {error}"[:200], "pass"
    if hvd.rank() == 0:
        Finding(verdict, text).write()
    else:
        time.sleep(LEAVES_S)
    os._exit(0)  # the ranks have different numbers of steps


def fails_in_step(fail: Callable[[], object]) -> Finding:
    """Train until a rank fails; no rank may reach the end."""
    model = network(0, is_late=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=IS_REAL)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def hook(_: Tensor) -> None:
        sys.stdout.write(f"\n{MARK}{time.time()}\n")
        sys.stdout.flush()
        fail()

    for step in range(1000):
        optimizer.zero_grad()
        values = model(batch(0, step, hvd.rank()))
        if step == STEPS and hvd.rank() == FAILING_RANK:
            values.register_hook(hook)
        values.square().mean().backward()
        optimizer.step()
    return Finding("fail", "all ranks continued")


if __name__ == "__main__":
    with reported_errors():
        main()
