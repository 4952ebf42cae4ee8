"""Codecs: cost of coding on one core, and an all-reduce between nodes with each codec.

    python perf/bench_codecs.py [--quick] [--json FILE]

The first table codes and decodes a bucket on one core, without a link: in one call, and in all
calls of a node in a step, which also decodes received data and codes the sum. Times are divided by
the time of a copy of as many bytes. The second table reduces a bucket between nodes of a virtual
cluster, if the machine supports one (``python -m tests.cluster.vcluster``), with all codecs
interleaved in one job, and counts the bytes that leave the nodes. Ratios are the time without
compression over the time with the codec: above 1 the codec is faster.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from codecs_job import CODECS
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.comm.bucket import Bucket
from hpctrain.compress.by_name import codec_for
from hpctrain.compress.quantized import _CHUNK as CHUNK
from hpctrain.compress.quantized import Quantized
from hpctrain.compress.rail_codec import RailCodec
from hpctrain.core.units import MIB
from tests.cluster.vcluster import VirtualCluster

ROOT = Path(__file__).resolve().parents[1]
ROWS = 1024  # a matrix of 1024 rows and columns has 4 MiB
CLUSTERS = (("1gbit", 2, 2), ("200mbit", 4, 2))


class Mirror:
    """Simulated link between two ranks: the other rank sends the data of this rank."""

    rank, size, levels = 0, 2, None

    def allreduce_(self, tensor: Tensor, *, scale: float | None = None) -> "Mirror":
        """Add the tensor to itself."""
        tensor.mul_(2.0 if scale is None else 2.0 * scale)
        return self

    def alltoall(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensor for this rank, twice."""
        return [tensors[0], tensors[0].clone()]

    def wait(self) -> None:
        """No-op: all operations are complete."""


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call."""
    work()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def coding(num_bytes: int, rounds: int) -> list[dict[str, float | str]]:
    """Time each codec on one core."""
    torch.set_num_threads(1)
    matrices = num_bytes // (4 * ROWS * ROWS)
    values = torch.randn(matrices, ROWS, ROWS)
    copy = torch.empty_like(values)
    copy_s = seconds_of(lambda: copy.copy_(values), rounds)
    rows = []
    for name in CODECS:
        codec = codec_for(name)
        bucket = Bucket(values.view(-1))
        half = torch.empty_like(values, dtype=torch.bfloat16)
        work: Callable[[], object] = partial(_rounded, values, half)
        if isinstance(codec, RailCodec):
            codec.prepare(bucket, [*values, bucket.flat[:0]], Mirror())
            work = partial(codec.allreduce_, bucket, Mirror(), scale=0.5)
        if name not in ("none", "auto"):
            taken = seconds_of(work, rounds)
            values.normal_()
            once = taken
            if isinstance(codec, Quantized):
                once = seconds_of(partial(_coded, codec, bucket, copy.view(-1)), rounds)
            rows.append(
                {
                    "codec": name,
                    "once": once / copy_s,
                    "in a step": taken / copy_s,
                    "seconds of a step": taken,
                }
            )
    return rows


def _coded(codec: Quantized, bucket: Bucket, out: Tensor) -> None:
    share, form = codec._prepared[id(bucket)].share, codec._form  # noqa: SLF001 - its inside
    for start in range(0, share.numel, CHUNK):
        piece = slice(start, min(start + CHUNK, share.numel))
        form.unpack(share, piece, form.pack(share, piece, bucket.flat[piece]), out[piece])


def _rounded(values: Tensor, half: Tensor) -> None:
    values.copy_(half.copy_(values))


def between_nodes(rate: str, nodes: int, ranks: int, num_bytes: int, rounds: int) -> dict:
    """Run the job on a virtual cluster and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(ROOT / "perf/codecs_job.py"), "--json", str(file)]
        words += ["--rounds", str(rounds), "--bytes", str(num_bytes)]
        with VirtualCluster(nodes=nodes, rate=rate) as cluster:
            done = cluster.run(words, ranks_per_node=[ranks] * nodes, timeout_s=300)
        if done.returncode:
            raise SystemExit(f"{rate} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return {"rate": rate, "nodes": nodes, "ranks per node": ranks} | json.loads(
            file.read_text(encoding="ascii")
        )


def show(title: str, rows: list[dict[str, float | str]]) -> None:
    """Print rows as a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.3g}" for v in row.values()))
    Console(width=150).print(table)


def main() -> None:
    """Run the requested measurements, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    num_bytes, rounds = (16 * MIB, 3) if options.quick else (100 * MIB, 5)
    rows = coding(num_bytes, rounds)
    show(f"coding and decoding {num_bytes // MIB} MiB on one core", rows)
    jobs = []
    for rate, nodes, ranks in CLUSTERS[-1:] if options.quick else CLUSTERS:
        found = between_nodes(rate, nodes, ranks, (8 if options.quick else 64) * MIB, rounds)
        show(f"all-reduce, {nodes} nodes x {ranks}, {rate}", found["rows"])
        jobs.append(found)
    if options.json:
        text = json.dumps({"coding": rows, "jobs": jobs}, indent=1)
        options.json.write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
