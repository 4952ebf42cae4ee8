"""A benchmark from its request to the last line."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.units import format_bytes
from hpctrain.doctor.benchmarks.measure import Effort, Row, measure
from hpctrain.doctor.benchmarks.request import Request
from hpctrain.doctor.benchmarks.show import check_writable, facts, head, line, write_json
from hpctrain.runtime import world

ALONE = (
    "one rank: nothing moves, so these are the costs of the calls alone; "
    "for more: hpctrain launch -n 4 hpctrain bench "
)


def run(
    request: Request,
    effort: Effort,
    make_console: Callable[..., Console],
    json_file: Path | None = None,
) -> bool:
    """Measure all sizes, and print each as soon as it is measured.

    Collective over all ranks that were started together.

    Args:
        request: what to measure.
        effort: how long.
        make_console: makes the console of this rank; takes ``shown``.
        json_file: gets all figures, from rank 0.

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
    rows = _measure_all(comm, request, effort, console)
    num_wrong = sum(row.num_wrong or 0 for row in rows)
    if num_wrong:
        console.print(f"{num_wrong} wrong values: the results of this world cannot be trusted")
    if json_file is not None and comm.rank == 0:
        description = {"request": asdict(request), "effort": asdict(effort)}
        write_json(json_file, here, rows, description)
    return num_wrong == 0


def _refusal(request: Request, json_file: Path | None) -> str:
    """Say what keeps this from being measured; called by one rank."""
    try:
        if request.peers:
            from hpctrain.comm.node.peer import require_type  # noqa: PLC0415 - one rank needs no MPI

            require_type(request.torch_dtype)
        if json_file is not None:
            check_writable(json_file)
    except HpctrainError as error:
        return str(error)
    return ""


def _measure_all(
    comm: Communicator, request: Request, effort: Effort, console: Console
) -> list[Row]:
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
            rows.append(measure(comm, request.operation, setup, effort))
            console.print(line(rows[-1], request.dtype, request.op_shown), soft_wrap=True)
            bar.advance(task)
    return rows


def _describe(console: Console, here: world.World, request: Request) -> None:
    rows = facts(here)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"# {name:{width}}  {text}", soft_wrap=True)
    console.print("#")
    if here.comm.size == 1:
        console.print(f"# {ALONE}{request.operation}", soft_wrap=True)
