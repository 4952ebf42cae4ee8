"""One job of ``bench_codecs.py`` on the ranks of a cluster: a bucket with each codec."""

import argparse
import json
from pathlib import Path

import torch
from measure import interleave, median
from network_job import bytes_out

import hpctrain as hvd
from hpctrain.compress.by_name import codec_for
from hpctrain.runtime.world import current

CODECS = ("none", "bf16", "int8", "one_bit", "sign", "top_k", "dgc", "power_sgd", "qsgd", "auto")
ROWS = 1024


def main() -> None:
    """Time all codecs and count their bytes. Collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    hvd.init()
    comm = current().comm
    matrices = options.bytes // (4 * ROWS * ROWS)
    works, claims, names = {}, {}, {}
    for name in CODECS:
        codec, bucket = codec_for(name), comm.new_bucket(matrices * ROWS * ROWS, torch.float32)
        parts = [*bucket.flat.view(matrices, ROWS, ROWS), bucket.flat[:0]]
        codec.prepare(bucket, parts, comm)
        bucket.flat.normal_()
        works[name] = lambda codec=codec, bucket=bucket: codec.allreduce_(
            bucket, comm, scale=1 / comm.size
        ).wait()
        claims[name] = lambda codec=codec, bucket=bucket: codec.num_bytes(bucket)
        names[name] = getattr(codec, "name", "")
    taken = interleave(works, rounds=options.rounds)
    rows = []
    for name, work in works.items():
        sent = bytes_out(work, options.bytes)
        rows.append(
            {
                "codec": f"{name} ({names[name]})" if names[name] else name,
                "ms": 1e3 * median(taken[name]),
                "none / codec": median(taken["none"]) / median(taken[name]),
                "bytes out / message": sent,
            }
        )
    if comm.rank == 0:
        options.json.write_text(json.dumps({"rows": rows}), encoding="ascii")
    hvd.shutdown()


if __name__ == "__main__":
    main()
