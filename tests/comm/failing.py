"""Run random programs in which a call fails on one rank, which catches the error and continues.

Each rank calls a few collectives. A call either returns the result of the calls with the same
number on all ranks, or raises. Each rank completes the program.

The tests use this module, and all ranks can run it: ``hpctrain launch -n 3 -- python -m
tests.comm.failing -n 300 --seed 1``.
"""

import argparse
import datetime
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpctrain
from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError
from hpctrain.negotiation.request import Kind, Request, Sum
from tests.negotiation.controlling import controller_of

TIMEOUT_S = 0.3
LATE_S = 0.8  # delay of a late rank, after which the others have timed out
SIZES = (1, 7, 1000, 20_000, 150_000, 300_000)
WAYS_TO_FAIL = ("late", "raise in a wait", "interrupt in a wait", "interrupt", "raise")
CALLERS = ("communicator", "torch", "named", "steps")


class AlarmError(Exception):
    """Signal handlers raise this error."""


class Interrupt(BaseException):
    """Signal handlers raise this for Ctrl-C."""


@dataclass(frozen=True)
class Program:
    """Hold a random program, identical on all ranks."""

    seed: int
    size: int
    caller: str
    per_node: int | None
    shared_memory: str
    calls: tuple[tuple[str, int, int], ...]
    """Kind, number of elements and root of each call."""
    failing: int  # number of the call that fails
    culprit: int  # rank that is late or interrupted
    way: str
    alarm_s: float  # seconds after the beginning of the call
    changes_memory: bool  # whether ranks overwrite the arguments of failed calls

    @staticmethod
    def draw(seed: int, size: int) -> "Program":
        """Draw a program. In half of all programs, all calls are equal and could be confused."""
        luck = random.Random(f"{seed} {size}")
        caller, way = luck.choice(CALLERS), luck.choice(WAYS_TO_FAIL)
        kinds = [*_KINDS[caller]]
        numels = luck.sample(SIZES, 5)
        one = luck.choice(kinds), luck.choice(SIZES), luck.randrange(size)
        calls = [(luck.choice(kinds), numel, luck.randrange(size)) for numel in numels]
        if luck.random() < 0.5 and way not in ("interrupt", "raise"):
            calls = [one] * 5
        per_node = luck.choice([None, 1, 2] if size > 2 else [None, 1])
        memory = "off" if luck.random() < 0.2 and caller != "steps" else "auto"
        if per_node and memory == "auto" and not way.endswith("wait") and way != "late":
            way += (
                " in a wait"  # earlier, the call may not have begun, and nodes do not compare that
            )
        is_in_wait = way.endswith("wait")
        return Program(
            *(seed, size, caller, per_node),
            memory,
            tuple(calls),
            luck.randrange(3),
            luck.randrange(size),
            way,
            luck.uniform(0.02, 0.15) if is_in_wait else luck.uniform(0, 2e-3),
            luck.random() < 0.7,
        )


def given(number: int, rank: int, numel: int) -> torch.Tensor:
    """Return the argument of a rank: integers that differ for each call and rank."""
    return torch.arange(numel, dtype=torch.float64) % 13 + (number + 1) * 1000.0 + 17.0 * rank


def total(number: int, size: int, numel: int) -> torch.Tensor:
    """Return the sum over all ranks."""
    return sum((given(number, rank, numel) for rank in range(size)), torch.zeros(numel).double())


