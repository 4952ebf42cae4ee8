"""Messages of the operations of N simulated ranks, as a table.

Call::

    python -m tests.scale.figures 64 512 4096 --json FILE
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import mpi4py
import pytest
import torch

import hpctrain as hvd
from hpctrain.checkpoint import load, save
from hpctrain.core.errors import CommError
from hpctrain.core.logs import logger
from hpctrain.runtime import lazy_dynamo, recovery
from hpctrain.runtime.stopping import StopRequests
from hpctrain.runtime.world import current
from tests.scale.engines import Engines
from tests.scale.network import Network, Traffic
from tests.scale.simulated_mpi import SimulatedComm
from tests.scale.worlds import SimulatedWorld

LOST = 5  # rank that is lost


def usual(size: int, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic of a program without faults, by operation."""
    lazy_dynamo.install()  # as ``hpctrain.init`` does
    simulated = SimulatedWorld(size, Network(size, seed=seed))
    with TemporaryDirectory() as folder, quiet():
        simulated.run(lambda comm: _usual(simulated, comm, Path(folder) / "step-00000001"))
    return simulated.traffic


def _usual(simulated: SimulatedWorld, comm: SimulatedComm, folder: Path) -> None:
    end_phase = simulated.end_phase
    simulated.init(comm)
    end_phase("init")
    for name in ("first named all-reduce", "named all-reduce"):
        hvd.allreduce(torch.ones(4), name="loss")
        end_phase(name)
    model = torch.nn.Linear(3, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    end_phase("DistributedOptimizer")
    for name in ("first step", "step"):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(hvd.rank()))).sum().backward()
        optimizer.step()
        end_phase(name)
    current().stop._requests = requests = StopRequests()  # without signals, which a process has
    assert not hvd.should_stop()
    end_phase("stop check")
    state = {"model": model.state_dict()}
    save(folder, state, current().comm, step=1)
    end_phase("checkpoint save")
    load(folder, current().comm)
    end_phase("checkpoint load")
    requests._reason = "SIGTERM" if hvd.rank() == LOST else ""
    assert hvd.should_stop()
    end_phase("stop request")


def failure(size: int, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic of an error on one rank, which the other ranks wait for."""
    simulated = SimulatedWorld(size, Network(size, seed=seed))

    def work(comm: SimulatedComm) -> None:
        simulated.init(comm)
        simulated.end_phase("init")
        if comm.rank == LOST:
            current().comm.fail()
        else:
            with pytest.raises(CommError, match=f"has failed on rank {LOST} "):
                current().comm.barrier()
        simulated.end_phase("failure report")

    with quiet():
        simulated.run(work)
    return simulated.traffic


def death(size: int, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic of the recovery from the death of a rank."""
    simulated = SimulatedWorld(size, Network(size, seed=seed), recovers=True)

    def work(comm: SimulatedComm) -> None:
        simulated.init(comm)
        simulated.end_phase("init")

        def train() -> None:
            if comm.rank == LOST and hvd.size() == size:
                simulated.kill(LOST)
            hvd.allreduce(torch.ones(4), name="loss")

        attempt = recovery.attempt(train)
        assert attempt.lost == [LOST]
        assert hvd.size() == size - 1
        simulated.end_phase("recovery")
        train()
        simulated.end_phase("named all-reduce after it")

    with quiet():
        simulated.run(work)
    return simulated.traffic


def negotiation(size: int, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic of the negotiation of a named all-reduce on nodes of 64 ranks."""
    engines, found = Engines(size, Network(size, seed=seed)), {}
    for name in ("first negotiation", "negotiation"):
        engines.network.forget()
        engines.reduce("loss")
        found[name] = engines.network.traffic()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the log lines of simulated ranks."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def all_figures(size: int) -> dict[str, Traffic]:
    """Return the traffic of all operations."""
    found = negotiation(size) | usual(size)
    found["failure report"] = failure(size)["failure report"]
    found["recovery"] = death(size)["recovery"]
    return found


def table(of_sizes: dict[int, dict[str, Traffic]]) -> str:
    """Return a table with the mean messages per rank and the rounds of each operation."""
    names = dict.fromkeys(name for of in of_sizes.values() for name in of)
    lines = ["messages per rank / rounds" + "".join(f"{size:>16}" for size in of_sizes)]
    for name in names:
        cells = [
            f"{of[name].per_rank(size):9.1f} /{of[name].num_rounds:5}" if name in of else " " * 16
            for size, of in of_sizes.items()
        ]
        lines.append(f"{name:26}{''.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="+", type=int, help="numbers of ranks")
    parser.add_argument(
        "--negotiation", type=int, nargs="*", default=[], help="sizes without the other operations"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    found, seconds = {}, {}
    for size in [*arguments.sizes, *arguments.negotiation]:
        began = time.monotonic()
        is_whole = size in arguments.sizes
        found[size] = all_figures(size) if is_whole else negotiation(size)
        seconds[size] = round(time.monotonic() - began, 1)
        if arguments.json:
            _write(arguments.json, found, seconds)
    sys.stdout.write(f"{table(found)}\n")


def _write(path: Path, found: dict[int, dict[str, Traffic]], seconds: dict[int, float]) -> None:
    versions = {
        "hpctrain": hvd.__version__,
        "torch": torch.__version__,
        "mpi4py": mpi4py.__version__,
        "python": platform.python_version(),
    }
    figures = {
        size: {name: asdict(traffic) for name, traffic in of.items()} for size, of in found.items()
    }
    content = {"versions": versions, "simulation_s": seconds, "figures": figures}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
