"""Measure the bytes that leave a node by its network adapter, and the bytes of each codec.

``test_card.py`` starts this program on virtual nodes. Rank 0 prints one line of JSON. For
each codec, the line has the bytes that every rank's node has sent, and the bytes that the codec
reports.
"""

import json
import sys
import time

import torch

import hpctrain
from hpctrain.compress.by_name import codec_for
from hpctrain.runtime.world import current
from tests.comm.network_job import sent_bytes
from tests.compress.nodes import Gradients, drawn

SHAPES = ((1024, 1024), (1024, 1024), (1000,))
STEPS = 4
SETTLE_S = 0.1


def main(names: list[str]) -> None:
    hpctrain.init()
    comm = current().comm
    found = {}
    for name in names:
        gradients = Gradients(codec_for(name), comm, SHAPES, torch.float32)
        gradients.reduce(drawn(comm.rank, 0, SHAPES, torch.float32))
        comm.barrier()
        time.sleep(SETTLE_S)  # late acknowledgements have been sent too
        comm.barrier()
        before, claimed = sent_bytes(), 0
        for _ in range(STEPS):
            gradients.codec.allreduce_(gradients.bucket, comm, scale=1 / comm.size).wait()
            claimed += gradients.codec.num_bytes(gradients.bucket)
        comm.barrier()
        time.sleep(SETTLE_S)
        found[name] = comm.allgather_object(sent_bytes() - before), claimed
    if comm.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
