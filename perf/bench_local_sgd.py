"""Local SGD: time and bytes to a given loss, against synchronous training.

    python perf/bench_local_sgd.py [--quick] [--worlds NAME ...] [--json FILE]

One job trains a network of 25.2 M parameters with all methods, from the same weights and with the
same samples; ``local_sgd_job.py`` describes the task. The worlds are two ranks on one node, and
four virtual nodes of two ranks each, with links as in ``bench_network.py``, which needs root. With
``--quick`` there are two nodes and few steps. The target is the loss of synchronous training after
``--steps`` steps plus half a per cent, so that rounding does not decide about a round. The other
methods train until they reach the target, in complete rounds, at least as many steps as
synchronous training and at most twice as many. Seconds are the time of the slowest rank, bytes are
the sum of bytes that the network adapters of all nodes sent. Ratios are the value of synchronous
training over that of the method: above 1 the method needs less.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.core.units import format_bytes
from tests.cluster.vcluster import VirtualCluster

JOB = Path(__file__).resolve().with_name("local_sgd_job.py")
LEAST_SPEEDUP, MOST_LOSS, MOST_BYTES = 3.0, 0.01, 0.02
"""Required ratios on the cluster: speed-up, fraction of loss above, fraction of bytes saved."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Nodes of two ranks each, and the links between them."""

    title: str
    nodes: int
    rate: str
    quick_steps: int


WORLDS = {
    "one-node": World(title="1 node x 2 ranks", nodes=1, rate="200mbit", quick_steps=8),
    "cluster": World(
        title="4 nodes x 2 ranks, 200 Mbit/s", nodes=4, rate="200mbit", quick_steps=4
    ),
    "two-nodes": World(title="2 nodes x 2 ranks, 1 Gbit/s", nodes=2, rate="1gbit", quick_steps=4),
}


def run(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Build the cluster, run the job and return its results."""
    steps = world.quick_steps if options.quick else options.steps
    rounds = [2, 4] if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(JOB), "--json", str(file)]
        words += ["--steps", str(steps), "--look", str(min(rounds))]
        words += ["--rounds", *map(str, rounds)]
        with VirtualCluster(nodes=world.nodes, rate=world.rate) as cluster:
            done = cluster.run(
                words,
                ranks_per_node=[2] * world.nodes,
                env={"XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1"},
                timeout_s=options.timeout,
            )
        if done.returncode:
            raise SystemExit(
                f"{world.title} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = rows_of(found, steps)
    return {"world": world.title, "steps": steps, "rows": rows, **found}


def rows_of(found: Mapping[str, Any], steps: int) -> list[dict[str, Any]]:
    """Return the results of each method as flat records; the first is synchronous training."""
    rows: list[dict[str, Any]] = []
    for name, figures in found["ways"].items():
        looks, per_round = figures["looks"], figures["steps of a round"]
        taken, seconds = looks[-1]["step"], sum(look["seconds"] for look in looks[1:])
        num_bytes = sum(look["bytes"] for look in looks[1:])
        after = next(look["loss"] for look in looks if look["step"] >= steps)
        reached = [n for n, look in enumerate(looks) if look["loss"] <= found["target"]]
        to_target = looks[1 : reached[0] + 1] if reached else []
        row = {
            "way": name,
            "steps of a round": per_round,
            "steps": to_target[-1]["step"] if to_target else None,
            "rounds": to_target[-1]["step"] // per_round if to_target else None,
            "seconds": sum(look["seconds"] for look in to_target) if to_target else None,
            "bytes": sum(look["bytes"] for look in to_target) if to_target else None,
            "seconds of a step": seconds / taken,
            "bytes of a step": num_bytes / taken,
            "loss": after,
        }
        first = rows[0] if rows else row
        row["times faster"] = first["seconds"] / row["seconds"] if to_target else None
        row["times less bytes"] = (
            first["bytes"] / row["bytes"] if to_target and row["bytes"] else None
        )
        row["loss / synchronous"] = after / first["loss"]
        rows.append(row)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Print each required ratio, and whether the results of the cluster reach it."""
    synchronous, *others = rows
    best = max(others, key=lambda row: row["times faster"] or 0.0)
    faster = best["times faster"] or 0.0
    asked = f"at least {LEAST_SPEEDUP:g}"
    time_of = f"time to the loss: synchronous / {best['way']}"
    lines = [_line(time_of, faster >= LEAST_SPEEDUP, f"{faster:.2f}, {asked}")]
    for row in others:
        if row["way"] == best["way"] or _is_plain(row):
            loss = row["loss / synchronous"] - 1
            off = f"{loss:+.2%} off, at most {MOST_LOSS:+.0%}"
            loss_of = f"loss after equally many steps: {row['way']}"
            lines.append(_line(loss_of, loss <= MOST_LOSS, off))
    for row in filter(_is_plain, others):
        steps = row["steps of a round"]
        wrong = row["bytes of a step"] * steps / synchronous["bytes of a step"] - 1
        off = f"1/{steps} of synchronous but for {wrong:+.2%}, at most {MOST_BYTES:.0%}"
        lines.append(_line(f"bytes on the wire: {row['way']}", abs(wrong) <= MOST_BYTES, off))
    return lines


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print a table of one world."""
    title = (
        f"{result['world']}: to the loss {result['target']:.4f}, that of {result['steps']} "
        f"synchronous steps"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("way", no_wrap=True)
    heads = ("steps", "rounds", "seconds", "times faster", "s per step", "bytes", "times less")
    for head in (*heads, f"loss at {result['steps']}", "/ synchronous"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["way"],
            _cell(row["steps"], "d"),
            _cell(row["rounds"], "d"),
            _cell(row["seconds"], ".1f"),
            _cell(row["times faster"], ".2f"),
            f"{row['seconds of a step']:.3f}",
            "-" if row["bytes"] is None else format_bytes(row["bytes"]),
            _cell(row["times less bytes"], ".2f"),
            f"{row['loss']:.4f}",
            f"{row['loss / synchronous']:.4f}",
        )
    console.print(table)
    for line in result["verdicts"]:
        console.print(line)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _is_plain(row: Mapping[str, Any]) -> bool:
    return row["way"].startswith("LocalSGD") and "bf16" not in row["way"]


def _line(what: str, holds: bool, figures: str) -> str:  # noqa: FBT001 - reads well where it is called
    return f"{what}: {figures}: {'met' if holds else 'MISSED'}"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="few steps, for a test of the program"
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, help="by default two of them")
    parser.add_argument("--steps", type=int, default=16, help="of synchronous training")
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[4, 8, 16], help="steps of LocalSGD's rounds"
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds that a world may take"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    everything = ["one-node", "two-nodes" if options.quick else "cluster"]
    options.worlds = options.worlds or everything
    if any(options.steps % steps for steps in options.rounds):
        parser.error("--steps must be a multiple of each value of --rounds")
    return options


def main() -> None:
    """Run a job in each world; print and write the results."""
    options = arguments()
    console = Console(width=150, height=50, highlight=False)
    results = []
    for name in options.worlds:
        result = run(WORLDS[name], options)
        result["verdicts"] = verdicts(result["rows"]) if name == "cluster" else []
        results.append(result)
        show(console, result)
    if options.json:
        text = json.dumps({"results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