def share_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the part of ``whole`` for a rank; all parts have equal size."""
    part = whole.numel() // size
    return whole[rank * part : (rank + 1) * part]


class Calls:
    """Call the collectives of one communicator; methods return result and expected value."""

    def __init__(self, program: Program, rank: int, comm: object) -> None:
        self.program, self.rank, self.size, self.comm = program, rank, program.size, comm
        self.kept: list[torch.Tensor] = []
        self.own: list[torch.Tensor] = []  # tensors of kept that no later call uses

    def mine(self, number: int, numel: int) -> torch.Tensor:
        """Return this rank's argument, a tensor that is overwritten when the call has failed."""
        made = given(number, self.rank, numel)
        self.kept.append(made)
        self.own.append(made)
        return made

    # Communicator

    def allreduce(self, number, numel, _root):
        x = self.mine(number, numel)
        self.comm.allreduce_(x).wait()
        return x, total(number, self.size, numel)

    def allreduce_max(self, number, numel, _root):
        x = self.mine(number, numel)
        self.comm.allreduce_(x, op=Op.MAX).wait()
        return x, given(number, self.size - 1, numel)

    def reduce_scatter(self, number, numel, _root):
        numel *= self.size
        x = self.mine(number, numel)
        found = self.comm.reduce_scatter(x)
        return found, share_of(total(number, self.size, numel), self.rank, self.size)

    def all_gather(self, number, numel, _root):
        found = self.comm.all_gather(self.mine(number, numel))
        return torch.stack(found), self.of_all(number, numel)

    def alltoall(self, number, numel, _root):
        found = self.comm.alltoall([self.mine(number, numel)] * self.size)
        return torch.stack(found), self.of_all(number, numel)

    def broadcast(self, number, numel, root):
        x = self.mine(number, numel)
        self.comm.broadcast_(x, root).wait()
        return x, given(number, root, numel)

    def objects(self, number, _numel, _root):
        found = self.comm.allgather_object((number, self.rank))
        return found, [(number, rank) for rank in range(self.size)]

    def barrier(self, _number, _numel, _root):
        self.comm.barrier()
        return 0, 0

    def of_all(self, number, numel):
        return torch.stack([given(number, rank, numel) for rank in range(self.size)])

    # Buckets, whole and in steps

    def bucket(self, number, numel, _root):
        bucket = self.buckets[numel]
        bucket.flat.copy_(given(number, self.rank, numel))
        self.kept.append(bucket.flat)
        self.comm.allreduce_(bucket).wait()
        return bucket.flat.clone(), total(number, self.size, numel)

    def steps(self, number, numel, _root):
        bucket, comm = self.buckets[numel], self.comm
        bucket.flat.copy_(given(number, self.rank, numel))
        self.kept.append(bucket.flat)
        part = comm.reduce_node(bucket)
        if comm.internode is not None and part.numel():
            comm.internode.allreduce_(part)
        comm.publish(bucket, scale=2.0)
        return bucket.flat.clone(), 2 * total(number, self.size, numel)

    # torch.distributed

    def dist_allreduce(self, number, numel, _root):
        x = self.mine(number, numel)
        dist.all_reduce(x)
        return x, total(number, self.size, numel)

    def dist_allreduce_async(self, number, numel, _root):
        x, y = (
            given(number, self.rank, numel),
            given(number, self.rank, numel),
        )  # until both are complete
        works = [dist.all_reduce(one, async_op=True) for one in (x, y)]
        for work in works:
            work.wait()
        return x + y, 2 * total(number, self.size, numel)

    def dist_behind_another(self, number, numel, root):
        y, x = given(number, self.rank, numel), self.mine(number, numel)
        work = dist.all_reduce(y, async_op=True)
        dist.broadcast(x, root)
        work.wait()
        return x + y, given(number, root, numel) + total(number, self.size, numel)

    def dist_reduce_scatter(self, number, numel, _root):
        x = self.mine(number, numel * self.size)
        out = torch.empty(numel, dtype=x.dtype)
        dist.reduce_scatter_tensor(out, x)
        whole = total(number, self.size, numel * self.size)
        return out, share_of(whole, self.rank, self.size)

    def dist_broadcast(self, number, numel, root):
        x = self.mine(number, numel)
        dist.broadcast(x, root)
        return x, given(number, root, numel)

    def dist_all_gather(self, number, numel, _root):
        out = torch.empty(self.size * numel, dtype=torch.float64)
        dist.all_gather_into_tensor(out, self.mine(number, numel))
        return out.view(self.size, -1), self.of_all(number, numel)

    def dist_scatter(self, number, numel, root):
        out = torch.empty(numel, dtype=torch.float64)
        given_by = [given(number, rank, numel) for rank in range(self.size)]
        self.kept += given_by
        dist.scatter(out, given_by if self.rank == root else None, root)
        return out, given(number, self.rank, numel)

    def dist_gather(self, number, numel, root):
        outs = [torch.empty(numel, dtype=torch.float64) for _ in range(self.size)]
        dist.gather(self.mine(number, numel), outs if self.rank == root else None, root)
        if self.rank != root:
            return 0, 0
        return torch.stack(outs), self.of_all(number, numel)

    def dist_all_to_all(self, number, numel, _root):
        out = torch.empty(self.size * numel, dtype=torch.float64)
        x = self.mine(number, numel).repeat(self.size)
        self.kept.append(x)
        dist.all_to_all_single(out, x)
        return out.view(self.size, -1), self.of_all(number, numel)

    def dist_message(self, number, numel, _root):
        out, x = torch.empty(numel, dtype=torch.float64), given(number, self.rank, numel)
        sent = dist.isend(x, (self.rank + 1) % self.size)
        source = (self.rank - 1) % self.size
        dist.recv(out, source)
        sent.wait()
        return out, given(number, source, numel)

    # Named operations

    def named(self, number, numel, _root):
        x = self.mine(number, numel)
        request = Request(Kind.ALLREDUCE, "same", [x], in_place=True, op=Sum)
        (found,) = self.controller.run(request)
        return found, total(number, self.size, numel)

    def named_group(self, number, numel, _root):
        x, y = self.mine(number, numel), self.mine(number, numel)
        requests = [
            Request(Kind.ALLREDUCE, name, [one], in_place=True, op=Sum)
            for name, one in (("first", x), ("second", y))
        ]
        for handle in [self.controller.submit(request) for request in requests]:
            handle.wait()
        return x + y, 2 * total(number, self.size, numel)

    def named_broadcast(self, number, numel, root):
        x = self.mine(number, numel)
        request = Request(Kind.BROADCAST, "root", [x], in_place=True, root=root)
        (found,) = self.controller.run(request)
        return found, given(number, root, numel)


