"""The results of the benchmarks in one table of ratios, or regressions against other results.

    python perf/table.py [FOLDER] [--markdown]
    python perf/table.py FOLDER --against OLD

A ratio is the time of a peer over that of hpctrain, or the speed of hpctrain over that of a peer:
above 1 hpctrain is faster. The spread of a ratio is its range over the rounds; if a file has no
spread, 25 % up and down are assumed. A ratio is worse if it is smaller and its spread is below the
spread of the old ratio; then the exit code is 1.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpctrain.core.units import format_bytes

RESULTS = Path(__file__).with_name("results")
UNKNOWN_NOISE = 0.25
SIZES = ("64.0 KiB", "1.0 MiB", "16.0 MiB", "64.0 MiB")  # of an all-reduce, in the table
FEW = 10  # smaller ratios are shown with decimals
NAMED = {"many": "1000 of 4 KiB", "small": "8 B", "big": "64 MiB"}
MPI = {"openmpi": "Open MPI", "mpich": "MPICH"}
RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
BETWEEN_NODES = 1 << 20  # bytes of an all-reduce between nodes, in the table

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of a peer to hpctrain in one case of a benchmark."""

    what: str
    peer: str
    case: str
    value: float
    spread: Sequence[float] = ()
    """Least and most in the rounds."""
    is_shown: bool = True
    """Whether the table shows the ratio; all ratios are compared."""
    date: str = ""
    """Date of the measurement; empty if the file has none."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Measurement, peer and case of the ratio."""
        return self.what, self.peer, self.case

    @property
    def bounds(self) -> tuple[float, float]:
        """The measured spread, or the assumed one, extended to the value."""
        noise = self.value * (1 - UNKNOWN_NOISE), self.value * (1 + UNKNOWN_NOISE)
        # The median of all calls may be outside of the range of medians of the rounds.
        bounds = (self.value, *(self.spread or noise))
        return min(bounds), max(bounds)


def spread(peer: Sequence[float], ours: Sequence[float], rounds: int) -> tuple[float, float]:
    """Return the range over the rounds of the median of a peer over the median of hpctrain."""
    rounds = min(rounds, len(ours))  # a quick run has fewer
    calls = len(ours) // rounds
    ratios = [
        statistics.median(peer[begin : begin + calls])
        / statistics.median(ours[begin : begin + calls])
        for begin in range(0, calls * rounds, calls)
    ]
    return min(ratios), max(ratios)


