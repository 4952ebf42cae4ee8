"""A benchmark from its request to the last line."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpctrain import __version__
from hpctrain.comm.communicator import Communicator
from hpctrain.core.atomic import publishing
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.units import format_bytes
from hpctrain.doctor.benchmarks.benchmark_request import BenchmarkRequest
from hpctrain.doctor.benchmarks.measure import Row, measure
from hpctrain.runtime import world
from hpctrain.runtime.world import World

ALONE = (
    "one rank: nothing moves, so these are the costs of the calls alone; "
    "for more: hpctrain launch -n 4 hpctrain bench "
)


def run(
    request: BenchmarkRequest,
    make_console: Callable[..., Console],
    json_file: Path | None = None,
) -> bool:
    """Measure all sizes, and print each as soon as it is measured.

    Collective over all ranks that were started together. Rank 0 writes all figures to
    ``json_file``.

    Returns:
        Whether every value that was compared was right; the same on every rank.

    Raises:
        ConfigError: this takes more ranks than there are.
        MismatchError: the file cannot be written, or MPI has no such type to compare with.
    """
    world.init()
    here = world.current()
    comm = here.comm
    if request.operation == "send" and comm.size == 1:
        raise ConfigError(
            "send takes two ranks, got one; for instance: hpctrain launch -n 2 hpctrain bench send"
        )
    refusal = _refusal(request, json_file) if comm.rank == 0 else ""
    comm.agree(not refusal, refusal)
    console = make_console(shown=comm.rank == 0)
    _describe(console, here, request)
    rows = _measure_all(comm, request, console)
    num_wrong = sum(row.num_wrong or 0 for row in rows)
    if num_wrong:
        console.print(f"{num_wrong} wrong values: the results of this world cannot be trusted")
    if json_file is not None and comm.rank == 0:
        _write_json(json_file, here, rows, request)
    return num_wrong == 0


def _refusal(request: BenchmarkRequest, json_file: Path | None) -> str:
    """Say what keeps this from being measured; called by one rank."""
    try:
        if request.peers:
            from hpctrain.comm.mpi_library import require_type  # noqa: PLC0415 - one rank needs no MPI

            require_type(request.torch_dtype)
        if json_file is not None:
            json_file.open("a", encoding="utf-8").close()
    except HpctrainError as error:
        return str(error)
    except OSError as error:
        return f"{json_file} cannot be written: {error.strerror}; choose another"
    return ""


def _measure_all(comm: Communicator, request: BenchmarkRequest, console: Console) -> list[Row]:
    setups = request.setups()
    rows = []
    console.print(head(peers=request.peers), soft_wrap=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} sizes"),
        console=console,
        transient=True,
        auto_refresh=False,  # a thread of it would take time from what is measured
        disable=not console.is_terminal or console.quiet,
    ) as bar:
        task = bar.add_task("", total=len(setups))
        for setup in setups:
            bar.update(
                task, description=f"measuring {format_bytes(setup.num_bytes)}", refresh=True
            )
            rows.append(measure(comm, request, setup))
            console.print(line(rows[-1], request.dtype, request.op_shown), soft_wrap=True)
            bar.advance(task)
    return rows


def _describe(console: Console, here: World, request: BenchmarkRequest) -> None:
    """Print the machine and the plan above the table."""
    plan = [*here.plan.describe(), ("plan chosen by", here.plan_origin)]
    rows = [*here.topology.describe(), *plan]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"# {name:{width}}  {text}", soft_wrap=True)
    console.print("#")
    if here.comm.size == 1:
        console.print(f"# {ALONE}{request.operation}", soft_wrap=True)


_HEAD = (
    f"{'bytes':>12} {'elements':>11} {'dtype':>15} {'op':>7} "
    f"{'min us':>10} {'avg us':>10} {'max us':>10} {'alg GB/s':>9} {'bus GB/s':>9} {'wrong':>6}"
)
_PEER_HEAD = f" {'MPI us':>10} {'MPI/ours':>8}"


def head(*, peers: bool) -> str:
    """Return the names of the columns."""
    return _HEAD + _PEER_HEAD if peers else _HEAD


def line(row: Row, dtype: str, op: str) -> str:
    """Return the line of one size; ``op`` is empty for operations that combine nothing."""
    wrong = "-" if row.num_wrong is None else str(row.num_wrong)
    text = f"{row.num_bytes:>12} {row.numel:>11} {dtype:>15} {op:>7} "
    text += " ".join(f"{us:>10.2f}" for us in (row.min_us, row.avg_us, row.max_us))
    text += f" {row.algorithm_gbs:>9.3f} {row.bus_gbs:>9.3f} {wrong:>6}"
    if row.library_us is not None and row.library_ratio is not None:
        text += f" {row.library_us:>10.2f} {row.library_ratio:>8.2f}"
    return text


def _write_json(path: Path, here: World, rows: Sequence[Row], request: BenchmarkRequest) -> None:
    """Write all that was measured, and where; called by one rank."""
    contents = {
        "request": asdict(request),
        "hpctrain": __version__,
        "torch": torch.__version__,
        "system": platform.platform(),
        "topology": dict(here.topology.describe()),
        "plan": here.plan.as_dict(),
        "rows": [asdict(row) for row in rows],
    }
    with publishing(path) as part:
        part.write_text(json.dumps(contents, indent=1, default=str) + "\n", encoding="utf-8")
