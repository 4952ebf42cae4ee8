"""``hpctrain top``: a live table of a running job, from the files of its run directory."""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from hpctrain.cli.options import RunFolder, flag, option
from hpctrain.core.units import format_seconds
from hpctrain.train import history, slow_ranks, watch
from hpctrain.train.console import figures

if TYPE_CHECKING:
    from hpctrain.train.watch import RunView

SHOWN = 4  # maximum number of slow ranks that a line names

app = typer.Typer()


@app.command()
def top(
    directory: RunFolder,
    *,
    interval: float = option(2.0, "SECONDS", "Time between two readings of the files.", min=0.1),
    ranks: int = option(16, "N", "Number of ranks to list, slowest first.", min=0),
    once: bool = flag(
        "Print once and exit; the default if the output is not a terminal.", "--once"
    ),
    as_json: bool = flag("Print a line of JSON for each reading.", "--json"),
) -> None:
    """Watch a running job: steps, loss, speed, slow ranks, time left.

    The command reads the files of the run directory and does not contact the job: it works on a
    login node and over ssh, if the directory is mounted there. The command ends when the run has
    ended, or on Ctrl-C, which does not affect the job. For scripts: hpctrain status.

    The times of a rank, in ms, are means over the last steps: computation, waiting for other ranks
    and their messages, input, and checkpoints. The slowest rank is the one with the longest sum of
    computation and input. A rank is called persistently slow if it was slow in at least five of
    the last ten records, else temporarily slow.

    Examples:
      hpctrain top runs/digits

      ssh login hpctrain top --once /scratch/me/runs/digits

      hpctrain top runs/digits --json --interval 60 >> watched.jsonl
    """
    reader, console = watch.RunWatch(directory), Console(highlight=False, markup=False)
    is_live = console.is_terminal and not (as_json or once)
    live = Live(console=console, auto_refresh=False) if is_live else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        while True:
            view = reader.look()
            if as_json:
                typer.echo(json.dumps(asdict(view) | _derived(view)))
            elif live is not None:
                live.update(_table(view, ranks), refresh=True)
            else:
                console.print(_table(view, ranks))
            if view.has_ended or once or not (as_json or live):
                return
            time.sleep(interval)


def _derived(view: "RunView") -> dict[str, Any]:
    slowest = None if view.slowest is None else view.slowest.rank
    return {"left_s": view.left_s, "slowest_rank": slowest, "has_ended": view.has_ended}


def _table(view: "RunView", num_rows: int) -> Group:
    summary = Table.grid(padding=(0, 2))
    summary.add_column()
    summary.add_column(overflow="fold")
    for name, text in _summary(view):
        summary.add_row(name, text)
    rows = sorted(view.ranks, key=lambda rank: -rank.work_s)[:num_rows]
    if not rows:
        return Group(summary)
    title = "of a step, in ms"
    if len(rows) < len(view.ranks):
        title += f"; the slowest {len(rows)} of {len(view.ranks)} ranks"
    columns = ("rank", "host", "compute", "wait", "input", "checkpoint", "/ median", "slow")
    table = figures(title, columns, ())
    for rank in rows:
        times = (rank.compute_s, rank.communication_s, rank.input_s, rank.checkpoint_s)
        ratio = rank.work_s / view.median_work_s
        table.add_row(
            str(rank.rank),
            rank.host,
            *(f"{seconds * 1e3:.2f}" for seconds in times),
            f"{ratio:.2f}",
            slow_ranks.verdict(rank.slow),
            style="bold" if ratio >= slow_ranks.SLOW else None,
        )
    return Group(summary, table)


def _summary(view: "RunView") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line above the table of ranks."""
    last, num_steps = view.last, view.begun.get("num_steps")
    yield "run", _state(view)
    if not last and not view.has_ended:
        yield "step", "none is recorded yet"
    if last:
        of = f" of {num_steps} ({view.step / num_steps:.0%})" if num_steps else ""
        ago = f", recorded {format_seconds(view.record_age_s)} ago" if view.record_age_s else ""
        yield "step", f"{view.step}{of}, epoch {last['epoch']}{ago}"
        yield "loss", f"{history.number(last['loss'])} in training, learning rate {last['lr']:g}"
        yield "speed", f"{last['samples_per_s']:.0f} samples/s over all ranks"
    if view.test:
        metric, loss = history.number(view.test["metric"]), history.number(view.test["loss"])
        tested = view.begun.get("tested", "test")
        yield tested, f"metric {metric}, loss {loss} after step {view.test['step']}"
    if view.left_s and not view.has_ended:
        yield "time left", f"{format_seconds(view.left_s)}, without tests and checkpoints"
    if view.checkpoints:
        yield "checkpoints", f"{len(view.checkpoints)}, the last after step {view.checkpoints[-1]}"
    slowest = view.slowest
    if slowest is not None and len(view.ranks) > 1:
        where = f" on {slowest.host}" if slowest.host else ""
        ratio = slowest.work_s / view.median_work_s
        yield "slowest", f"rank {slowest.rank}{where}, {ratio:.2f} times the median rank's work"
    if slow := sorted((rank for rank in view.ranks if rank.slow), key=lambda rank: -rank.slow):
        named = [f"rank {r.rank}{f' on {r.host}' if r.host else ''}" for r in slow[:SHOWN]]
        shown = [f"{n}, {slow_ranks.verdict(r.slow)}" for n, r in zip(named, slow, strict=False)]
        yield "slow ranks", "; ".join(shown) + (" ..." if len(slow) > SHOWN else "")


def _state(view: "RunView") -> str:
    """Return a text about the state of the run, and whether its job is alive."""
    age = "" if view.heartbeat_age_s is None else f" for {format_seconds(view.heartbeat_age_s)}"
    if view.status.state == "finished" or view.life == "none":
        return view.status.what
    if view.life == "dead":
        return f"{view.status.what}; {view.holder} ran the job, but has ended"
    if view.life == "silent":
        return f"{view.holder} has written no heartbeat{age}: it is stopped, or its node is lost"
    return f"running: {view.holder}"