_KINDS = {
    "communicator": (
        *("allreduce", "allreduce_max", "reduce_scatter", "all_gather", "alltoall", "broadcast"),
        *("objects", "barrier", "bucket"),
    ),
    "steps": ("bucket", "steps"),
    "torch": tuple(name for name in vars(Calls) if name.startswith("dist_")),
    "named": ("named", "named_group", "named_broadcast"),
}


@contextmanager
def calls_of(program: Program, world: MPI.Intracomm) -> Generator[Calls]:
    """Yield the collectives of a program, and make sure that ranks are independent afterwards."""
    if program.caller == "torch":
        hpctrain.init(ranks_per_node=program.per_node)
        dist.init_process_group("hpctrain", timeout=datetime.timedelta(seconds=30))
        group = dist.distributed_c10d._get_default_group()
        made = Calls(program, world.rank, None)
        world.Barrier()
        group.set_timeout(datetime.timedelta(seconds=TIMEOUT_S))
        yield made
        world.Barrier()
        dist.destroy_process_group()
        hpctrain.shutdown()
        return
    settings = Settings(
        probe="off", ranks_per_node=program.per_node, shared_memory=program.shared_memory
    )
    connection = connect(find_world(), settings)
    comm = connection.comm
    made = Calls(program, world.rank, comm)
    if program.caller == "named":
        made.controller = controller_of(comm, timeout_s=TIMEOUT_S)
    else:
        numels = sorted({numel for kind, numel, _ in program.calls if kind in _KINDS["steps"]})
        made.buckets = {numel: comm.new_bucket(numel, torch.float64) for numel in numels}
    world.Barrier()
    comm.watch._limit.timeout_s = TIMEOUT_S
    yield made
    world.Barrier()
    if program.caller == "named":
        made.controller.drop()
    if connection.presence is not None:
        connection.presence.wait_for_end()
    comm.close()


class Signal:
    """Raise an exception from a signal handler, only while a call is in progress."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind, self._is_armed = kind, False

    def __enter__(self) -> "Signal":
        self._before = signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def during(self, seconds: float, function: Callable[[], object]) -> object:
        """Call a function, and raise the exception ``seconds`` after its beginning."""
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            return function()
        finally:
            self._is_armed = False

    def _raise(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise self._kind


def run(program: Program, world: MPI.Intracomm) -> tuple[int, int, str]:
    """Run a program; return the counts of successful and failed calls, and a failure or ''.

    Collective.
    """
    succeeded = failed = 0
    wrong = ""
    overwritten: list[torch.Tensor] = []
    is_culprit, is_late = world.rank == program.culprit, program.way == "late"
    kind = Interrupt if program.way.startswith("interrupt") else AlarmError
    with calls_of(program, world) as calls, Signal(kind) as alarm:
        for number, (name, numel, root) in enumerate(program.calls):
            function = getattr(calls, name)
            is_now = number == program.failing

            def call(function=function, number=number, numel=numel, root=root):
                return function(number, numel, root)

            if is_now and is_late == is_culprit and (is_late or program.way.endswith("wait")):
                time.sleep(LATE_S if is_late else program.alarm_s + 0.05)
            try:
                if is_now and is_culprit and not is_late:
                    found, expected = alarm.during(program.alarm_s, call)
                else:
                    found, expected = call()
            except (CommError, AlarmError, Interrupt, RuntimeError):
                failed += 1
                if program.changes_memory:
                    for one in calls.kept:
                        one.fill_(-1e6)
                    overwritten = list(calls.own)
                continue
            succeeded += 1
            is_same = found == expected
            if not (is_same.all() if isinstance(is_same, torch.Tensor) else is_same):
                wrong += f"rank {world.rank}, call {number}, {name}: {found} is not {expected}; "
        if any((one != -1e6).any() for one in overwritten):
            wrong += f"rank {world.rank} wrote to memory of a call that had failed; "
    return succeeded, failed, wrong


def check(seed: int, world: MPI.Intracomm) -> tuple[str, Program]:
    """Run the program of a seed; return the failures of all ranks. Collective."""
    program = Program.draw(seed, world.size)
    found = world.allgather(run(program, world))
    return "".join(text for _, _, text in found), program


def main() -> int:
    """Run programs on all ranks; return 0 if all were correct."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    options = parser.parse_args()
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # ranks connect over MPI
        os.environ.pop(name, None)
    os.environ["HPCTRAIN_PROBE"] = "off"
    hpctrain.init()
    world = MPI.COMM_WORLD.Dup()
    hpctrain.shutdown()
    num_wrong = 0
    for seed in range(options.seed, options.seed + options.n):
        if world.rank == 0:
            print(Program.draw(seed, world.size), flush=True)  # noqa: T201
        start = time.monotonic()
        wrong, _ = check(seed, world)
        if world.rank == 0:
            print(f"  {time.monotonic() - start:.1f} s {wrong or 'holds'}", flush=True)  # noqa: T201
        num_wrong += bool(wrong)
    if world.rank == 0:
        print(f"{options.n} programs, {num_wrong} wrong", flush=True)  # noqa: T201
    with suppress(Exception):
        world.Free()
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