def of_allreduce(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of all-reduces inside a node, on a bucket."""
    for row in found["rows"]:
        for column, value in row.items():
            peer, _, ours = column.partition(" / ")
            if ours == "bucket":
                yield Ratio(
                    what=f"all-reduce, {found['machine']['ranks']} ranks on one node",
                    peer=peer,
                    case=row["size"],
                    value=value,
                    spread=found.get("spreads", {}).get(f"{column}, {row['size']}", ()),
                    is_shown=row["size"] in SIZES,
                )


def of_named(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of named operations."""
    for name, value in found["ratios"].items():
        if match := re.fullmatch(r"(\w+) / hpctrain, (\w+)", name):
            yield Ratio(
                what=f"named operations, {found['stem'].rpartition('-')[2]} ranks on one node",
                peer=match[1],
                case=NAMED.get(match[2], match[2]),
                value=value,
                spread=found.get("spreads", {}).get(name, ()),
            )


def of_step(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of the training step to DDP."""
    name = "ddp gloo / hpctrain"
    yield Ratio(
        what=f"training step, {found['machine']['ranks']} ranks on one node",
        peer="DDP",
        case="25 M weights",
        value=found["ratios"][name],
        spread=found.get("spreads", {}).get(name, ()),
    )


def of_torch_distributed(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of the backend of torch.distributed inside a node."""
    for name, value in found["ratios"].items():
        of, _, case = name.partition(", ")
        if of != "gloo / hpctrain":  # the step of ranks that exchange nothing, over one that does
            continue
        yield Ratio(
            what=f"torch.distributed, {found['machine']['ranks']} ranks on one node",
            peer="gloo",
            case=case,
            value=value,
            spread=found.get("spreads", {}).get(name, ()),
        )


def of_torch_network(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of the backend of torch.distributed between nodes."""
    for row in found["results"]:
        for peer in ("MPI", "gloo"):
            times = row["all seconds"]
            yield Ratio(
                what=f"torch.distributed, {row['cluster']} ranks, {RATES[row['rate']]}, 16 MiB",
                peer=peer,
                case=row["operation"],
                value=row["seconds"][peer] / row["seconds"]["hpctrain"],
                spread=spread(times[peer], times["hpctrain"], rounds=5),
            )


def of_engines(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of the training step and of all-reduces to Horovod."""
    for world in found["summary"]:
        for peer, (middle, *bounds) in world["ratios"].items():
            if peer != "no communication":
                yield Ratio(
                    what=f"training step, {world['world']}",
                    peer=peer.partition(",")[0],
                    case=peer.partition(", ")[2] or "defaults",
                    value=middle,
                    spread=bounds,
                    is_shown=peer.startswith("Horovod"),
                )


def of_network(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of all-reduces between nodes to the best of MPI and gloo."""
    for row in found["results"]:
        rate = RATES.get(row["rate"], row["rate"])
        every = row.get("all seconds", {})
        both = every.get(row["best peer"]), every.get("bucket")
        yield Ratio(
            what=f"all-reduce between nodes, {MPI[row['mpi']]}, {rate}",
            peer="best of MPI and gloo",
            case=f"{row['cluster']}, {format_bytes(row['bytes'])}",
            value=row["best peer / bucket"],
            spread=spread(*both, rounds=5) if all(both) else (),
            is_shown=row["bytes"] == BETWEEN_NODES,
            date=row.get("date", ""),
        )


def of_local_sgd(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of the time to a loss, to synchronous training."""
    for world in found["results"]:
        for row in world["rows"][1:]:
            if row["times faster"]:
                yield Ratio(
                    what=f"time to a loss, {world['world']}",
                    peer="a sum in every step",
                    case=row["way"],
                    value=row["times faster"],
                    is_shown=row["way"].startswith("LocalSGD") and "bf16" not in row["way"],
                )


def of_data(found: Record) -> Iterator[Ratio]:
    """Yield the ratios of reading samples in random order; quick runs have smaller data sets."""
    promised = {name.partition(" (")[0] for name in found["ratios"]}
    quick = ", small sets" if found["stem"].endswith("quick") else ""
    for row in found["rows"]:
        if isinstance(row["ours / way"], float) and not row["way"].startswith("hpctrain"):
            case = f"{row['sample']}, batch {row['batch']}"
            yield Ratio(
                what=f"samples in random order, {row['cache']}{quick}",
                peer=row["way"],
                case=case,
                value=row["ours / way"],
                spread=[row["least"], row["most"]] if "least" in row else (),
                is_shown=f"{row['cache']}, {case}: ours / {row['way']}" in promised
                and "GB" not in case,
            )


READERS: dict[str, Callable[[Record], Iterator[Ratio]]] = {
    "allreduce": of_allreduce,
    "named": of_named,
    "step": of_step,
    "torch-distributed": of_torch_distributed,
    "torch-network": of_torch_network,
    "engines": of_engines,
    "network": of_network,
    "local-sgd": of_local_sgd,
    "data": of_data,
}


def read(folder: Path) -> tuple[list[Ratio], dict[str, str]]:
    """Return the ratios of all files in a folder, and the machine of each file."""
    ratios: list[Ratio] = []
    about: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        names = [n for n in READERS if re.fullmatch(rf"{n}(-\d+|-\d?[gm]bit|-[a-z]*)?", path.stem)]
        if not names or path.stem == "local-sgd-accuracy":
            continue  # its measurements have no peer
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = _machine(found)
        of_file = READERS[names[0]](found | {"stem": path.stem})
        ratios += [replace(r, date=r.date or machine.get("date", "")) for r in of_file]
        about[path.stem] = f"{machine['cores of the machine']} cores of {machine['cpu']}"
    if not ratios:
        raise SystemExit(f"no results of benchmarks in {folder}; run: make bench")
    return ratios, about


def _machine(found: Record) -> Record:
    """Return the first description of a machine in a file."""
    if "cpu" in found:
        return found
    inner = [each for each in found.values() if isinstance(each, dict)]
    inner += [each for some in found.values() if isinstance(some, list) for each in some]
    described = (_machine(each) for each in inner if isinstance(each, dict))
    return next((each for each in described if each), {})


def rows_of(ratios: Sequence[Ratio]) -> list[tuple[str, str, str, str]]:
    """Return the rows: benchmark, peer, the ratio of each case, and the date."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for ratio in sorted(ratios, key=lambda ratio: ratio.what):
        if ratio.is_shown:
            digits = 0 if ratio.value >= FEW else 1 if ratio.value >= 1 else 2
            names = ratio.what, ratio.peer, ratio.date
            rows.setdefault(names, []).append(f"{ratio.case} {ratio.value:.{digits}f}")
    return [(what, peer, "; ".join(cases), date) for (what, peer, date), cases in rows.items()]


def markdown(ratios: Sequence[Ratio]) -> str:
    """Return the table as perf/README.md quotes it."""
    lines = ["| what | against | ratio | measured |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(ratios)]
    return "\n".join(lines) + "\n"


def worse(new: Sequence[Ratio], old: Sequence[Ratio]) -> list[tuple[Ratio, Ratio]]:
    """Return the ratios that are worse beyond noise, each with its old ratio."""
    before = {ratio.key: ratio for ratio in old}
    pairs = [(ratio, before[ratio.key]) for ratio in new if ratio.key in before]
    if not pairs:
        raise SystemExit("nothing to compare: no ratio is in both folders")
    return [
        (ratio, then)
        for ratio, then in pairs
        if ratio.value < then.value and ratio.bounds[1] < then.bounds[0]
    ]


def main() -> None:
    """Print the table, or compare with other results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="of the results")
    parser.add_argument("--markdown", action="store_true", help="print it for perf/README.md")
    parser.add_argument("--against", type=Path, metavar="OLD", help="other results")
    options = parser.parse_args()
    ratios, about = read(options.folder)
    console = Console(width=150, height=50, highlight=False)
    if options.markdown:
        console.print(markdown(ratios), end="", soft_wrap=True, markup=False)
    elif options.against is None:
        table = Table("what", "against", "ratio: above 1 ours is faster", "measured")
        for row in rows_of(ratios):
            table.add_row(*row)
        console.print(table)
        for facts in dict.fromkeys(about.values()):
            files = ", ".join(stem for stem, other in about.items() if other == facts)
            console.print(f"{files}: {facts}", style="dim")
    else:
        old, _ = read(options.against)
        found = worse(ratios, old)
        for ratio, then in found:
            bounds = (f"{least:.2f} to {most:.2f}" for least, most in (ratio.bounds, then.bounds))
            console.print(
                f"worse: {ratio.what}, against {ratio.peer}, {ratio.case}: {ratio.value:.2f} "
                "({}), it was {:.2f} ({})".format(next(bounds), then.value, next(bounds))
            )
        both = {ratio.key for ratio in ratios} & {ratio.key for ratio in old}
        console.print(f"{len(both)} ratios compared, {len(found)} worse beyond noise")
        raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
